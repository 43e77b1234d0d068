"""How much memory this rank may plan with: the machine's, its cgroup's, its GPU's."""

from pathlib import Path

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import MemoryConfig
from oasis_tp.kv.layout import KvLayout

GIB = 2**30


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory a new allocation can count on: what the kernel calls available, or what the cgroup leaves, if less."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    cgroup = root / "sys/fs/cgroup"
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)


def workspace_bytes(num_rows: int, layout: KvLayout, group: int, num_blocks: int) -> int:
    """What the Triton kernels of one layer allocate at most, for rows that attend or score `num_blocks` blocks.

    Scores, shares and tail logits by candidate, lists and plans by block, and the states of split attention (one per 16
    blocks attended and per 256 candidates, see kernels/attention.py and kernels/tail_attention.py), all 4 bytes wide.
    """
    per_head = (2 * group + 1 + 4) * num_blocks + group * (num_blocks // 16 + num_blocks // 256 + 2) * (
        layout.head_dim + 1
    )
    return 4 * num_rows * layout.num_kv_heads * per_head


def kv_memory(config: MemoryConfig, tp: TpGroup, reserved_bytes: int) -> tuple[int, int]:
    """Bytes this rank may plan for device pages and for the host tier (0: no host tier).

    `reserved_bytes` of the device are for what is not allocated yet and is not pages.

    Raises:
        ValueError: a size was asked for that the machine does not have.
    """
    available, ranks = available_host_bytes(), tp.local_size
    on_cpu = tp.device.type == "cpu"
    host_gib = config.host_gib(tp.size)
    host = available // 2 // ranks if host_gib is None else int(host_gib * GIB)
    device = available // 4 // ranks if config.device_kv_gb is None else int(config.device_kv_gb * GIB)
    if (host + device * on_cpu) * ranks > available:
        asked = {
            "--host-kv-gb": config.host_kv_gb,
            "--kv-offloading-size": config.kv_offloading_size,
            "--device-kv-gb": config.device_kv_gb if on_cpu else None,
        }
        given = " ".join(f"{flag} {value:g}" for flag, value in asked.items() if value is not None)
        raise ValueError(
            f"{given}: {ranks} rank(s) on this host would take {(host + device * on_cpu) * ranks / GIB:.2f} GiB of its "
            f"memory, and {available / GIB:.2f} GiB are available; ask for less (the sizes are per rank)"
        )
    if on_cpu or config.device_kv_gb is not None:
        return device, host
    free, total = torch.cuda.mem_get_info(tp.device)
    planned = int(total * config.gpu_memory_utilization) - (total - free) - reserved_bytes
    if planned <= 0:
        raise ValueError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization:g}: weights and workspace leave no "
            "room for KV pages; raise it"
        )
    return planned, host
