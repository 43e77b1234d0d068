"""Which NUMA node a rank is bound to, read from a machine that is made of files."""

import os
from pathlib import Path

import pytest

from oasis_tp import numa


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of four cores, one GPU on the second, one that says nothing."""
    nodes = tmp_path / "devices/system/node"
    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/cpulist").write_text(cores + "\n")
    (nodes / "has_memory").write_text("0-1\n")
    for address, node in (("0000:17:00.0", 1), ("0000:e5:00.0", -1)):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_what_the_machine_says(sysfs: Path, tmp_path: Path) -> None:
    assert numa.nodes_with_memory(sysfs) == [0, 1]
    assert numa.nodes_with_memory(tmp_path / "nothing") == [0]
    assert [numa.node_of_gpu(a, sysfs) for a in ("0000:17:00.0", "0000:E5:00.0", "0000:00:00.0")] == [1, None, None]


def test_cpu_ranks_share_the_nodes_evenly() -> None:
    assert [numa.node_of_share(rank, 4, [0, 1]) for rank in range(4)] == [0, 0, 1, 1]
    assert [numa.node_of_share(rank, 3, [0, 2]) for rank in range(3)] == [0, 0, 2]
    assert numa.node_of_share(0, 1, [0, 1]) is None, "one rank may use the whole machine"
    assert numa.node_of_share(1, 2, [0]) is None


@pytest.mark.parametrize(
    ("allowed", "node", "bound"),
    [
        (range(8), 1, {2, 3, 6, 7}),
        ({0, 2, 3}, 1, {2, 3}),
        ({2, 3}, 1, None),  # its launcher has bound it already
        ({0, 1}, 1, None),  # or elsewhere: not ours to change
        (range(8), None, None),
    ],
)
def test_a_rank_keeps_to_its_node_as_far_as_its_launcher_allows(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], node: int | None, bound: set[int] | None
) -> None:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(cores))
    assert numa.bind(node, sysfs) == (bound is not None)
    assert calls == ([bound] if bound else [])


def test_lists_of_cores_read_and_written() -> None:
    for text in ("0-3,8,10-11", "5", ""):
        assert numa.format_list(numa.parse_list(text)) == text
