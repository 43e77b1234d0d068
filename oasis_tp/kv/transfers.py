"""Transfers: every copy between the device pool and the host tier, behind tickets."""

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from oasis_tp.kernels import cpu
from oasis_tp.kv.copy_worker import DONE, CopyEngine, CopyWorker, Point
from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.host_tier import HostTier
from oasis_tp.kv.residency import NOTHING


@dataclass(slots=True)
class Ticket:
    """A copy that was ordered. Whoever reads its destination, or overwrites its source, waits on it first."""

    num_bytes: int
    end: Point = DONE

    @property
    def landed(self) -> bool:
        return self.end.reached()

    def wait(self) -> None:
        """Whatever the compute does from here on sees the copy done."""
        self.end.wait()


@dataclass(slots=True)
class Wanted:
    """Blocks of one row to be loaded in the background: triples (head, host block, page), each [n] int64."""

    row: int
    heads: torch.Tensor
    host_blocks: torch.Tensor
    pages: torch.Tensor


@dataclass(slots=True)
class _Part:
    """What a background copy does for one row: flat rows [n] int64 of its target and source."""

    row: int
    epoch: int
    targets: torch.Tensor
    sources: torch.Tensor
    begun: bool = False


@dataclass(slots=True)
class _Order:
    """A background copy that has not been seen to land."""

    parts: list[_Part]
    tick: int = NOTHING
    ticket: Ticket = field(default_factory=lambda: Ticket(0))


