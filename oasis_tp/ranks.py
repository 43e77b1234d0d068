"""Where this process stands among the ranks of its job, whoever launched it: torchrun, mpirun, srun or DeepSpeed.

Whatever is found is exported as torchrun's variables, which torch's own rendezvous reads. No torch here: a launcher's
script may ask too.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

PORTS = range(20_000, 32_000)
"""Rendezvous ports come from here: below Linux's ephemeral range, whose ports any connection may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Where this process stands among the ranks of its job, as its launcher says."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def discover_ranks() -> RankInfo:
    """Ask the launcher's variables; without any this is a job of one rank.

    In this order: torchrun's (the DeepSpeed launcher sets them too), those of a real MPI launch (read through mpi4py),
    those of srun. mpirun comes before srun because inside a Slurm job it starts its own daemons with srun, whose
    variables its ranks inherit. What MPI or srun say is exported as torchrun's variables.

    Raises:
        ValueError: an MPI launch without mpi4py, or variables that contradict each other.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        return RankInfo(
            rank=rank,
            size=size,
            local_rank=_number("LOCAL_RANK", rank),
            local_size=_number("LOCAL_WORLD_SIZE", size),
        )
    if _launched_by_mpi(env):
        return _from_mpi()
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _from_slurm()
    return RankInfo()


def derive_port(job: str) -> int:
    """A port from a job's name: every rank finds the same without talking, and neighbours hardly ever share it."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def free_port(job: str) -> int:
    """The first port from `derive_port(job)` on that nobody on this host holds now.

    Raises:
        ValueError: all are taken.
    """
    start = derive_port(job) - PORTS.start
    for step in range(len(PORTS)):
        port = PORTS[(start + step) % len(PORTS)]
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    raise ValueError(f"no free port from {PORTS.start} to {PORTS.stop - 1}; set MASTER_PORT to one that is")


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login1` -> `gpu03`."""
    host = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if host is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodelist!r}; allowed: host names as Slurm writes them")
    return re.sub(r"\[([^\],\-]*)[^\]]*\]", r"\1", host[0])


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Slurm's `2(x3),1` -> 2 on nodes 0 to 2, 1 on node 3."""
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            break
        repeat = int(match[2] or 1)
        if node < repeat:
            return int(match[1])
        node -= repeat
    raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}, which says nothing about this node")


def _launched_by_mpi(env: Mapping[str, str]) -> bool:
    """Importing mpi4py makes any process an MPI job of one: ask it only where a launcher has left its mark."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        return True
    # srun can speak PMI too; then its own variables agree with PMI's, unlike those a daemon of mpiexec passed on.
    return "PMI_RANK" in env and env.get("PMI_SIZE") != env.get("SLURM_STEP_NUM_TASKS")


def _from_mpi() -> RankInfo:
    """Ranks by MPI's count. MPI is left at once: it only has to say who is who, and a rank that fails before the
    others have met must be able to exit without waiting for them.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError("started by mpirun, but mpi4py is not installed: pip install 'oasis-tp[mpi]'") from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = RankInfo(rank=world.rank, size=world.size, local_rank=local.rank, local_size=local.size)
    meeting = None
    if world.rank == 0:
        host = "127.0.0.1" if local.size == world.size else socket.gethostname()
        meeting = host, free_port(f"{socket.gethostname()} {os.getpid()}")
    host, port = world.bcast(meeting)
    local.Free()
    MPI.Finalize()
    _export(ranks, host, port)
    return ranks


def _from_slurm() -> RankInfo:
    """One task per rank under srun. The port follows from job and step, unless the job script has set MASTER_PORT."""
    local_size = tasks_on_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _number("SLURM_NODEID"))
    ranks = RankInfo(
        rank=_number("SLURM_PROCID"),
        size=_number("SLURM_STEP_NUM_TASKS"),
        local_rank=_number("SLURM_LOCALID"),
        local_size=local_size,
    )
    job = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    one_host = ranks.local_size == ranks.size
    _export(ranks, "127.0.0.1" if one_host else first_host(os.environ["SLURM_STEP_NODELIST"]), derive_port(job))
    return ranks


def _export(ranks: RankInfo, host: str, port: int) -> None:
    os.environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.size),
        LOCAL_RANK=str(ranks.local_rank),
        LOCAL_WORLD_SIZE=str(ranks.local_size),
    )
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; allowed: a whole number, as launchers set it")
    return int(text)
