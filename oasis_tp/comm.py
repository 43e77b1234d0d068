"""TpGroup: the ranks of one tensor-parallel job, and the only caller of torch.distributed.

Two kinds of traffic: the data plane (`all_reduce`, `gather_logits`) follows the model's device; the control plane
(`broadcast`, `min_over_ranks`, `sum_over_ranks`) is small integers on the CPU through gloo.
"""

import os
import secrets
import shlex
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oasis_tp import numa
from oasis_tp.config import ParallelConfig
from oasis_tp.ranks import RankInfo, discover_ranks

SHM_PREFIX = "deepspeed_allreduce_buffer"


class TpGroup:
    """The ranks that share one model.

    `collective` says what carries the data plane: none (one rank), nccl, shm (DeepSpeed's shared-memory all-reduce)
    or gloo. Every method is a collective: all ranks call it, in the same order.
    """

    def __init__(self, ranks: RankInfo, device: torch.device, collective: str) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.local_rank = ranks.local_rank
        self.local_size = ranks.local_size
        self.device = device
        self.collective = collective
        self._reduce: Callable[[torch.Tensor], object] = {
            "none": lambda x: x,
            "nccl": dist.all_reduce,
            "gloo": dist.all_reduce if device.type == "cpu" else _reduce_through_host,
            "shm": lambda x: torch.ops.deepspeed.inference_all_reduce_(x),
        }[collective]

    @classmethod
    def single(cls, device: torch.device) -> "TpGroup":
        """A group of one: every collective is a no-op."""
        return cls(RankInfo(), device, "none")

    @classmethod
    def connect(cls, config: ParallelConfig) -> "TpGroup":
        """Join this job's ranks (or use the process group that is there) and choose what carries the collectives.

        Raises:
            ValueError: a tensor-parallel size that is not the world size, or a --comm that cannot work here.
        """
        ranks = discover_ranks()
        if config.tensor_parallel_size not in (None, ranks.size):
            raise ValueError(
                f"--tensor-parallel-size {config.tensor_parallel_size}: this job has {ranks.size} rank(s); "
                f"start it with torchrun --nproc_per_node {config.tensor_parallel_size}, or leave the option out"
            )
        device = _choose_device(config.device, ranks.local_rank, shares=config.comm == "gloo")
        if config.comm == "nccl" and device.type != "cuda":
            raise ValueError("--comm nccl: NCCL needs CUDA; on the CPU use auto, shm or gloo")
        sharers = _bind_to_node(device, ranks) if config.numa_bind else ranks.local_size
        if device.type == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
        if ranks.size == 1:
            return cls(ranks, device, "none")
        if not dist.is_initialized():
            through_nccl = device.type == "cuda" and config.comm != "gloo"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if through_nccl else "gloo",
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=timedelta(seconds=config.distributed_timeout_seconds),
                device_id=device if through_nccl else None,
            )
        return cls(ranks, device, _choose_collective(config.comm, ranks, device))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (contiguous, on the model's device) over the ranks, in place; the same bits on every rank."""
        if self.size > 1:
            assert x.is_contiguous()
            self._reduce(x)
        return x

    def gather_logits(self, shard: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor | None:
        """Collect vocabulary shards [N, local_vocab] into [N, vocab] at rank 0; None on the other ranks.

        `ranges[r]` is the slice of the vocabulary that rank r holds.
        """
        if self.size == 1:
            return shard
        num_rows = shard.shape[0]
        if self.collective == "shm":
            # Adding zeros is exact, and this all-reduce is an order of magnitude faster than any gloo call.
            whole = shard.new_zeros(num_rows, ranges[-1][1])
            start, stop = ranges[self.rank]
            whole[:, start:stop] = shard
            self.all_reduce(whole)
            return whole if self.rank == 0 else None
        width = max(stop - start for start, stop in ranges)
        padded = shard.new_zeros(num_rows, width)
        padded[:, : shard.shape[1]] = shard
        if self.collective == "gloo":
            padded = padded.cpu()
        parts = [torch.empty_like(padded) for _ in ranges] if self.rank == 0 else None
        dist.gather(padded, parts, dst=0)
        if parts is None:
            return None
        cut = [part[:, : stop - start] for part, (start, stop) in zip(parts, ranges, strict=True)]
        return torch.cat(cut, dim=1).to(shard.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `x` (CPU) to every rank, in place."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x

    def min_over_ranks(self, values: list[int]) -> list[int]:
        """Elementwise minimum of small integer lists, the same on every rank."""
        return self._reduce_integers(values, dist.ReduceOp.MIN)

    def max_over_ranks(self, values: list[int]) -> list[int]:
        """Elementwise maximum of small integer lists, the same on every rank."""
        return self._reduce_integers(values, dist.ReduceOp.MAX)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a small CPU tensor over the ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        if self.size > 1:
            self.min_over_ranks([0])

    def close(self) -> None:
        """Leave the group. Safe to call when the others are gone."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _reduce_integers(self, values: list[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        if self.size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(x, op=op)
        return [int(v) for v in x]


def _reduce_through_host(x: torch.Tensor) -> None:
    """gloo's sum of a tensor on a GPU: a copy of it is summed on the host."""
    summed = x.cpu()
    dist.all_reduce(summed)
    x.copy_(summed)


def _choose_device(name: str, local_rank: int, *, shares: bool) -> torch.device:
    """`shares`: ranks may share a GPU, which NCCL does not allow."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU is visible to torch here; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count and not shares:
        raise ValueError(f"local rank {local_rank} has no GPU: {count} visible; start at most that many ranks")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def _bind_to_node(device: torch.device, ranks: RankInfo) -> int:
    """Bind this rank near its memory. Returns how many local ranks share its cores."""
    if device.type == "cpu":
        nodes = numa.nodes_with_memory()
        bound = numa.bind(numa.node_of_share(ranks.local_rank, ranks.local_size, nodes))
        return -(-ranks.local_size // len(nodes)) if bound else ranks.local_size
    gpu: Any = torch.cuda.get_device_properties(device)
    numa.bind(numa.node_of_gpu(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"))
    return ranks.local_size


def _choose_collective(wanted: str, ranks: RankInfo, device: torch.device) -> str:
    if device.type == "cuda":
        if wanted == "shm":
            raise ValueError("--comm shm: it is for ranks on CPUs; on CUDA use auto or nccl, or gloo to share a GPU")
        return "gloo" if wanted == "gloo" else "nccl"
    if wanted == "gloo":
        return "gloo"
    why_not = _why_no_shm(ranks)
    if not _all_ranks(why_not == ""):
        if wanted == "shm":
            raise ValueError(f"--comm shm: {why_not or 'another rank cannot use it'}; use --comm auto or gloo")
        return "gloo"
    loaded = _load_shm(ranks)
    if not _all_ranks(loaded):
        if wanted == "shm":
            raise ValueError("--comm shm: DeepSpeed's shared-memory op could not be built; use --comm auto or gloo")
        return "gloo"
    return "shm"


def _why_no_shm(ranks: RankInfo) -> str:
    cores = len(os.sched_getaffinity(0))
    if ranks.local_size != ranks.size:
        return "ranks are on several hosts"
    if ranks.size > cores:
        return f"{ranks.size} ranks on {cores} cores: its spin-wait collapses when ranks outnumber cores"
    if shutil.which((shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]) is None:
        return "no C++ compiler is found"
    workspace = 70 * 2**20 * ranks.size
    if shutil.disk_usage("/dev/shm").free < workspace:
        return f"/dev/shm has less than {workspace >> 20} MiB free"
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return "the deepspeed package is not installed"
    return ""


def _all_ranks(yes: bool) -> bool:
    x = torch.tensor([int(yes)])
    dist.all_reduce(x, op=dist.ReduceOp.MIN)
    return bool(x.item())


def _load_shm(ranks: RankInfo) -> bool:
    """Build (once per machine, about 30 s) and start DeepSpeed's shared-memory all-reduce.

    Local rank 0 builds while the others wait; all then map each other's workspace, and the names are unlinked as soon
    as everybody has, so nothing stays behind in /dev/shm however the job ends.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    def load() -> object | None:
        try:
            return ShareMemCommBuilder().load(verbose=False)
        except (RuntimeError, OSError) as error:
            if ranks.rank == 0:
                print(f"oasis_tp: no shared-memory all-reduce: {str(error).splitlines()[0]}", flush=True)
            return None

    module = load() if ranks.local_rank == 0 else None
    if not _all_ranks(ranks.local_rank != 0 or module is not None):
        return False
    module = module or load()
    if not _all_ranks(module is not None and module.vector_kernel_level() >= 1):  # type: ignore[attr-defined]
        return False
    token = torch.tensor([secrets.randbits(62)])
    dist.broadcast(token, src=0)
    # The op names its workspace after these variables; a token of the job's own keeps neighbours apart.
    names = {"LOCAL_SIZE": str(ranks.size), "MASTER_ADDR": "oasis_tp", "MASTER_PORT": f"{int(token):x}"}
    before = {key: os.environ.get(key) for key in names}
    os.environ.update(names)
    try:
        module.initialize(ranks.size, ranks.rank)  # type: ignore[attr-defined]
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    dist.barrier()
    Path(f"/dev/shm/{SHM_PREFIX}_{os.getuid()}_oasis_tp_{int(token):x}_{ranks.rank}").unlink(missing_ok=True)
    return True
