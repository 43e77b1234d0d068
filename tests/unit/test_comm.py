"""Ranks: how they are found, and that every collective gives every rank what it should."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.comm import (
    SHM_PREFIX,
    RankInfo,
    TpGroup,
    _choose_collective,
    _choose_device,
    _why_no_shm,
    discover_ranks,
)
from oasis_tp.config import ParallelConfig
from tests.dist.ranks import run_on_ranks

NO_SHM = _why_no_shm(RankInfo(rank=0, size=2, local_rank=0, local_size=2))
RANGES = {2: [(0, 7), (7, 10)], 3: [(0, 4), (4, 4), (4, 10)]}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_RANK",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_without_a_launcher_there_is_one_rank() -> None:
    assert discover_ranks() == RankInfo(rank=0, size=1, local_rank=0, local_size=1)


@pytest.mark.usefixtures("no_launcher")
def test_a_launchers_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert discover_ranks() == RankInfo(), "a stray RANK alone is no launcher"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert discover_ranks() == RankInfo(rank=5, size=8, local_rank=5, local_size=8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert discover_ranks() == RankInfo(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tensor_parallel_size": 4}, r"--tensor-parallel-size 4: this job has 1 rank\(s\).*--nproc_per_node 4"),
        ({"device": "cuda"}, "--device cuda: no GPU"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        TpGroup.connect(ParallelConfig(**config))


def test_one_rank_needs_no_collectives() -> None:
    tp = TpGroup.single(torch.device("cpu"))
    x = torch.arange(6.0).view(2, 3)
    assert tp.all_reduce(x) is x and tp.broadcast(x) is x and tp.sum_over_ranks(x) is x
    assert tp.gather_logits(x, [(0, 3)]) is x
    assert tp.min_over_ranks([3, 4]) == tp.max_over_ranks([3, 4]) == [3, 4]
    tp.barrier()
    tp.close()


def check_collectives(tp: TpGroup, rank: int, size: int) -> None:
    """On every rank: each collective against its value computed without the others."""
    parts = [torch.randn(5, 33, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    total = tp.all_reduce(parts[rank].clone())
    torch.testing.assert_close(total, torch.stack(parts).sum(0), atol=1e-5, rtol=0)
    same = [torch.empty_like(total) for _ in range(size)]
    torch.distributed.all_gather(same, total)
    assert all(torch.equal(other, total) for other in same), "ranks have different bits"
    assert torch.equal(tp.broadcast(torch.tensor([rank + 10])), torch.tensor([10]))
    assert tp.min_over_ranks([rank, -rank, 7]) == [0, 1 - size, 7]
    assert tp.max_over_ranks([rank, -rank, 2**40 + rank]) == [size - 1, 0, 2**40 + size - 1]
    assert tp.sum_over_ranks(torch.tensor([rank, 1.0], dtype=torch.float64)).tolist() == [sum(range(size)), size]
    whole = torch.randn(4, 10, generator=torch.Generator().manual_seed(9))
    whole[1, 3], whole[2, 8] = torch.nan, -torch.inf
    start, stop = RANGES[size][rank]
    gathered = tp.gather_logits(whole[:, start:stop].contiguous(), RANGES[size])
    assert (gathered is None) == (rank != 0)
    if gathered is not None:
        torch.testing.assert_close(gathered, whole, equal_nan=True, atol=0, rtol=0)
    tp.barrier()


def test_ranks_share_a_gpu_over_gloo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(ValueError, match="local rank 1 has no GPU: 1 visible"):
        _choose_device("auto", 1, shares=False)
    gpu = _choose_device("auto", 1, shares=True)
    assert gpu == torch.device("cuda", 0)
    two = RankInfo(rank=0, size=2, local_rank=0, local_size=2)
    assert [_choose_collective(name, two, gpu) for name in ("auto", "nccl", "gloo")] == ["nccl", "nccl", "gloo"]
    with pytest.raises(ValueError, match="--comm shm: it is for ranks on CPUs"):
        _choose_collective("shm", two, gpu)


def test_nccl_needs_cuda_on_one_rank_too() -> None:
    with pytest.raises(ValueError, match="--comm nccl: NCCL needs CUDA"):
        TpGroup.connect(ParallelConfig(device="cpu", comm="nccl"))


def gloo_ranks(rank: int, size: int, out: Path) -> None:
    tp = TpGroup.connect(ParallelConfig(comm="gloo", device="cpu"))
    assert (tp.rank, tp.size, tp.collective) == (rank, size, "gloo")
    check_collectives(tp, rank, size)
    refused = []
    for config in (
        {"comm": "gloo", "tensor_parallel_size": size + 1},
        {"comm": "nccl"},
        {"comm": "shm"} if size > len(os.sched_getaffinity(0)) else {"comm": "nccl"},
    ):
        try:
            TpGroup.connect(ParallelConfig(device="cpu", **config))  # type: ignore[arg-type]
        except ValueError as error:
            refused.append(str(error))
    (out / f"gloo-{size}-{rank}.json").write_text(json.dumps(refused))
    if size == 2 and not NO_SHM:
        check_shm(rank)
        (out / f"shm-{rank}").touch()


@pytest.fixture(scope="module")
def ranks_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    for size in RANGES:
        run_on_ranks(size, out / f"store{size}", gloo_ranks, size, out)
    return out


@pytest.mark.parametrize("size", RANGES)
def test_collectives_over_gloo(size: int, ranks_done: Path) -> None:
    for rank in range(size):
        refused = json.loads((ranks_done / f"gloo-{size}-{rank}.json").read_text())
        assert len(refused) == 3
        assert f"--tensor-parallel-size {size + 1}: this job has {size} rank(s)" in refused[0]
        assert refused[1].startswith("--comm nccl: NCCL needs CUDA")
        assert refused[2].startswith("--comm ")


def check_shm(rank: int) -> None:
    """Shared memory against gloo, to the bit; its names are gone as soon as both ranks have mapped them."""
    gloo = TpGroup.connect(ParallelConfig(comm="gloo", device="cpu"))
    shm = TpGroup.connect(ParallelConfig(comm="shm", device="cpu"))
    assert shm.collective == "shm"
    shm.barrier()
    assert not shm_names()
    check_collectives(shm, rank, 2)
    generator = torch.Generator().manual_seed(rank)
    for num_rows in (1, 7, 600, 3):
        x = torch.randn(num_rows, 577, generator=generator)
        # The sum of two numbers has one rounding, whoever adds them.
        assert torch.equal(shm.all_reduce(x.clone()), gloo.all_reduce(x.clone()))


def shm_names() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"{SHM_PREFIX}_{os.getuid()}_oasis_tp_")]


def test_shared_memory_gives_the_bits_of_gloo_and_leaves_nothing_behind(ranks_done: Path) -> None:
    if NO_SHM:
        pytest.skip(f"no shared-memory all-reduce: {NO_SHM}")
    assert (ranks_done / "shm-0").exists() and (ranks_done / "shm-1").exists()
    assert not shm_names()
