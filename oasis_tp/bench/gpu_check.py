"""Check the Triton kernels on this machine: each against its slow reference, then all of a decode step together, then
the engine with delays put into its copies and into its compute, and on two ranks. Then times.

On a GPU: fp32, fp16 and bf16; the speed of a layer's decode step, of each of its kernels and of gathering from host
memory; decode of a whole model of 8B parameters' shape with random weights, dense beside sparse. Without a GPU the
small shapes run in triton's interpreter, in fp32 and fp16 (its bf16 products are wrong), so that this script never
rots. The last line printed is JSON; the exit code is 1 if any check failed, and nothing is timed then.

Needs torch, triton, numpy, safetensors and tokenizers alone.
"""

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from oasis_tp.bench.agreement import check_delays, check_ranks
from oasis_tp.bench.ceiling import seconds, step_bytes
from oasis_tp.bench.decode_rig import DecodeRig
from oasis_tp.bench.gpu_decode import format_model, time_model
from oasis_tp.bench.graph_twin import recorded
from oasis_tp.config import SparsityConfig
from oasis_tp.engine.cuda_graphs import RECORD_AT, CudaRecorder, DecodeGraphs
from oasis_tp.kv.layout import KvLayout

T = TypeVar("T")
SHAPES = {
    # group, head_dim, count, bits
    "cpu": [(3, 64, 33, 2), (1, 128, 9, 1)],
    "cuda": [(1, 64, 1, 1), (3, 64, 65, 2), (4, 128, 63, 2), (8, 128, 257, 1)],
}
FEW = {"cpu": 5, "cuda": 17}
"""Most tokens where the reference takes long."""
SPEED_SHAPES = [(16384, 1), (16384, 16), (131072, 1)]  # context, batch; heads of an 8B model
SPEED_BUDGET_TOKENS = 1024
SMALL_CONTEXT = 694
RESIDENCY_TABLES = ("block_in_slot", "slot_of_block", "last_selected", "fetched")


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
            few = min(count, FEW[device.type]) if kernel in ("seal", "rope_store") else count
            case = Case(dtype, device, group, head_dim, few, bits=bits)
            share = max(share, _or_else(math.inf, lambda kernel=kernel, case=case: worst(kernel, case)))  # type: ignore[misc]
        figure = share if math.isfinite(share) else None  # JSON has no infinity
        rows.append({"kernel": kernel, "dtype": str(dtype).split(".")[-1], "share": figure, "ok": share <= 1})
        said = "ok" if share <= 1 else "WRONG"
        print(f"{kernel:14} {rows[-1]['dtype']:9} {share:10.3g} of the tolerance  {said}", flush=True)
    return rows


def _or_else(failed: T, check: Callable[[], T]) -> T:
    """What `check` returns; `failed` where it raises, so that the other checks are made all the same."""
    try:
        return check()
    except Exception:
        traceback.print_exc()
        return failed


def small_rig(
    device: torch.device, dtype: torch.dtype, *, use_triton: bool, prefetch: Literal["on", "off"]
) -> DecodeRig:
    """Two rows of two layers, five times as many candidates as are selected."""
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype_bytes=dtype.itemsize)
    sparsity = SparsityConfig(budget_tokens=128, recent_tokens=32, hot_factor=2.0, prefetch=prefetch)
    return DecodeRig(layout, 3, sparsity, SMALL_CONTEXT, 2, dtype=dtype, device=device, use_triton=use_triton)


def check_step(device: torch.device, steps: int = 2) -> bool:
    """Decode steps by the kernels against the engine's torch operations, in fp32: outputs, misses and residency."""
    from oasis_tp.bench.kernel_tolerance import TOLERANCE

    ours, theirs = (small_rig(device, torch.float32, use_triton=use, prefetch="off") for use in (True, False))
    near = TOLERANCE["tail", torch.float32]
    right = True
    for _ in range(steps):
        out, want = ours.step(), theirs.step()
        right &= bool((out - want).abs().max() <= near)
        mine, other = ours.cache.residency, theirs.cache.residency
        right &= all(torch.equal(getattr(mine, name), getattr(other, name)) for name in RESIDENCY_TABLES)
    for state, other_state in zip(ours.states, theirs.states, strict=True):
        right &= state.stats.missed_blocks == other_state.stats.missed_blocks
        share = other_state.stats.missed_mass / other_state.stats.missed_mass_count
        right &= bool((state.stats.missed_mass / state.stats.missed_mass_count - share).abs() <= near)
    assert all(state.stats.missed_blocks > 0 for state in theirs.states), "nothing was missing: nothing was copied"
    return right


def check_graph(device: torch.device, steps: int = 4) -> bool:
    """Steps that are recorded once and replayed give the bits of steps launched one by one, blocks brought in beside
    the compute included. Without a GPU the recording is that of bench/graph_twin.py.
    """
    on_cuda = device.type == "cuda"
    graphs = DecodeGraphs(CudaRecorder() if on_cuda else recorded)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    eager, captured = (small_rig(device, dtype, use_triton=True, prefetch="on") for _ in range(2))
    right = all(torch.equal(captured.step(graphs), eager.step()) for _ in range(steps))
    for state, other in zip(captured.states, eager.states, strict=True):
        right &= torch.equal(state.stats.counts, other.stats.counts)
        assert other.stats.prefetched[0] > 0, "nothing was brought in ahead: the check says nothing about it"
    assert graphs.num_replays == steps + 1 - RECORD_AT > 1
    mine, other_tables = captured.cache.residency, eager.cache.residency
    return right and all(torch.equal(getattr(mine, name), getattr(other_tables, name)) for name in RESIDENCY_TABLES)


