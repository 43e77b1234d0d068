"""Block scores of the compiled path against the torch path, for head sizes and kinds with loops of their own."""

import ctypes

import pytest
import torch

from oasis_tp.config import SketchKind
from oasis_tp.kernels import cpu
from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.layout import KvLayout
from oasis_tp.kv.residency import Residency
from oasis_tp.models.hub import cache_dir
from oasis_tp.sparse.cpu_decode import CpuDecode
from oasis_tp.sparse.sketch import Sketch

BLOCK, HEADS, NUM_BLOCKS, FIRST, LAST, BUDGET = 16, 2, 120, 1, 111, 9
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = cpu.load(cache_dir())
    if loaded is None:
        pytest.skip("no C++ compiler is found")
    return loaded


class Rig:
    """Sketches of random blocks with a few loud channels, as keys have, and rows that select among them."""

    def __init__(self, library: ctypes.CDLL, kind: SketchKind, head_dim: int, group: int) -> None:
        torch.manual_seed(head_dim + group)
        layout = KvLayout(num_layers=1, num_kv_heads=HEADS, head_dim=head_dim, block_size=BLOCK, dtype_bytes=4)
        self.sketch = Sketch(
            kind,
            num_layers=1,
            num_blocks=NUM_BLOCKS,
            num_kv_heads=HEADS,
            head_dim=head_dim,
            block_size=BLOCK,
            device=CPU,
        )
        k = torch.randn(NUM_BLOCKS, HEADS, BLOCK, head_dim) + torch.randn(NUM_BLOCKS, HEADS, 1, head_dim)
        k[..., ::7] *= 5
        self.sketch.seal(0, torch.randperm(NUM_BLOCKS), k, torch.randn_like(k))
        self.host_blocks = torch.randperm(NUM_BLOCKS)
        pool = DevicePool(layout, NUM_BLOCKS, torch.float32, CPU)
        residency = Residency(
            num_layers=1, num_rows=1, num_heads=HEADS, max_slots=NUM_BLOCKS, max_blocks=NUM_BLOCKS, device=CPU
        )
        self.kept = pool, residency  # CpuDecode has their addresses only
        self.decode = CpuDecode(library, pool, residency, None, {kind: self.sketch}, group)
        self.q = torch.randn(3, HEADS, group, head_dim) * 2

    def scores(self, rows: int) -> list[torch.Tensor]:
        """Each row's estimates [head, group, candidates] by the compiled path."""
        step = self.decode.begin(
            [
                self.decode.row(
                    sketch=self.sketch,
                    pages=self.host_blocks,
                    host_blocks=self.host_blocks,
                    candidates=(FIRST, LAST - row),
                    budget=BUDGET,
                    table_row=0,
                    position=(LAST - row + 2) * BLOCK,
                    resident=True,
                    use_tail=True,
                    recall=True,
                    tick=1,
                    probe=False,
                    reach=0,
                    fetch_limit=0,
                )
                for row in range(rows)
            ]
        )
        kv = torch.zeros(rows, HEADS, self.q.shape[3])
        cpu.select(self.decode.library, self.decode.layers[0], 0, step, self.q[:rows].contiguous(), kv, kv)
        group = self.q.shape[2]
        return [
            step.estimate[row, :, : group * (LAST - row - FIRST)].view(HEADS, group, LAST - row - FIRST).clone()
            for row in range(rows)
        ]


@pytest.mark.parametrize("group", [1, 3, 5, 8])
@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [("2bit", 64), ("2bit", 128), ("2bit", 256), ("2bit", 16), ("2bit", 80), ("1bit", 64), ("minmax", 64)],
)
def test_scores_are_the_torch_paths(library: ctypes.CDLL, kind: SketchKind, head_dim: int, group: int) -> None:
    rig = Rig(library, kind, head_dim, group)
    want = rig.sketch.score(0, rig.host_blocks[FIRST:LAST], rig.q[0])
    [got] = rig.scores(1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["2bit", "1bit", "minmax"])
def test_a_rows_scores_do_not_depend_on_company_or_threads(
    library: ctypes.CDLL, kind: SketchKind, threads: int
) -> None:
    rig = Rig(library, kind, 64, 3)
    before = torch.get_num_threads()
    [alone] = rig.scores(1)
    try:
        torch.set_num_threads(threads)
        together = rig.scores(3)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[0], alone)
