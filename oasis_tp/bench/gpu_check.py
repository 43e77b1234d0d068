"""Check the Triton kernels on this machine: each against its slow reference, then all of a decode step together.

On a GPU: fp32, fp16 and bf16; a step captured in a CUDA graph against the same step launched one by one; then the speed
of a step's kernels and of gathering from host memory. Without a GPU the small shapes run in triton's interpreter, in
fp32 and fp16 (its bf16 products are wrong), so that this script never rots. The last line printed is JSON; the exit
code is 1 if any check failed, and nothing is timed then.

Needs torch, triton and numpy alone.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

SHAPES = {
    # group, head_dim, count, bits
    "cpu": [(3, 64, 33, 2), (1, 128, 9, 1)],
    "cuda": [(1, 64, 1, 1), (3, 64, 65, 2), (4, 128, 63, 2), (8, 128, 257, 1)],
}
SPEED_SHAPES = [(16384, 1), (16384, 16), (131072, 1)]  # context, batch; heads of an 8B model
SPEED_BUDGET_TOKENS = 1024


def check_kernels(device: torch.device, kernels: Sequence[str]) -> list[dict[str, Any]]:
    """Every kernel and dtype over the device's shapes; `share` is the largest error over its tolerance."""
    from oasis_tp.bench.kernel_cases import CASES, Case, worst
    from oasis_tp.bench.kernel_tolerance import TOLERANCE

    if unknown := sorted(set(kernels) - set(CASES)):
        raise ValueError(f"--kernels {','.join(unknown)}: there is {','.join(CASES)}")
    rows = []
    for kernel, dtype in TOLERANCE:
        if (kernels and kernel not in kernels) or (device.type == "cpu" and dtype == torch.bfloat16):
            continue
        share = 0.0
        for group, head_dim, count, bits in SHAPES[device.type]:
            # The references of these two take long.
            few = min(count, 5) if kernel in ("seal", "rope_store") and device.type == "cpu" else count
            share = max(share, worst(kernel, Case(dtype, device, group, head_dim, few, bits=bits)))
        rows.append({"kernel": kernel, "dtype": str(dtype).split(".")[-1], "share": share, "ok": share <= 1})
        print(f"{kernel:14} {rows[-1]['dtype']:9} {share:10.3g} of the tolerance  {'ok' if share <= 1 else 'WRONG'}")
    return rows


