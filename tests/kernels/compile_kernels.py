"""Run as a script: compile every Triton kernel for GPUs that are not here, and print what came out as JSON.

The wrappers are called with tensors of the meta device and a recorder in each kernel's place, so that what is compiled
is what a GPU would be asked for. TRITON_INTERPRET must not be set.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oasis_tp.kernels import (
    attention,
    copy_plan,
    gather,
    group_scores,
    merge_states,
    rms_norm,
    rope_store,
    rotate,
    score,
    seal,
    silu_mul,
    tail_attention,
    top_blocks,
)
from oasis_tp.kernels.rows import Bounds, Rows

MODULES = (
    *("attention", "copy_plan", "gather", "group_scores", "merge_states", "rms_norm", "rope_store", "rotate"),
    *("score", "seal", "silu_mul", "tail_attention", "top_blocks"),
)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


class Recorder:
    """Stands for a kernel and keeps its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
        assert all(size > 0 for size in grid)
        return self

    def __call__(self, *args: object, **options: object) -> None:
        self.launches.append((self.kernel, dict(zip(self.kernel.arg_names, args, strict=False)) | options))


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_all(dtype: torch.dtype, head_dim: int, bits: int) -> None:
    """Every wrapper once, as a decode step of 3 rows calls it: 2 KV heads in groups of 4, 1,000 candidates."""
    i16, i32, i64, f16, f32 = torch.int16, torch.int32, torch.int64, torch.float16, torch.float32
    num_rows, heads, group, blocks, block, candidates = 3, 2, 4, 1004, 16, 1000
    bounds = Bounds(
        max_candidates=candidates,
        max_chosen=64,
        max_attended=80,
        max_reach=80,
        max_limit=32,
        max_slots=160,
        waves=(2, 1),
    )
    rows = Rows(meta(num_rows, 12, dtype=i32), meta(num_rows, dtype=i32), bounds)
    kv = meta(500, heads, 2, block, head_dim, dtype=dtype)
    host = meta(heads, 2**20, 2, block, head_dim, dtype=dtype)  # a head's blocks pass 2**31 elements
    pool = meta(3, 2**19, heads, 2, block, head_dim, dtype=dtype)  # and so do a layer's pages
    q = meta(num_rows, heads, group, head_dim, dtype=dtype)
    signs = meta(head_dim, dtype=f32)
    sketch = (
        meta(5000, heads, block, head_dim * bits // 8, dtype=torch.uint8),
        meta(5000, heads, block, dtype=f16),
        meta(5000, heads, 2, head_dim, dtype=torch.int8),
        meta(5000, heads, 2, dtype=f16),
    )
    bounds = meta(5000, heads, 2, head_dim, dtype=torch.bfloat16)
    host_table, block_table = meta(4, blocks, dtype=i32), meta(4, 160, dtype=i32)
    pages, ids = meta(num_rows, heads, dtype=i64), meta(num_rows, dtype=i64)
    fused = meta(num_rows, (group + 2) * heads, head_dim, dtype=dtype).split([group * heads, heads, heads], 1)
    angles = meta(16064, head_dim // 2, dtype=f32)
    rope_store.rope_store(*fused, angles, angles, ids, pages, kv)
    rotated = rotate.rotate(q, signs)
    layers = [x.expand(3, *x.shape).contiguous() for x in (pages, *sketch, bounds)]
    seal.seal(pool[:, :, :, 0], pool[:, :, :, 1], layers[0], ids, signs, *layers[1:5])
    seal.seal_bounds(pool[:, :, :, 0], layers[0], ids, layers[5])
    scores, tail_logits = score.score(q, rotated, host_table, rows, *sketch)
    score.score_bounds(q, host_table, rows, bounds, block)
    shares = group_scores.group_scores(scores, rows)
    chosen = top_blocks.top_blocks(shares, rows, tail_logits)
    tables = copy_plan.Tables(
        *(meta(4, heads, 160, dtype=i16), meta(4, heads, blocks, dtype=i16)),
        *(meta(4, heads, 160, dtype=i32), meta(4, heads, 160, dtype=i32)),
    )
    tick, counts = meta(1, dtype=i32), meta(num_rows, heads, 3, dtype=i32)
    plan = copy_plan.plan_copies(chosen, rows, host_table, block_table, tables, tick, counts, block)
    wanted = top_blocks.most_wanted(shares, rows)
    copy_plan.plan_ahead(wanted, rows, host_table, block_table, tables, tick, counts)
    gather.gather(host, kv, plan.sources, plan.targets, plan.num_missing)
    splits, tails = attention.num_splits(80), tail_attention.num_splits(candidates)
    states = meta(num_rows, heads, group, splits + tails, head_dim, dtype=f32)
    lse = meta(num_rows, heads, group, splits + tails, dtype=f32)
    attention.sparse_attention(q, kv, plan.pages, plan.num_tokens, states, lse)
    tail_attention.tail_attention(tail_logits, host_table, rows, sketch[2], sketch[3], states, lse, splits, dtype)
    merge_states.merge_states(states, lse, splits, rows, dtype)
    x, weight = meta(num_rows, 4096, dtype=dtype), meta(4096, dtype=dtype)
    rms_norm.rms_norm(x, weight, 1e-5, meta(num_rows, 4096, dtype=dtype))
    silu_mul.silu_mul(meta(num_rows, 2 * 14336, dtype=dtype))


def record(dtype: torch.dtype, head_dim: int, bits: int) -> list[tuple[Any, dict[str, Any]]]:
    launches: list[tuple[Any, dict[str, Any]]] = []
    originals = []
    for module in (importlib.import_module(f"oasis_tp.kernels.{name}") for name in MODULES):
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel"):
                originals.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
    try:
        launch_all(dtype, head_dim, bits)
    finally:
        for module, name, value in originals:
            setattr(module, name, value)
    assert {kernel.__name__ for kernel, _ in launches} == {name for _, name, _ in originals}, "a kernel is not called"
    return launches


def compile_one(kernel: Any, arguments: dict[str, Any], target: GPUTarget) -> Any:
    constants = {p.name for p in kernel.params if p.is_constexpr}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            # What the launcher makes of it: an annotation wins over the value.
            signature[name] = kernel.params[index].annotation_type or ("i32" if value < 2**31 else "i64")
            assert value < 2**31 or signature[name] == "i64", f"{kernel.__name__}: {name} is cut off"
        else:
            signature[name] = "fp32"
    options = {"num_warps": arguments["num_warps"]} if "num_warps" in arguments else {}
    return triton.compile(ASTSource(kernel, signature, constexprs, attributes), target=target, options=options)


def results(target: str) -> Iterator[dict[str, object]]:
    """Both code widths and head sizes; fp32, whose tiles are largest, where shared memory is smallest."""
    variants = [(torch.bfloat16, 128, 2)]
    if target == "gfx942":
        variants.append((torch.float32, 64, 1))
    for dtype, head_dim, bits in variants:
        for kernel, arguments in record(dtype, head_dim, bits):
            made = compile_one(kernel, arguments, TARGETS[target])
            yield {
                "kernel": kernel.__name__,
                "dtype": str(dtype),
                "shared_bytes": made.metadata.shared,
                "binary": sorted(set(made.asm) & {"cubin", "hsaco"}),
            }


if __name__ == "__main__":
    print(json.dumps(list(results(sys.argv[1]))))
