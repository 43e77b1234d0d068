"""Copies between the tiers move the right bytes, touch no others, and count what they moved."""

import mmap

import pytest
import torch

from oasis_tp.kv import host_tier
from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.host_tier import HostTier
from oasis_tp.kv.layout import KvLayout
from oasis_tp.kv.transfers import Transfers

CPU = torch.device("cpu")
LAYERS, HEADS, BLOCK, DIM = 3, 2, 16, 8


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def tiers(request: pytest.FixtureRequest) -> Transfers:
    """5 pages and 7 host blocks of random bytes."""
    dtype = request.param
    layout = KvLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, dtype_bytes=dtype.itemsize)
    transfers = Transfers(DevicePool(layout, 5, dtype, CPU), HostTier(layout, 7, dtype, pin=False))
    transfers.pool.kv.normal_()
    transfers.host.kv.normal_()
    return transfers


def test_load_fills_pages_head_by_head_and_nothing_else(tiers: Transfers) -> None:
    want = tiers.pool.kv.clone()
    triples = [(0, 6, 3), (1, 2, 3), (1, 0, 4)]
    for head, block, page in triples:
        want[1, page, head] = tiers.host.kv[1, head, block]
    heads, blocks, pages = (torch.tensor(column) for column in zip(*triples, strict=True))
    ticket = tiers.load(1, heads, blocks, pages)
    ticket.wait()
    assert torch.equal(tiers.pool.kv, want)
    assert ticket.num_bytes == tiers.host_to_device_bytes == 3 * 2 * BLOCK * DIM * tiers.pool.kv.itemsize


def test_a_sealed_block_goes_home_from_a_page_of_its_own_in_each_layer_and_head(tiers: Transfers) -> None:
    pages = torch.tensor([[0, 1], [4, 4], [2, 0]])
    want = tiers.host.kv.clone()
    for layer in range(LAYERS):
        for head in range(HEADS):
            want[layer, head, 5] = tiers.pool.kv[layer, pages[layer, head], head]
    ticket = tiers.store_block(1, pages, 5)
    ticket.wait()
    assert torch.equal(tiers.host.kv, want)
    assert ticket.num_bytes == tiers.device_to_host_bytes == tiers.pool.layout.page_bytes


def test_computed_blocks_are_stored_and_read_back(tiers: Transfers) -> None:
    k, v = (torch.randn(HEADS, 3, BLOCK, DIM).to(tiers.pool.kv.dtype) for _ in range(2))
    blocks = torch.tensor([6, 0, 3])
    want = tiers.host.kv.clone()
    for head in range(HEADS):
        for index, block in enumerate(blocks.tolist()):
            want[2, head, block, 0], want[2, head, block, 1] = k[head, index], v[head, index]
    ticket = tiers.store_computed(2, blocks, k, v)
    ticket.wait()
    assert torch.equal(tiers.host.kv, want)
    assert ticket.num_bytes == 3 * HEADS * 2 * BLOCK * DIM * k.itemsize
    out = torch.zeros(2, HEADS, 5 * BLOCK, DIM, dtype=k.dtype)
    tiers.read(2, blocks, out[0][:, : 3 * BLOCK], out[1][:, : 3 * BLOCK]).wait()
    assert torch.equal(out[0, :, : 3 * BLOCK], k.flatten(1, 2)) and torch.equal(out[1, :, : 3 * BLOCK], v.flatten(1, 2))
    assert (out[:, :, 3 * BLOCK :] == 0).all()


def test_tokens_are_written_where_gather_finds_them(tiers: Transfers) -> None:
    pool = tiers.pool
    before = pool.kv.clone()
    k, v = (torch.randn(3, HEADS, DIM).to(pool.kv.dtype) for _ in range(2))
    pages, offsets = torch.tensor([[0, 1], [2, 3], [4, 4]]), torch.tensor([0, 15, 7])
    pool.write_tokens(1, pages, offsets, k, v)
    for row in range(3):
        for head in range(HEADS):
            before[1, pages[row, head], head, 0, offsets[row]] = k[row, head]
            before[1, pages[row, head], head, 1, offsets[row]] = v[row, head]
    assert torch.equal(pool.kv, before)
    keys, values = pool.gather(1, torch.tensor([[4, 0], [1, 4]]))
    assert keys.shape == values.shape == (HEADS, 2 * BLOCK, DIM)
    assert torch.equal(keys[0, 7], k[2, 0]) and torch.equal(values[0, BLOCK], v[0, 0])
    assert torch.equal(keys[1, 0], k[0, 1]) and torch.equal(values[1, BLOCK + 7], v[2, 1])


def test_nothing_is_moved_for_nothing(tiers: Transfers) -> None:
    none = torch.empty(0, dtype=torch.int64)
    before = tiers.pool.kv.clone()
    assert tiers.load(0, none, none, none).num_bytes == 0
    assert torch.equal(tiers.pool.kv, before)


class PinnedPages:
    """cudaHostRegister as CUDA has it: no page twice."""

    def __init__(self) -> None:
        self.pages: dict[int, range] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        wanted = range(start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE + 1)
        if any(wanted.start < held.stop and held.start < wanted.stop for held in self.pages.values()):
            return 712
        self.pages[start] = wanted
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.pages[start]
        return 0


def test_a_tier_pins_pages_of_its_own_and_lets_go_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = PinnedPages()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_tier, "REGISTER_CHUNK_BYTES", 2 * mmap.PAGESIZE)
    layout = KvLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, dtype_bytes=4)
    tiers = [HostTier(layout, 3, torch.float32, pin=True) for _ in range(8)]  # 4.5 pages each
    assert len(cudart.pages) == 8 * 3
    for tier in tiers:
        held = {page for pages in cudart.pages.values() for page in pages}
        first, last = tier.kv.data_ptr(), tier.kv.data_ptr() + tier.kv.nbytes - 1
        assert set(range(first // mmap.PAGESIZE, last // mmap.PAGESIZE + 1)) <= held
        tier.kv.normal_()
    del tier, tiers
    assert not cudart.pages
