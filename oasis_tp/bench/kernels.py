"""Time of each kernel beside torch's operations that do the same, and the share of its byte ceiling that it reaches.

On a CPU: the compiled path (products, select, attend; per layer) at the model's shapes, in fp32, over more data than
caches hold. On a GPU: the Triton kernels of a layer's decode step, each replayed from a CUDA graph. Every kernel is
checked first, against torch or kernels/reference.py; one whose check fails is not timed, and the exit code is 1.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oasis_tp.bench.arguments import check_least, numbers
from oasis_tp.bench.ceiling import bytes_per_second, seconds
from oasis_tp.bench.cpu_kernels import Timing, check_decode, check_linear, linears, time_decode, time_linear
from oasis_tp.comm import TpGroup
from oasis_tp.config import SparsityConfig
from oasis_tp.models.hub import cache_dir, resolve_model
from oasis_tp.models.registry import ModelArch, load_arch
from oasis_tp.sparse.cpu_decode import load_library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="whose shapes are timed (default: smollm2)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hugging Face id")
    parser.add_argument("--contexts", type=numbers, default=[8192], help="tokens, with commas (default: 8192)")
    parser.add_argument("--batches", type=numbers, default=[1, 4], help="rows of a step, with commas (default: 1,4)")
    parser.add_argument("--budget-tokens", type=int, default=512, help="tokens selected per row (default: 512)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of a kernel and of torch (default: 9)")


def main(args: argparse.Namespace) -> int:
    """Print the table, then one JSON line {"rows": [...]}. Returns 1 when a kernel's check failed.

    Raises:
        ValueError: an option's value that cannot be measured here.
    """
    check_least(args, contexts=1, batches=1, budget_tokens=16, rounds=1)
    if min(args.contexts) < args.budget_tokens + 512:
        raise ValueError(
            f"--contexts {min(args.contexts)}: at least --budget-tokens and 512 ({args.budget_tokens + 512}), so that "
            "there is something to select"
        )
    arch = load_arch(resolve_model(args.model, args.revision), None)
    rows = list(_gpu_rows(args, arch) if torch.cuda.is_available() else _cpu_rows(args, arch))
    print(format_rows(rows))
    print(json.dumps({"rows": rows}), flush=True)
    return 0 if all(row["ok"] for row in rows) else 1


def _cpu_rows(args: argparse.Namespace, arch: ModelArch) -> Iterator[dict[str, Any]]:
    library = load_library(cache_dir())
    if library is None:
        raise ValueError("no C++ compiler is found (CXX names one), so there is no compiled kernel to time")
    bandwidth = bytes_per_second(TpGroup.single(torch.device("cpu")))
    print(f"{args.model} on cpu, float32, {torch.get_num_threads()} thread(s), reads {bandwidth / 1e9:.1f} GB/s")
    with torch.inference_mode():
        for name in linears(arch):
            kernel = f"linear {name}"
            if not check_linear(arch, library, name):
                yield _refused(kernel, "float32")
                continue
            for batch in args.batches:
                yield _row(time_linear(arch, name, batch, library, args.rounds), "float32", bandwidth)
        right = check_decode(arch, library)
        yield from (_refused(kernel, "float32") for kernel, ok in right.items() if not ok)
        if not any(right.values()):
            return
        sparsity = SparsityConfig(budget_tokens=args.budget_tokens, hot_factor=2.0)
        for context in args.contexts:
            for batch in args.batches:
                for timing in time_decode(arch, sparsity, context, batch, library, args.rounds):
                    if right[timing.kernel]:
                        yield _row(timing, "float32", bandwidth)


def _gpu_rows(args: argparse.Namespace, arch: ModelArch) -> Iterator[dict[str, Any]]:
    # Triton is loaded only where there is a GPU for it.
    from oasis_tp.bench.gpu_check import check_kernels, gather_speed
    from oasis_tp.bench.triton_kernels import decode_rig, step_calls, time_call

    device, dtype = torch.device("cuda"), torch.bfloat16
    bandwidth, link = bytes_per_second(TpGroup.single(device)), gather_speed(device)["memcpy_gb_s"] * 1e9
    print(f"{args.model} on {torch.cuda.get_device_name()}, bfloat16, reads {bandwidth / 1e9:.0f} GB/s")
    red: set[str] = set()
    checked: set[str] = set()
    for context in args.contexts:
        for batch in args.batches:
            rig = decode_rig(arch, dtype, device, context, batch, args.budget_tokens)
            for call in step_calls(rig):
                if call.case not in checked:
                    checked.add(call.case)
                    if not all(row["ok"] for row in check_kernels(device, [call.case])):
                        red.add(call.case)
                        yield _refused(call.kernel, "bfloat16")
                if call.case in red:
                    continue
                timing = Timing(
                    kernel=call.kernel,
                    context=context,
                    batch=batch,
                    num_bytes=call.num_bytes,
                    seconds=time_call(call.run),
                    # Torch tells the device so much from the host that it cannot be captured.
                    torch_seconds=None if call.torch_run is None else seconds(call.torch_run),
                )
                yield _row(timing, "bfloat16", link if call.over_link else bandwidth)


def _row(timing: Timing, dtype: str, bytes_per_s: float) -> dict[str, Any]:
    ceiling = timing.num_bytes / bytes_per_s
    return {
        "kernel": timing.kernel,
        "dtype": dtype,
        "context": timing.context or None,
        "batch": timing.batch,
        "ok": True,
        "us": round(timing.seconds * 1e6, 1),
        "torch_us": None if timing.torch_seconds is None else round(timing.torch_seconds * 1e6, 1),
        "ceiling_us": round(ceiling * 1e6, 1),
        "ceiling_share": round(ceiling / timing.seconds, 4),
    }


def _refused(kernel: str, dtype: str) -> dict[str, Any]:
    print(f"{kernel}: its check failed, so it is not timed", flush=True)
    return {"kernel": kernel, "dtype": dtype, "ok": False}


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| kernel | context | batch | µs | torch µs | ceiling µs | of it reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row["ok"]:
            lines.append(f"| {row['kernel']} | – | – | not timed: wrong | – | – | – |")
            continue
        beside = "–" if row["torch_us"] is None else f"{row['torch_us']:.1f}"
        lines.append(
            f"| {row['kernel']} | {row['context'] or '–'} | {row['batch']} | {row['us']:.1f} | {beside} "
            f"| {row['ceiling_us']:.1f} | {100 * row['ceiling_share']:.0f} % |"
        )
    return "\n".join(lines)
