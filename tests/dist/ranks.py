"""Running a function on several CPU ranks: one spawn, each rank in a process group over gloo."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(size: int, store: Path, function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, *args)` on `size` ranks and wait for all of them; `store` is a file that does not exist."""
    mp.spawn(_run, (size, store, function, args), nprocs=size)


def _run(rank: int, size: int, store: Path, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
