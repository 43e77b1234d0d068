"""How much memory a rank may plan with, on machines made of files."""

from pathlib import Path

import pytest
import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import MemoryConfig
from oasis_tp.engine import memory
from oasis_tp.engine.memory import GIB, available_host_bytes, kv_memory


def machine(root: Path, available_gib: int, limit: str | None = None, used_gib: int = 0) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_gib << 20} kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(limit + "\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used_gib * GIB}\n")
    return root


def test_the_smaller_of_kernel_and_cgroup_counts(tmp_path: Path) -> None:
    assert available_host_bytes(machine(tmp_path / "plain", 8)) == 8 * GIB
    assert available_host_bytes(machine(tmp_path / "unlimited", 8, "max")) == 8 * GIB
    assert available_host_bytes(machine(tmp_path / "limited", 8, str(4 * GIB), used_gib=1)) == 3 * GIB
    assert available_host_bytes(machine(tmp_path / "roomy", 8, str(64 * GIB))) == 8 * GIB
    assert available_host_bytes(machine(tmp_path / "full", 8, str(GIB), used_gib=2)) == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"host_kv_gb": 3.0}, "--host-kv-gb 3"), ({"kv_offloading_size": 3.0}, "--kv-offloading-size 3")],
)
def test_a_limited_job_is_told_before_the_kernel_would_kill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, float], said: str
) -> None:
    root = machine(tmp_path, 8, str(2 * GIB))
    monkeypatch.setattr(memory, "available_host_bytes", lambda: available_host_bytes(root))
    tp = TpGroup.single(torch.device("cpu"))
    with pytest.raises(ValueError, match=f"{said}.* and 2.00 GiB are available; ask for less"):
        kv_memory(MemoryConfig(**asked), tp, 0)  # type: ignore[arg-type]
    assert kv_memory(MemoryConfig(host_kv_gb=1.0), tp, 0) == (GIB // 2, GIB)
