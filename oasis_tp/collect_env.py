"""`oasis-tp collect-env`: what this machine has that decides how oasis_tp runs here. No names, no paths."""

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from oasis_tp import __version__, numa

PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "tokenizers", "deepspeed", "mpi4py"),
    *("transformers", "fastapi", "uvicorn"),
)
LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed")


def collect() -> dict[str, str]:
    """What there is, by name."""
    return _machine() | _devices() | {name: _version(name) for name in PACKAGES}


def main(argv: Sequence[str] | None = None) -> int:
    """Print it, a line each. Returns 0."""
    parser = argparse.ArgumentParser(prog="oasis-tp collect-env", description="Print what this machine has.")
    parser.parse_args(argv)
    for name, text in collect().items():
        print(f"{name:<15}{text}")
    return 0


def _machine() -> dict[str, str]:
    from oasis_tp.engine.memory import GIB, available_host_bytes

    allowed, shm = len(os.sched_getaffinity(0)), Path("/dev/shm")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "oasis-tp": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{platform.machine()}, {os.cpu_count()} cores, {allowed} of them for this process",
        "NUMA nodes": str(len(numa.nodes_with_memory())),
        "memory": f"{available_host_bytes() / GIB:.1f} GiB available to this process",
        "/dev/shm": f"{shutil.disk_usage(shm).free / GIB:.2f} GiB free" if shm.is_dir() else "none",
        "locked memory": "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / GIB:.3f} GiB",
        "C++ compiler": "found" if shutil.which("c++") else "none: decoding on the CPU is several times slower",
        "launchers": ", ".join(name for name in LAUNCHERS if shutil.which(name)) or "none",
    }


def _devices() -> dict[str, str]:
    import torch

    facts = {"CUDA": str(torch.version.cuda or "not in this torch")}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{gpu.name}, {gpu.total_memory >> 30} GiB"
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
