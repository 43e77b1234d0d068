"""Binds a rank to the NUMA node whose memory it will use: that of its GPU, or its share of the nodes on a CPU.

Slurm and torchrun do not, and copies from a host tier on the far side of a machine are slower. Linux gives memory where
it is first touched, so to bind before anything is allocated is all there is to do.
"""

import os
import re
from pathlib import Path

SYSFS = Path("/sys")


def nodes_with_memory(sysfs: Path = SYSFS) -> list[int]:
    """NUMA nodes that have memory; a machine that names none has node 0."""
    listed = sysfs / "devices/system/node/has_memory"
    return sorted(parse_list(listed.read_text())) if listed.exists() else [0]


def node_of_gpu(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """The node a PCI device (`0000:17:00.0`) hangs on; None where the machine does not say."""
    path = sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node"
    node = int(path.read_text()) if path.exists() else -1
    return node if node >= 0 else None


def node_of_share(local_rank: int, local_size: int, nodes: list[int]) -> int | None:
    """A CPU rank's node: neighbours together, evenly. None where a rank has more than one node to itself."""
    return nodes[local_rank * len(nodes) // local_size] if local_size >= len(nodes) > 1 else None


def bind(node: int | None, sysfs: Path = SYSFS) -> bool:
    """Keep this process on a node's cores, as far as its launcher allows them; None: leave it where it is.

    Returns whether it has fewer cores now.
    """
    if node is None:
        return False
    allowed = os.sched_getaffinity(0)
    cores = allowed & parse_list((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    if not cores or cores == allowed:
        return False
    os.sched_setaffinity(0, cores)
    return True


def parse_list(text: str) -> set[int]:
    """Linux's lists: `0-3,8` -> {0, 1, 2, 3, 8}."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def format_list(numbers: set[int]) -> str:
    """The same the other way."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