class Transfers:
    """Moves blocks between tiers: some in line with the compute, some beside it.

    In line with the compute: `load`, what a row cannot do without; `store_computed` and `read`, a prompt's. On the CPU
    they are done when the call returns, on CUDA they are issued on the compute stream (host memory is pinned). Beside
    it, on a copy engine that keeps no order of its own: `store_block`, a sealed block on its way home, and `prefetch`,
    blocks that a later row may select. Host bytes are read by copies only. Why no two of them race:

    - A prefetch comes after all compute given out when it is ordered: the readers of the slots it overwrites (what this
      step selects is no victim, see kv/residency.py), and the copies in line that wrote them.
    - Who reads a slot that may be in flight asks `in_flight` and calls `settle` first. A slot in flight is given up
      only by who has settled it.
    - `load` and `prefetch` come after every store ordered before them. So a block that is fetched is home, and the page
      of a block on its way home is not overwritten; who begins a new block in an old one's page calls `settle_stores`.
      What `store_computed` stored is home by the first rule.
    - A store comes after all compute given out when it is ordered: whoever wrote its source. Sealed blocks are not
      written again.
    - `release` ends a row's copies before its pages and host blocks can go to another one: it raises the row's epoch,
      so that parts of the old epoch that have not begun never will, and waits for those that have.
    - Of one layer there is one prefetch under way at a time, so its tick says which slots are in flight.

    Plans that lie on the device (kernels/copy_plan.py) go by `load_planned` and `prefetch_planned`, of which the host
    does not know what they move. They come after everything the compute was given, `join` ends those beside it, and
    the caller settles the stores before its first one: what would else ask `in_flight` finds nothing.
    """

    def __init__(
        self,
        pool: DevicePool,
        host: HostTier,
        engine: CopyEngine | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """`library` (kernels/cpu.py) copies without an intermediate; CPU only."""
        assert pool.layout == host.layout
        self.pool = pool
        self.host = host
        self.host_to_device_bytes = 0
        self.device_to_host_bytes = 0
        self.exposed_wait_ns = 0
        """What the compute waited for background copies. On CUDA a stream waits, not this thread: it stays 0."""
        on_cuda = pool.kv.is_cuda
        self.engine: CopyEngine = engine or (CopyStream(pool.kv.device) if on_cuda else CopyWorker())
        self._row_bytes = pool.rows.shape[1] * pool.rows.element_size()
        self._pool_blocks = pool.kv.view(-1, 2 * pool.rows.shape[1])  # [(layer, page, head), K and V of a block]
        self._host_blocks = host.kv.view(-1, 2 * host.rows.shape[1])  # [(layer, head, host block), the same]
        self._copy: cpu.BlockCopy = _gather if on_cuda else _index_copy
        self._copy_in_line: cpu.BlockCopy = self._copy
        if library is not None and not on_cuda:
            self._copy, self._copy_in_line = (cpu.block_copier(library, alone=alone) for alone in (False, True))
        self._epochs: defaultdict[int, int] = defaultdict(int)
        self._epochs_lock = threading.Lock()
        self._stores: list[_Order] = []
        self._planned: list[Point] = []
        self._prefetches: list[_Order | None] = [None] * pool.layout.num_layers

    def store_computed(self, layer: int, host_blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ticket:
        """Store freshly computed blocks of one layer: host_blocks [n] int64 (CPU), k and v [head, n, block, dim]."""
        index = self.host.row_index(layer, host_blocks[None, :]).reshape(-1)
        width = self.host.rows.shape[1]

        def copy() -> None:
            self.host.rows.index_copy_(0, index, k.reshape(-1, width).cpu())
            self.host.rows.index_copy_(0, index + 1, v.reshape(-1, width).cpu())

        self.engine.run(copy)
        return self._stored(2 * index.numel())

    def store_block(self, row: int, pages: torch.Tensor, host_block: int) -> Ticket:
        """Store one sealed block of all layers and heads in the background.

        pages [layer, head] int64 hold it, host_block is its home, and `row` is whose it is.
        """
        num_layers, num_heads = pages.shape
        layer = torch.arange(num_layers, device=pages.device)[:, None]
        head = torch.arange(num_heads, device=pages.device)
        sources = ((layer * self.pool.num_pages + pages) * num_heads + head).reshape(-1)
        targets = ((layer * num_heads + head) * self.host.num_blocks + host_block).reshape(-1)
        part = _Part(row, self._epochs[row], targets, sources)
        order = _Order([part], ticket=self._stored(2 * targets.numel()))
        self._stores = [store for store in self._stores if not store.ticket.landed]
        self._submit(order, self._host_blocks, self._pool_blocks, [self.engine.now()])
        self._stores.append(order)
        return order.ticket

    def load(self, layer: int, heads: torch.Tensor, host_blocks: torch.Tensor, pages: torch.Tensor) -> Ticket:
        """Load blocks of one layer: triples (head, host block, page), each [n] int64."""
        self.settle_stores()
        targets, sources = self._block_index(layer, heads, host_blocks, pages)

        def copy() -> None:
            if self.pool.kv.is_cuda:
                _index_copy(self._pool_blocks, targets, self._host_blocks, sources.cpu())
            else:
                self._copy_in_line(self._pool_blocks, targets, self._host_blocks, sources)

        self.engine.run(copy)
        return self._loaded(sources.numel())

    def prefetch(self, layer: int, tick: int, wanted: Sequence[Wanted]) -> Ticket:
        """Load blocks of one layer in the background; nothing of that layer may be in flight.

        `tick` is the step's, as residency notes it for the slots.
        """
        assert self.in_flight(layer) == NOTHING
        parts = [
            _Part(item.row, self._epochs[item.row], *self._block_index(layer, item.heads, item.host_blocks, item.pages))
            for item in wanted
        ]
        order = _Order(parts, tick, self._loaded(sum(part.sources.numel() for part in parts)))
        self._submit(
            order,
            self._pool_blocks,
            self._host_blocks,
            [self.engine.now(), *(store.ticket.end for store in self._stores)],
        )
        self._prefetches[layer] = order
        return order.ticket

    def load_planned(self, layer: int, host_blocks: torch.Tensor, pages: torch.Tensor, counts: torch.Tensor) -> None:
        """Load blocks of one layer by a plan on the device: host_blocks and pages [row, head, n] int32, of which the
        first counts [row, head] int32 are set; where the page is -1 nothing is copied.
        """
        self.engine.run(lambda: self._copy_planned(layer, host_blocks, pages, counts))

    def prefetch_planned(
        self, layer: int, host_blocks: torch.Tensor, pages: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """The same in the background, until `join`."""

        @torch.inference_mode()
        def copy() -> None:
            self._copy_planned(layer, host_blocks, pages, counts, beside=True)

        self._planned.append(self.engine.submit(copy, [self.engine.now()]))

    def join(self) -> None:
        """Whatever the compute does from here on comes after all planned copies."""
        planned, self._planned = self._planned, []
        for point in planned:
            point.wait()

    def count_planned(self, num_blocks: int) -> None:
        """Add to the bytes moved what planned copies turned out to have loaded."""
        self._loaded(num_blocks)

    def _copy_planned(
        self, layer: int, host_blocks: torch.Tensor, pages: torch.Tensor, counts: torch.Tensor, *, beside: bool = False
    ) -> None:
        if self.pool.kv.is_cuda:
            from oasis_tp.kernels.gather import gather

            gather(self.host.kv[layer], self.pool.kv[layer], host_blocks, pages, counts, beside=beside)
            return
        set_here = torch.arange(pages.shape[2]) < counts[:, :, None]
        rows, heads, columns = (set_here & (pages >= 0)).nonzero(as_tuple=True)
        at = (rows, heads, columns)
        targets, sources = self._block_index(layer, heads, host_blocks[at].long(), pages[at].long())
        _index_copy(self._pool_blocks, targets, self._host_blocks, sources)

    def in_flight(self, layer: int) -> int:
        """The tick of the layer's prefetch under way; NOTHING if it has landed."""
        order = self._prefetches[layer]
        if order is not None and order.ticket.landed:
            order = self._prefetches[layer] = None
        return NOTHING if order is None else order.tick

    def settle(self, layer: int) -> None:
        """Wait for the layer's prefetch, if one is in flight."""
        order, self._prefetches[layer] = self._prefetches[layer], None
        self._wait_for([] if order is None else [order])

    def settle_stores(self) -> None:
        """Wait for the stores under way. Before anything but `load` overwrites a page whose block may be among them."""
        stores, self._stores = self._stores, []
        self._wait_for(stores)

    def release(self, row: int) -> None:
        """End the copies of a row whose request is over: none of them touches its pages or host blocks afterwards."""
        orders = [order for order in (*self._stores, *self._prefetches) if order is not None]
        with self._epochs_lock:
            self._epochs[row] += 1
            begun = [order for order in orders if any(part.begun and part.row == row for part in order.parts)]
        self._wait_for(begun)

    def read(self, layer: int, host_blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ticket:
        """Read whole blocks of one layer into k and v [head, n * block_size, head_dim]; host_blocks [n] int64 (CPU)."""
        source = self.host.kv[layer]

        def copy() -> None:
            for head in range(source.shape[0]):
                picked = source[head].index_select(0, host_blocks)  # [n, K|V, block, dim]
                k[head].view(-1, *picked.shape[2:]).copy_(picked[:, 0])
                v[head].view(-1, *picked.shape[2:]).copy_(picked[:, 1])

        self.engine.run(copy)
        return self._loaded(source.shape[0] * host_blocks.numel())

    def _submit(self, order: _Order, target: torch.Tensor, source: torch.Tensor, after: list[Point]) -> None:
        @torch.inference_mode()  # a mode of the thread: the worker's is not the compute's
        def copy() -> None:
            for part in order.parts:
                if self._begin(part):
                    self._copy(target, part.targets, source, part.sources)

        order.ticket.end = self.engine.submit(copy, after)

    def _begin(self, part: _Part) -> bool:
        """Whether the part's request still lives; then its release waits for the copy's end."""
        with self._epochs_lock:
            part.begun = self._epochs[part.row] == part.epoch
            return part.begun

    def _wait_for(self, orders: list[_Order]) -> None:
        if all(order.ticket.landed for order in orders):
            return
        start = time.perf_counter_ns()
        for order in orders:
            order.ticket.wait()
        if not self.pool.kv.is_cuda:
            self.exposed_wait_ns += time.perf_counter_ns() - start

    def _block_index(
        self, layer: int, heads: torch.Tensor, host_blocks: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat blocks of the pool and of the host tier, each [n], that the triples name."""
        num_heads = self.pool.layout.num_kv_heads
        targets = (layer * self.pool.num_pages + pages) * num_heads + heads
        return targets, (layer * num_heads + heads) * self.host.num_blocks + host_blocks

    def _loaded(self, num_blocks: int) -> Ticket:
        num_bytes = 2 * num_blocks * self._row_bytes
        self.host_to_device_bytes += num_bytes
        return Ticket(num_bytes)

    def _stored(self, num_rows: int) -> Ticket:
        self.device_to_host_bytes += num_rows * self._row_bytes
        return Ticket(num_rows * self._row_bytes)


class CopyStream:
    """Copies on a CUDA stream beside the compute's. Its priority is the lowest there is, which is the compute's own
    too; that copies are launched as few programs leaves the compute its processors.

    A copy is launched when it is submitted, so nothing of it can be taken back; it keeps its index tensors until its
    end is reached, and the allocator does not give them to the compute before.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=0)

    def now(self) -> Point:
        return _StreamPoint(torch.cuda.current_stream())

    def run(self, copy: Callable[[], None]) -> None:
        copy()

    def submit(self, copy: Callable[[], None], after: Sequence[Point]) -> Point:
        for point in after:
            assert isinstance(point, _StreamPoint)
            self._stream.wait_event(point.event)
        with torch.cuda.stream(self._stream):
            copy()
        return _StreamPoint(self._stream, copy)


class _StreamPoint:
    """An event on a stream, and what must live until it is reached."""

    def __init__(self, stream: torch.cuda.Stream, kept: object = None) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._kept = kept

    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _index_copy(target: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, sources: torch.Tensor) -> None:
    """target[targets] = source[sources], from one device to the other; indices lie where their tensors do."""
    target.index_copy_(0, targets, source.index_select(0, sources).to(target.device))


def _gather(target: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, sources: torch.Tensor) -> None:
    """The same in one launch that reads, or writes, pinned host memory; indices lie on the device."""
    from oasis_tp.kernels.gather import gather  # loads triton, which only a GPU needs

    width = target.shape[1] & -target.shape[1]  # the kernel moves powers of two: a block may be several
    pieces = torch.arange(target.shape[1] // width, device=targets.device)

    def index(blocks: torch.Tensor) -> torch.Tensor:
        return (blocks[:, None] * len(pieces) + pieces).to(torch.int32).view(1, 1, -1)

    count = torch.full((1, 1), sources.numel() * len(pieces), dtype=torch.int32, device=targets.device)
    gather(source.view(1, -1, width), target.view(-1, 1, width), index(sources), index(targets), count)
