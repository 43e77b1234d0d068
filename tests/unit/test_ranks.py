"""Who launched this process, and where it stands."""

import os
import socket
import sys
import types
from typing import Any

import pytest

from oasis_tp.ranks import PORTS, RankInfo, derive_port, discover_ranks, first_host, free_port, tasks_on_node

SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[03-05,9]", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}  # fmt: skip
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without any launcher, in place of the process's own."""
    prefixes = ("SLURM", "OMPI", "PMI", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    fresh = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    monkeypatch.setattr(os, "environ", fresh)
    return fresh


def test_no_launcher_is_one_rank_and_a_batch_shell_is_none(env: dict[str, str]) -> None:
    assert discover_ranks() == RankInfo()
    # What a job script itself sees: its allocation's tasks, but no step of srun.
    env |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_LOCALID": "0"}
    assert discover_ranks() == RankInfo()


def test_srun(env: dict[str, str]) -> None:
    env |= SLURM
    assert discover_ranks() == RankInfo(rank=5, size=7, local_rank=1, local_size=2)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("5", "7", "1", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu03", str(derive_port("77.0")))
    assert discover_ranks() == RankInfo(rank=5, size=7, local_rank=1, local_size=2), "the second time it is the same"


def test_srun_on_one_host_meets_there_and_the_scripts_port_wins(env: dict[str, str]) -> None:
    env |= SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    env["MASTER_PORT"] = "23456"
    assert discover_ranks().local_size == 2
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "23456")


def test_torchrun_wins_over_srun_and_mpirun(env: dict[str, str]) -> None:
    env |= SLURM | TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "9"}
    assert discover_ranks() == RankInfo(rank=1, size=2, local_rank=1, local_size=2)


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """mpi4py as rank 1 of 3, on a host with two of them."""
    local = types.SimpleNamespace(rank=1, size=2, Free=lambda: None)
    world = types.SimpleNamespace(rank=1, size=3, Split_type=lambda kind: local, bcast=lambda value: ("head", 20_001))
    fake = types.SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0, finalized=False)
    fake.Finalize = lambda: setattr(fake, "finalized", True)
    module: Any = types.ModuleType("mpi4py")
    module.MPI = fake
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    return fake


@pytest.mark.parametrize(
    "marks",
    [
        {"OMPI_COMM_WORLD_SIZE": "3"},
        {"PMI_RANK": "1", "PMI_SIZE": "3"},
        SLURM | {"OMPI_COMM_WORLD_SIZE": "3"},
        SLURM | {"PMI_RANK": "1", "PMI_SIZE": "3"},
    ],
)
def test_mpirun_also_inside_a_slurm_job(env: dict[str, str], mpi: types.SimpleNamespace, marks: dict[str, str]) -> None:
    env |= marks
    assert discover_ranks() == RankInfo(rank=1, size=3, local_rank=1, local_size=2)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["RANK"]) == ("head", "20001", "1")
    assert mpi.finalized, "a rank that fails must not wait for the others in MPI"


def test_srun_that_speaks_pmi_is_srun(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    env |= SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}
    assert discover_ranks().size == 7


def test_mpirun_without_mpi4py_says_what_to_install(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    env["OMPI_COMM_WORLD_SIZE"] = "2"
    with pytest.raises(ValueError, match="mpi4py is not installed"):
        discover_ranks()


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "-1"), ("LOCAL_RANK", "")])
def test_broken_variables_are_named(env: dict[str, str], name: str, value: str) -> None:
    env |= TORCHRUN | {name: value}
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        discover_ranks()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],login1", "gpu03"), ("n[7]", "n7"), ("n[7,9]", "n7"),
        ("r[1-2]n[3,5]-ib", "r1n3-ib"), ("a-b[1-2]", "a-b1"),
    ],
)  # fmt: skip
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_tasks_on_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    for text, node in (("2", 1), ("", 0), ("two", 0)):
        with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
            tasks_on_node(text, node)


def test_a_port_that_is_taken_is_passed_over() -> None:
    port = free_port("a job")
    with socket.socket() as sock:
        sock.bind(("", port))
        sock.listen()
        other = free_port("a job")
    assert other != port and other in PORTS and port in PORTS
    assert PORTS.stop <= 32_768, "Linux gives ports from there to any connection"