def check_step(device: torch.device, steps: int = 3) -> bool:
    """A decode step by the kernels against the engine's torch operations, in fp32: outputs, misses and residency."""
    from oasis_tp.bench.kernel_chain import DecodeLayer
    from oasis_tp.bench.kernel_tolerance import TOLERANCE

    shape = {"num_rows": 2, "num_heads": 2, "group": 3, "head_dim": 64, "num_candidates": 40, "budget": 8}
    ours, theirs = (DecodeLayer(torch.float32, device, **shape) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    right, missing = True, 0
    for _ in range(steps):
        q = torch.randn(2, 2, 3, 64, generator=generator).to(device)
        out, missed, counts = ours.step(q)
        want, want_missed, want_counts = theirs.torch_step(q)
        right &= bool((out - want).abs().max() <= TOLERANCE["tail", torch.float32])
        right &= bool((missed - want_missed).abs().max() <= TOLERANCE["tail", torch.float32])
        right &= torch.equal(counts.cpu(), want_counts)
        right &= torch.equal(ours.residency.slot_of_block, theirs.residency.slot_of_block)
        missing += int(want_counts.sum())
    assert missing > 0, "nothing was missing: the check says nothing about copies"
    return right


def check_graph(device: torch.device, steps: int = 5) -> bool:
    """A step captured once and replayed gives the bits of steps launched one by one."""
    from oasis_tp.bench.kernel_chain import DecodeLayer

    shape = {"num_rows": 3, "num_heads": 2, "group": 4, "head_dim": 128, "num_candidates": 200, "budget": 16}
    eager, captured = (DecodeLayer(torch.bfloat16, device, **shape) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    queries = [torch.randn(3, 2, 4, 128, generator=generator).bfloat16().to(device) for _ in range(steps)]
    static = queries[0].clone()
    eager.step(queries[0])
    captured.step(static)  # compiles; a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, missed, counts = captured.step(static)
    right = True
    for q in queries[1:]:
        static.copy_(q)
        graph.replay()
        for got, want in zip((out, missed, counts), eager.step(q), strict=True):
            right &= torch.equal(got, want)
    return right and torch.equal(eager.residency.block_in_slot, captured.residency.block_in_slot)


def seconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median time of `run` with what it launched done."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def speed(device: torch.device) -> list[dict[str, Any]]:
    """A layer's decode step at the shape of an 8B model, graph-replayed, beside its ceiling."""
    from oasis_tp.bench.kernel_chain import DecodeLayer

    source, target = torch.empty(2, 2**30, dtype=torch.uint8, device=device)
    device_bytes_per_s = 2 * source.numel() / seconds(lambda: target.copy_(source))
    rows = []
    for context, batch in SPEED_SHAPES:
        layer = DecodeLayer(
            torch.bfloat16,
            device,
            num_rows=batch,
            num_heads=8,
            group=4,
            head_dim=128,
            num_candidates=context // 16 - 4,
            budget=SPEED_BUDGET_TOKENS // 16,
        )
        q = torch.randn(batch, 8, 4, 128, device=device, dtype=torch.bfloat16)
        layer.step(q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.step(q)
        step_s = seconds(graph.replay)
        scanned = batch * layer.last * sum(x[0, 0].numel() * x.element_size() for x in layer.sketch.tensors())
        attended = batch * layer.rows.bounds.max_attended * layer.kv[0].numel() * layer.kv.element_size()
        ceiling_s = (scanned + attended) / device_bytes_per_s
        rows.append(
            {
                "context": context,
                "batch": batch,
                "us_per_layer": round(step_s * 1e6, 1),
                "ceiling_us": round(ceiling_s * 1e6, 1),
                "dense_ceiling_us": round(batch * context * 8 * 2 * 128 * 2 / device_bytes_per_s * 1e6, 1),
            }
        )
        print(" ".join(f"{key} {value}" for key, value in rows[-1].items()))
        del layer, graph
    return rows


def gather_speed(device: torch.device) -> dict[str, float]:
    """GB/s of gathering scattered blocks from pinned memory, beside one large copy of the same bytes."""
    from oasis_tp.kernels.gather import gather

    heads, count = 8, 2048
    host = torch.zeros(heads, 2 * count, 2, 16, 128, dtype=torch.bfloat16).pin_memory()
    kv = torch.zeros(count, heads, 2, 16, 128, dtype=torch.bfloat16, device=device)
    sources = torch.stack([torch.randperm(2 * count)[:count] for _ in range(heads)])[None].int().to(device)
    targets = torch.arange(count, dtype=torch.int32, device=device).expand(1, heads, -1).contiguous()
    counts = torch.full((1, heads), count, dtype=torch.int32, device=device)
    size = kv.numel() * kv.element_size()
    half = host[:, :count].flatten()[: kv.numel()].pin_memory()
    return {
        "gather_gb_s": round(size / seconds(lambda: gather(host, kv, sources, targets, counts)) / 1e9, 1),
        "memcpy_gb_s": round(size / seconds(lambda: kv.view(-1).copy_(half, non_blocking=True)) / 1e9, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="oasis_tp.bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kernels", default="", metavar="A,B", help="check these alone (default: all)")
    parser.add_argument("--no-speed", action="store_true", help="on a GPU: check, do not time")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, triton's interpreter"
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is loaded, which is below
    import triton

    print(f"{name}; torch {torch.__version__}, triton {triton.__version__}")
    try:
        kernels = check_kernels(device, [kernel for kernel in args.kernels.split(",") if kernel])
    except ValueError as error:
        print(f"oasis_tp.bench.gpu_check: {error}", file=sys.stderr)
        return 2
    summary: dict[str, Any] = {"device": name, "kernels": kernels, "step_equals_torch": check_step(device)}
    summary["graph_equals_eager"] = check_graph(device) if device.type == "cuda" else None
    right = all(row["ok"] for row in kernels) and summary["step_equals_torch"] is True
    right &= summary["graph_equals_eager"] is not False
    print(f"a step against torch: {summary['step_equals_torch']}; graph against eager: {summary['graph_equals_eager']}")
    if right and device.type == "cuda" and not args.no_speed:
        summary |= {"speed": speed(device)} | gather_speed(device)
    print(json.dumps(summary))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