def speed(device: torch.device, link_bytes_per_s: float) -> list[dict[str, Any]]:
    """A layer's decode step at the shape of an 8B model, graph-replayed, and each of its kernels, beside ceilings."""
    from oasis_tp.bench.triton_kernels import step_calls, time_call

    source, target = torch.empty(2, 2**30, dtype=torch.uint8, device=device)
    device_bytes_per_s = 2 * source.numel() / seconds(lambda: target.copy_(source))
    layout = KvLayout(num_layers=1, num_kv_heads=8, head_dim=128, block_size=16, dtype_bytes=2)
    sparsity = SparsityConfig(budget_tokens=SPEED_BUDGET_TOKENS, hot_factor=2.0, prefetch="off")
    rows = []
    for context, batch in SPEED_SHAPES:
        rig = DecodeRig(layout, 4, sparsity, context, batch, dtype=torch.bfloat16, device=device, use_triton=True)
        rig.step()  # compiles; a capture may not
        _, inputs, forward = rig.prepare()
        step_s = time_call(lambda inputs=inputs, forward=forward: forward(inputs))  # type: ignore[misc]
        moved, dense = (
            step_bytes(0, layout, x, context, batch).total / device_bytes_per_s * 1e6
            for x in (sparsity, SparsityConfig(attention="dense"))
        )
        rows.append(
            {
                "context": context,
                "batch": batch,
                "us_per_layer": round(step_s * 1e6, 1),
                "ceiling_us": round(moved, 1),
                "dense_ceiling_us": round(dense, 1),
            }
        )
        print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        rows[-1]["kernels"] = []
        for call in step_calls(rig):
            call_us = time_call(call.run) * 1e6
            ceiling_us = call.num_bytes / (link_bytes_per_s if call.over_link else device_bytes_per_s) * 1e6
            figures = {"us": round(call_us, 1), "ceiling_us": round(ceiling_us, 1), "share": ceiling_us / call_us}
            rows[-1]["kernels"].append({"kernel": call.kernel} | figures)
            print(
                f"  {call.kernel:16} {call_us:8.1f} µs {100 * ceiling_us / call_us:5.1f} % of its ceiling", flush=True
            )
        del rig, inputs, forward, call
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


def times(device: torch.device, ends: float) -> dict[str, Any]:
    """What is timed on this device; on a CPU only that it can be."""
    found: dict[str, Any] = {"model_is_finite": None}
    if device.type == "cuda":
        with torch.inference_mode():
            found |= gather_speed(device)
            found["speed"] = speed(device, found["memcpy_gb_s"] * 1e9)
        torch.cuda.empty_cache()  # the model's memory is planned by what is free
    try:
        found["model"] = time_model(device, ends)
    except (ValueError, torch.OutOfMemoryError) as error:
        found["model"] = {"error": str(error)}
        print(f"the model is not timed: {error}")
    except RuntimeError as error:
        found |= {"model": {"error": str(error)}, "model_is_finite": False}
        print(f"the model: WRONG, {error}")
    else:
        found["model_is_finite"] = True
        print(format_model(found["model"]["rows"]))
    return found


CHECKS: dict[str, Callable[[torch.device], bool]] = {
    "step_equals_torch": check_step,
    "graph_equals_eager": check_graph,
    "delays_change_nothing": check_delays,
    "two_ranks_agree": check_ranks,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="oasis_tp.bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kernels", default="", metavar="A,B", help="check these alone (default: all)")
    parser.add_argument("--no-speed", action="store_true", help="check, do not time")
    parser.add_argument(
        "--seconds", type=float, default=420, help="time no further row of the model after so many (default: 420)"
    )
    args = parser.parse_args(argv)
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, triton's interpreter"
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is loaded, which is below
    import triton

    print(f"{name}; torch {torch.__version__}, triton {triton.__version__}", flush=True)
    try:
        kernels = check_kernels(device, [kernel for kernel in args.kernels.split(",") if kernel])
    except ValueError as error:
        print(f"oasis_tp.bench.gpu_check: {error}", file=sys.stderr)
        return 2
    seconds_of = {"kernels": round(time.monotonic() - began, 1)}
    summary: dict[str, Any] = {"device": name, "kernels": kernels, "seconds": seconds_of}
    with torch.inference_mode():
        for check, run in CHECKS.items():
            summary[check] = _or_else(False, lambda run=run: run(device))  # type: ignore[misc]
            seconds_of[check] = round(time.monotonic() - began - sum(seconds_of.values()), 1)
            print(f"{check.replace('_', ' '):24} {'ok' if summary[check] else 'WRONG'}", flush=True)
    right = all(row["ok"] for row in kernels) and all(summary[check] for check in CHECKS)
    if right and not args.no_speed:
        summary |= times(device, began + args.seconds)
        right = summary["model_is_finite"] is not False
        seconds_of["times"] = round(time.monotonic() - began - sum(seconds_of.values()), 1)
    print(json.dumps(summary))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
