"""Contract 6: copies delayed and reordered wherever no edge forbids it change no byte; without an edge they do.

A small decoder of requests that come, go, and take over each other's pages and host blocks, on the real pools,
residency and transfers, with attention over true keys and values beside it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.host_tier import HostTier
from oasis_tp.kv.layout import KvLayout
from oasis_tp.kv.residency import NOTHING, Residency
from oasis_tp.kv.transfers import Transfers, Wanted
from tests.kernels.scrambled import Scrambled

LAYERS, HEADS, BLOCK, DIM = 1, 2, 2, 4
BUDGET, SLOTS, MAX_BLOCKS, ROWS = 2, 7, 12, 2
LAYOUT = KvLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, dtype_bytes=4)


@dataclass
class Sequence:
    """A request: what it owns, its true keys and values [head, K|V, token, dim], and how far it is."""

    row: int
    pages: torch.Tensor
    host_blocks: torch.Tensor
    kv: torch.Tensor
    length: int
    open_block: int


@dataclass
class World:
    """One schedule, from its seed."""

    seed: int
    queued: bool
    differences: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.engine = Scrambled(self.rng, self.queued)
        pool = DevicePool(LAYOUT, ROWS * SLOTS, torch.float32, torch.device("cpu"))
        host = HostTier(LAYOUT, ROWS * MAX_BLOCKS, torch.float32, pin=False)
        pool.kv.fill_(torch.nan)
        host.kv.fill_(torch.nan)
        self.transfers = Transfers(pool, host, self.engine)
        self.engine.attach(self.transfers)
        self.residency = Residency(
            num_layers=LAYERS,
            num_rows=ROWS,
            num_heads=HEADS,
            max_slots=SLOTS,
            max_blocks=MAX_BLOCKS,
            device=pool.kv.device,
        )
        self.free_rows = list(range(ROWS))
        self.free_pages, self.free_blocks = list(range(ROWS * SLOTS)), list(range(ROWS * MAX_BLOCKS))
        self.num_settled = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.free_rows:
                self.admit()
            self.residency.tick += 1
            for sequence in list(self.sequences):
                self.open(sequence)
            for sequence in list(self.sequences):
                self.step(sequence)
                if sequence.length == MAX_BLOCKS * BLOCK or self.rng.random() < 0.1:
                    self.release(sequence)
        self.engine.drain()

    def admit(self) -> None:
        def take(free: list, count: int) -> list:
            taken = self.rng.sample(free, count)
            for item in taken:
                free.remove(item)
            return taken

        (row,) = take(self.free_rows, 1)
        pages, blocks = take(self.free_pages, SLOTS), take(self.free_blocks, MAX_BLOCKS)
        generator = torch.Generator().manual_seed(self.rng.randrange(2**30))
        kv = torch.randn(HEADS, 2, MAX_BLOCKS * BLOCK, DIM, generator=generator)
        num_prompt = self.rng.randrange(4, 8) * BLOCK
        sequence = Sequence(row, torch.tensor(pages), torch.tensor(blocks), kv, num_prompt, num_prompt // BLOCK)
        self.residency.clear(row)
        shape = (HEADS, num_prompt // BLOCK, BLOCK, DIM)
        fresh = [kv[:, half, :num_prompt].reshape(shape) for half in (0, 1)]
        self.transfers.store_computed(0, sequence.host_blocks[: shape[1]], *fresh)
        last = self.candidates(sequence)[1]
        blocks_in = torch.tensor([0, *range(last, sequence.open_block + 1), *range(last - BUDGET, last)])
        slots = torch.arange(len(blocks_in))
        self.residency.place(row, blocks_in, slots)
        stored = blocks_in < sequence.open_block
        heads = torch.arange(HEADS).repeat_interleave(int(stored.sum()))
        self.transfers.load(
            0, heads, sequence.host_blocks[blocks_in[stored]].repeat(HEADS), sequence.pages[slots[stored]].repeat(HEADS)
        )
        self.sequences.append(sequence)

    def candidates(self, sequence: Sequence) -> tuple[int, int]:
        return 1, sequence.length // BLOCK

    def open(self, sequence: Sequence) -> None:
        """Give the open block a slot, now and then a token early, as for a draft that crosses into it."""
        block = min((sequence.length + self.rng.randrange(2)) // BLOCK, MAX_BLOCKS - 1)
        if block > sequence.open_block:
            flying = torch.tensor([self.transfers.in_flight(0)], dtype=torch.int32)
            self.residency.open_block(sequence.row, SLOTS, self.candidates(sequence), block, flying)
            self.transfers.settle_stores()
            sequence.open_block = block

    def step(self, sequence: Sequence) -> None:
        """A token is written, some blocks are attended, others ordered ahead, and a full block goes home."""
        row, position = sequence.row, sequence.length
        block = position // BLOCK
        first, last = self.candidates(sequence)
        page = sequence.pages[self.residency.slot_of_block[0, row, :, block].long()]
        token, offset = sequence.kv[:, :, position], torch.tensor([position % BLOCK])
        pool = self.transfers.pool
        self.engine.run(lambda: pool.write_tokens(0, page[None], offset, token[None, :, 0], token[None, :, 1]))
        wanted = self.pick(first, last, BUDGET).sort(1).values
        if self.rng.random() < 0.75:  # what is here already: then nothing in line stands between two background copies
            held = self.residency.block_in_slot[0, row].long()
            wanted = torch.stack([h[(h >= first) & (h < last)].sort().values[:BUDGET] for h in held])
        pinned = torch.tensor([0, *range(last, block + 1)]).expand(HEADS, -1)
        blocks = torch.cat([pinned[:, :1], wanted, pinned[:, 1:]], 1)
        in_flight = self.transfers.in_flight(0)
        slots = self.residency.lookup(0, row, blocks)
        missing = slots < 0
        hits = torch.where(missing, slots[:, -1:], slots)
        self.residency.stamp(0, row, hits)
        _, late = self.residency.count_fetched(0, row, hits, in_flight)
        heads, columns = missing.nonzero(as_tuple=True)
        overwrites = False
        if heads.numel():
            new, overwrites = self.residency.replace(
                0, row, SLOTS, (first, last), heads, blocks[heads, columns], in_flight
            )
            slots[heads, columns] = new
        if overwrites or late > 0:
            self.transfers.settle(0)
            self.num_settled += 1
        if heads.numel():
            self.transfers.load(0, heads, sequence.host_blocks[blocks[heads, columns]], sequence.pages[new])
        if self.transfers.in_flight(0) == NOTHING:
            ahead = self.residency.fetch(0, row, SLOTS, (first, last), self.pick(first, last, last - first), limit=3)
            if ahead[0].numel():
                wanted_blocks = Wanted(row, ahead[0], sequence.host_blocks[ahead[1]], sequence.pages[ahead[2]])
                self.transfers.prefetch(0, self.residency.tick, [wanted_blocks])
        self.engine.run(lambda: self.attend(sequence, blocks, sequence.pages[slots], position))
        if position % BLOCK == BLOCK - 1:
            self.transfers.store_block(row, page[None], int(sequence.host_blocks[block]))
        sequence.length += 1
        self.residency.check_row(row)

    def pick(self, first: int, last: int, count: int) -> torch.Tensor:
        return torch.tensor([self.rng.sample(range(first, last), count) for _ in range(HEADS)])

    def attend(self, sequence: Sequence, blocks: torch.Tensor, pages: torch.Tensor, position: int) -> None:
        """Attention of one query over the pages, and over the true keys and values of the blocks."""
        got = [
            x[:, : blocks.shape[1] * BLOCK - BLOCK + position % BLOCK + 1] for x in self.transfers.pool.gather(0, pages)
        ]
        tokens = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).reshape(HEADS, -1)[:, : got[0].shape[1]]
        true = [sequence.kv[torch.arange(HEADS)[:, None], half, tokens] for half in (0, 1)]
        mine, theirs = (torch.softmax(k.sum(2), 1)[:, None] @ v for k, v in (got, true))
        self.differences += not torch.equal(mine, theirs)

    def release(self, sequence: Sequence) -> None:
        self.transfers.release(sequence.row)
        self.sequences.remove(sequence)
        self.free_rows.append(sequence.row)
        self.free_pages += sequence.pages.tolist()
        self.free_blocks += sequence.host_blocks.tolist()


@pytest.mark.parametrize("queued", [True, False], ids=["as-on-a-gpu", "as-on-a-cpu"])
def test_any_schedule_gives_the_same_bytes(queued: bool) -> None:
    num_settled = 0
    for seed in range(500):
        world = World(seed, queued)
        world.run(num_steps=12)
        assert world.differences == 0, f"schedule {seed}"
        num_settled += world.num_settled
    assert num_settled > 100, "hardly anything was ever late: the schedules are too tame"


def drop(transfers: Transfers, edge: str) -> None:
    """Take one edge away."""
    submit = transfers._submit

    def fewer(order, target, source, after) -> None:  # type: ignore[no-untyped-def]
        is_store = order.tick == NOTHING
        if edge == "prefetch after readers" and not is_store:
            after = after[1:]
        if edge == "prefetch after stores" and not is_store:
            after = after[:1]
        if edge == "store after compute" and is_store:
            after = []
        submit(order, target, source, after)

    def settle(layer: int) -> None:
        transfers._prefetches[layer] = None

    def settle_stores() -> None: ...

    nothing: dict[str, tuple[str, Callable[..., object]]] = {
        "reader after prefetch": ("settle", settle),
        "load after stores": ("settle_stores", settle_stores),
        "reuse after release": ("release", lambda row: None),
        "dead rows dropped": ("_begin", lambda part: True),
    }
    name, replacement = nothing.get(edge, ("_submit", fewer))
    setattr(transfers, name, replacement)


@pytest.mark.parametrize(
    ("edge", "queued"),
    [
        ("prefetch after readers", True),
        ("reader after prefetch", True),
        ("reader after prefetch", False),
        ("load after stores", True),
        ("load after stores", False),
        ("store after compute", True),
        ("reuse after release", True),
        ("reuse after release", False),
        ("dead rows dropped", False),
    ],
)
def test_without_an_edge_some_schedule_shows_it(edge: str, queued: bool) -> None:
    for seed in range(500):
        world = World(seed, queued)
        drop(world.transfers, edge)
        world.run(num_steps=12)
        if world.differences:
            return
    pytest.fail(f"no schedule needs the edge {edge!r}")


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("edge", ["none", "prefetch after stores"])
def test_a_prefetch_leaves_a_page_alone_until_its_block_is_home(edge: str, queued: bool) -> None:
    """In the decoder above other waits nearly always stand between the two."""
    damaged = 0
    for seed in range(50):
        world = World(seed, queued)
        transfers = world.transfers
        drop(transfers, edge)
        transfers.pool.kv.fill_(1.0)
        transfers.host.kv.fill_(2.0)
        transfers.store_block(0, torch.tensor([[3, 3]]), 5)
        both = torch.tensor([0, 1])
        transfers.prefetch(0, 1, [Wanted(0, both, torch.tensor([5, 6]), torch.tensor([4, 3]))])
        world.engine.drain()
        home, fetched = transfers.host.kv[0, :, 5], transfers.pool.kv[0, 4, 0]
        damaged += not (bool((home == 1).all()) and bool((fetched == 1).all()))
    assert (damaged > 0) == (edge != "none")
