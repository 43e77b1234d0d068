"""KvCache: what the tiers do for a request on this rank, from its prompt's first chunk to its last token."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oasis_tp.config import SketchKind
from oasis_tp.engine.decode_batch import DecodeBatch, DecodeRow, RowState, RowStats
from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.host_tier import HostTier
from oasis_tp.kv.layout import Capacity, KvLayout, SelectionLayout
from oasis_tp.kv.residency import NOTHING, Residency
from oasis_tp.kv.transfers import Transfers, Wanted
from oasis_tp.nn.attention import attend_blocks, attend_chunk
from oasis_tp.request import Request
from oasis_tp.sparse.cpu_decode import CpuDecode, CpuStep
from oasis_tp.sparse.lookahead import NONE, Lookahead, most_wanted
from oasis_tp.sparse.select import rank_blocks, select_blocks
from oasis_tp.sparse.sketch import Sketch

if TYPE_CHECKING:
    from oasis_tp.sparse.triton_decode import TritonDecode


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """How large one rank's tiers are."""

    layout: KvLayout
    capacity: Capacity
    host_tier: bool
    max_model_len: int
    max_num_seqs: int
    max_slots: int
    sketches: tuple[SketchKind, ...]
    group: int
    """Query heads per KV head."""


class KvCache:
    """Device pages, host tier, sketches and residency of one rank.

    A prompt's chunks go to the host tier (or, without one, straight to pages) layer by layer; `begin_decode` brings in
    the first hot set; each decoded row then attends exactly the blocks its own query selects, fetching what is not
    resident; the last row of a request brings in ahead what the next step may want (sparse/lookahead.py); a block whose
    last token is committed is sealed: sketched and written through.

    Rows decode through compiled code (sparse/cpu_decode.py, with `library`), through the Triton kernels
    (sparse/triton_decode.py, with `use_triton`), or else through torch operations, here.
    `recall` False makes rows attend only what is resident: a control for measurements, never an engine mode.
    """

    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        library: ctypes.CDLL | None = None,
        *,
        use_triton: bool = False,
    ) -> None:
        """`library` (kernels/cpu.py): for fp32 on a CPU."""
        layout, capacity = shape.layout, shape.capacity
        self.layout = layout
        self.device = device
        self.group = shape.group
        self.recall = True
        self.pool = DevicePool(layout, capacity.num_pages, dtype, device)
        self.transfers: Transfers | None = None
        if shape.host_tier:
            host = HostTier(layout, capacity.num_host_blocks, dtype, pin=device.type == "cuda")
            self.transfers = Transfers(self.pool, host, library=library)
        self.sketches = {
            kind: Sketch(
                kind,
                num_layers=layout.num_layers,
                num_blocks=capacity.num_host_blocks,
                num_kv_heads=layout.num_kv_heads,
                head_dim=layout.head_dim,
                block_size=layout.block_size,
                device=device,
            )
            for kind in shape.sketches
        }
        self.residency = Residency(
            num_layers=layout.num_layers,
            num_rows=shape.max_num_seqs,
            num_heads=layout.num_kv_heads,
            max_slots=shape.max_slots,
            max_blocks=layout.num_blocks(shape.max_model_len),
            device=device,
        )
        self.cpu: CpuDecode | None = None
        self.triton: TritonDecode | None = None
        parts = (self.pool, self.residency, self.transfers, self.sketches, shape.group)
        if use_triton:
            from oasis_tp.sparse import triton_decode  # loads triton, which not everybody needs

            self.triton = triton_decode.TritonDecode(*parts)
        elif library is not None:
            self.cpu = CpuDecode(library, *parts)
        # One layer's K and V of the prompt being prefilled: [K|V, local_kv_head, tokens, head_dim]
        padded = layout.num_blocks(shape.max_model_len) * layout.block_size
        self._prompt_kv = torch.empty(2, layout.num_kv_heads, padded, layout.head_dim, dtype=dtype, device=device)

    def admit(self, request: Request, selection: SelectionLayout, prefetch: bool = False) -> RowState:
        """Set up a request's row from what the scheduler reserved for it; `prefetch`: its rows look ahead."""
        num_blocks = self.layout.num_blocks(request.max_total_tokens)
        host_blocks = torch.tensor(request.host_blocks[:num_blocks], dtype=torch.int64)
        pages = torch.tensor(request.pages, dtype=torch.int64, device=self.device)
        on_device = host_blocks.to(self.device)
        self.residency.clear(request.row)
        if self.triton is not None:
            stats = RowStats(*self.triton.admit(request.row, pages, on_device))
        else:
            stats = RowStats(torch.zeros((), device=self.device), torch.zeros(4, dtype=torch.int64, device=self.device))
        return RowState(
            row=request.row,
            selection=selection,
            pages=pages,
            host_blocks=on_device,
            host_blocks_cpu=host_blocks,
            resident=len(request.pages) == num_blocks,
            sketch=None if selection.budget is None else self.sketches[request.sparsity.sketch],
            use_tail=request.sparsity.tail_estimate,
            stats=stats,
            lookahead=Lookahead.of(selection, request.sparsity.fetch_ratio) if prefetch else NONE,
            recall=request.sparsity.attention != "paper",
        )

    def count_loads(self, state: RowState) -> None:
        """A request is over: what kernels loaded for it by plans of their own counts as moved from now on."""
        if self.transfers is not None and self.triton is not None:
            fetched = state.stats.missed_blocks if self.recall and state.recall else 0
            self.transfers.count_planned(fetched + int(state.stats.prefetched[0]))

    def release(self, state: RowState) -> None:
        """A request is over: no copy touches its pages and host blocks any more."""
        if self.transfers is not None:
            self.transfers.release(state.row)

    def prefill(
        self,
        layer: int,
        state: RowState,
        start: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Dense attention of prompt tokens [start, start + T) in one layer; their K/V are kept, full blocks sealed.

        q [T, local_head, D], k and v [T, local_kv_head, D] -> [T, local_head, D]. `start` is a block border.
        """
        block = self.layout.block_size
        stop = start + q.shape[0]
        keys, values = self._prompt_kv
        self._read_prompt(layer, state, start, keys, values)
        first, last, full = start // block, self.layout.num_blocks(stop), stop // block
        for buffer, fresh in ((keys, k), (values, v)):
            buffer[:, start:stop] = fresh.transpose(0, 1)
            buffer[:, stop : last * block] = 0
        heads, dim = keys.shape[0], keys.shape[2]
        new_k = keys[:, start : last * block].view(heads, last - first, block, dim)
        new_v = values[:, start : last * block].view(heads, last - first, block, dim)
        if self.transfers is not None:
            self.transfers.store_computed(layer, state.host_blocks_cpu[first:last], new_k, new_v).wait()
        else:
            pages = state.pages[first:last].expand(heads, -1)
            rows = self.pool.row_index(layer, pages).reshape(-1)
            self.pool.rows.index_copy_(0, rows, new_k.reshape(rows.numel(), -1))
            self.pool.rows.index_copy_(0, rows + 1, new_v.reshape(rows.numel(), -1))
        if full > first:
            ids = state.host_blocks[first:full]
            whole_k, whole_v = (x[:, : full - first].transpose(0, 1) for x in (new_k, new_v))
            if self.triton is not None:
                self.triton.seal_prompt(layer, ids, whole_k, whole_v)
            else:
                for sketch in self.sketches.values():
                    sketch.seal(layer, ids, whole_k, whole_v)
        return attend_chunk(q, keys[:, :stop], values[:, :stop], mask)

    def begin_decode(
        self, state: RowState, num_prompt_tokens: int, last_query: torch.Tensor, partial_source: int
    ) -> None:
        """Bring in the first hot set of a request whose prompt is done.

        Pinned blocks first, then as many candidates as there are slots, by the scores of the prompt's last row
        (`last_query` [layer, local_head, D]). `partial_source` is the host block with the prompt's unfinished last
        block when that is not the request's own (a fork), else -1.
        """
        if self.transfers is None:
            return
        num_layers, heads = self.layout.num_layers, self.layout.num_kv_heads
        source = state.host_blocks.clone()
        filled = self.layout.num_blocks(num_prompt_tokens)
        if partial_source >= 0:
            source[filled - 1] = partial_source
        if state.resident:
            blocks = torch.arange(filled, device=self.device).expand(heads, -1)
            for layer in range(num_layers):
                self._load(layer, state, source, blocks, blocks)
            return
        first, last = state.selection.candidates(num_prompt_tokens)
        open_block = num_prompt_tokens // self.layout.block_size
        state.open_block = open_block
        pinned = torch.tensor([*range(first), *range(last, open_block + 1)], dtype=torch.int64, device=self.device)
        self.residency.place(state.row, pinned, torch.arange(pinned.numel(), device=self.device))
        num_chosen = min(last - first, state.num_slots - pinned.numel())
        slots = torch.arange(pinned.numel(), pinned.numel() + num_chosen, device=self.device).expand(heads, -1)
        pinned_slots = torch.arange(pinned.numel(), device=self.device).expand(heads, -1)
        stored = (pinned < filled).nonzero().flatten()
        assert state.sketch is not None
        every_choice = []
        for layer in range(num_layers):
            q = last_query[layer].view(heads, -1, self.layout.head_dim)
            # Best last: among equally old slots the lower one is evicted first.
            chosen = first + rank_blocks(state.sketch, layer, state.host_blocks[first:last], q)[:, :num_chosen].flip(1)
            every_choice.append(chosen)
            self._load(layer, state, source, chosen, slots)
            self._load(layer, state, source, pinned[stored].expand(heads, -1), pinned_slots[:, stored])
        self.residency.place(state.row, torch.stack(every_choice), slots)

    def prepare(
        self, states: list[RowState], positions: list[int], probes: Sequence[bool] | None = None
    ) -> DecodeBatch:
        """Lay out a step's decoded rows, those of a request together and in order, its probe rows last.

        A token that begins a block gets a slot for it in every layer and head.
        """
        batch = DecodeBatch()
        if not states:
            return batch
        heads, block = self.layout.num_kv_heads, self.layout.block_size
        self.residency.tick += 1
        probes = probes or [False] * len(states)
        for index, (state, position, probe) in enumerate(zip(states, positions, probes, strict=True)):
            first, last = state.selection.candidates(position)
            row = DecodeRow(
                state=state,
                position=position,
                candidates=(first, last),
                probe=probe,
                leads=index + 1 == len(states) or states[index + 1] is not state,
            )
            if self.cpu is None and self.triton is None:
                sink, recent = torch.arange(first), torch.arange(last, row.block + 1)
                row.pinned = sink.to(self.device).expand(heads, -1), recent.to(self.device).expand(heads, -1)
            if not state.resident and row.block > state.open_block:
                self._open_block(row)
            batch.rows.append(row)
            if not probe:
                self._book(row)
        if self.cpu is not None:
            batch.step = self.cpu.begin(
                [
                    self.cpu.row(
                        **self._facts(row),
                        pages=row.state.pages,
                        host_blocks=row.state.host_blocks,
                        tick=self.residency.tick,
                    )
                    for row in batch.rows
                ]
            )
        elif self.triton is not None:
            rows = [self.triton.row(**self._facts(row), num_slots=row.state.num_slots) for row in batch.rows]
            batch.step = self.triton.begin(rows, self.residency.tick)
        else:
            batch.open_pages = torch.stack([self._pages_of(row.state, row.block) for row in batch.rows], dim=1)
            batch.offsets = torch.tensor([position % block for position in positions], device=self.device)
        return batch

    def _pages_of(self, state: RowState, block: int) -> torch.Tensor:
        """Where a block that is on the device stands, [layer, local_kv_head] int64."""
        if state.resident:
            return state.pages[block].expand(self.layout.num_layers, self.layout.num_kv_heads)
        return state.pages[self.residency.slot_of_block[:, state.row, :, block].long()]

    def _open_block(self, row: DecodeRow) -> None:
        assert self.transfers is not None
        state = row.state
        in_flight = [self.transfers.in_flight(layer) for layer in range(self.layout.num_layers)]
        flying = torch.tensor(in_flight, dtype=torch.int32, device=self.device)
        self.residency.open_block(state.row, state.num_slots, row.candidates, row.block, flying)
        self.transfers.settle_stores()
        state.open_block = row.block

    def decode(self, layer: int, batch: DecodeBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the step's decoded rows in one layer: q [n, local_head, D], k and v [n, local_kv_head, D]."""
        if self.transfers is not None and not all(row.state.recall for row in batch.rows):
            # Without recall, what has landed shows in the answer: make it what was ordered.
            self.transfers.settle(layer)
        if self.cpu is not None:
            assert isinstance(batch.step, CpuStep)
            out = self.cpu.run(layer, batch.step, q.contiguous(), k.contiguous(), v.contiguous())
            if layer == self.layout.num_layers - 1:
                self._count(batch, batch.step)
            return out
        if self.triton is not None:
            return self.triton.run(layer, batch.step, q, k, v)
        assert batch.open_pages is not None and batch.offsets is not None
        self.pool.write_tokens(layer, batch.open_pages[layer], batch.offsets, k, v)
        ahead: list[Wanted] = []
        out = torch.stack([self._decode_row(layer, row, q[index], ahead) for index, row in enumerate(batch.rows)])
        if ahead:
            assert self.transfers is not None
            self.transfers.prefetch(layer, self.residency.tick, ahead)
        return out

    def _count(self, batch: DecodeBatch, step: CpuStep) -> None:
        """Take over what the compiled path counted in a step's layers."""
        for index, row in enumerate(batch.rows):
            stats = row.state.stats
            stats.counts[1:] += step.prefetched[index].sum(0)
            if not row.probe:
                stats.missed_mass += step.missed_mass[index].sum()
                stats.counts[0] += step.missed_blocks[index].sum()

    def seal(self, state: RowState, block: int) -> None:
        """A block's last token is committed: sketch it and write it through, in every layer."""
        pages = self._pages_of(state, block)
        home = int(state.host_blocks_cpu[block])
        if self.triton is not None:
            self.triton.seal_block(pages, home)
        elif self.sketches:
            k, v = self.pool.gather_block(pages)
            for sketch in self.sketches.values():
                sketch.seal_block(home, k, v)
        if self.transfers is not None:
            self.transfers.store_block(state.row, pages, home)

    @torch.inference_mode()
    def drop_candidates(self, state: RowState, position: int) -> None:
        """Evict every block that a row at `position` does not pin. For controls that must start from a cold device."""
        assert not state.resident
        if self.transfers is not None:
            for layer in range(self.layout.num_layers):
                self.transfers.settle(layer)
        first, last = state.selection.candidates(position)
        held = self.residency.block_in_slot[:, state.row]
        dropped = (held >= first) & (held < last)
        held[dropped] = -1
        self.residency.fetched[:, state.row][dropped] = -1
        self.residency.slot_of_block[:, state.row, :, first:last] = -1

    def _book(self, row: DecodeRow) -> None:
        """Count what a row does in all layers, as far as its position says it."""
        state, stats, num_layers = row.state, row.state.stats, self.layout.num_layers
        if row.selects:
            assert state.selection.budget is not None
            stats.selected_blocks += state.selection.budget * self.layout.num_kv_heads * num_layers
        # Rows that select nothing miss nothing; sketches without means cannot tell.
        if not row.selects or (state.sketch is not None and state.sketch.has_tail):
            stats.missed_mass_count += self.layout.num_kv_heads * self.group * num_layers
        stats.attended_tokens += row.num_attended_tokens
        stats.context_tokens += row.position + 1

    def _facts(self, row: DecodeRow) -> dict[str, Any]:
        """What both kernels' views of a row say."""
        state = row.state
        return {
            "sketch": state.sketch,
            "candidates": row.candidates,
            "budget": state.selection.budget,
            "table_row": state.row,
            "position": row.position,
            "resident": state.resident,
            "use_tail": state.use_tail,
            "recall": self.recall and state.recall,
            "probe": row.probe,
            "reach": row.lookahead.reach,
            "fetch_limit": row.lookahead.limit,
        }

    def _read_prompt(self, layer: int, state: RowState, stop: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the first `stop` tokens (a block border) of a layer's prompt buffers from where they are kept."""
        if stop == 0:
            return
        num_blocks = stop // self.layout.block_size
        if self.transfers is not None:
            self.transfers.read(layer, state.host_blocks_cpu[:num_blocks], keys[:, :stop], values[:, :stop]).wait()
        else:
            pages = state.pages[:num_blocks].expand(keys.shape[0], -1)
            keys[:, :stop], values[:, :stop] = self.pool.gather(layer, pages)

    def _load(
        self, layer: int, state: RowState, source: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy blocks [head, n] into slots [head, n] of one layer; `source` maps block -> host block."""
        assert self.transfers is not None
        heads = torch.arange(blocks.shape[0], device=self.device)[:, None].expand_as(blocks).reshape(-1)
        self.transfers.load(layer, heads, source[blocks.reshape(-1)], state.pages[slots.reshape(-1)]).wait()

    def _decode_row(self, layer: int, row: DecodeRow, q: torch.Tensor, ahead: list[Wanted]) -> torch.Tensor:
        """One row: choose blocks, make them resident, attend them in ascending id. q [local_head, D] -> the same.

        What the row wants for the next step goes to `ahead`; it overwrites slots that no row of this step reads.
        """
        state, heads = row.state, self.layout.num_kv_heads
        grouped = q.view(heads, -1, self.layout.head_dim)
        first, last = row.candidates
        tail_logits = tail_values = None
        picked = None
        if row.selects:
            assert state.sketch is not None and state.selection.budget is not None
            picked = select_blocks(state.sketch, layer, state.host_blocks[first:last], grouped, state.selection.budget)
            tail_logits, tail_values = picked.tail_logits, picked.tail_values
            assert row.pinned is not None
            blocks = torch.cat([row.pinned[0], picked.chosen + first, row.pinned[1]], dim=1)
        else:
            blocks = torch.arange(row.block + 1, device=self.device).expand(heads, -1)
        slots, hidden = (blocks, None) if state.resident else self._make_resident(layer, row, blocks)
        if picked is not None and row.lookahead.limit:
            self._look_ahead(layer, row, first + most_wanted(picked.scores, row.lookahead.reach), ahead)
        k, v = self.pool.gather(layer, state.pages[slots])
        num_tokens = row.num_attended_tokens
        out, missed = attend_blocks(
            grouped,
            k[:, :num_tokens],
            v[:, :num_tokens],
            tail_logits=tail_logits,
            tail_values=tail_values,
            use_tail=state.use_tail,
            hidden=None if hidden is None else hidden.repeat_interleave(self.layout.block_size, 1)[:, :num_tokens],
        )
        if missed is not None and not row.probe:
            state.stats.missed_mass += missed.sum()
        return out.reshape(q.shape)

    def _make_resident(
        self, layer: int, row: DecodeRow, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [head, n] of blocks [head, n], fetched where missing.

        A probe, and any row with recall off, fetches nothing: a mask says which blocks it must leave out.
        """
        assert self.transfers is not None
        state, residency = row.state, self.residency
        in_flight = self.transfers.in_flight(layer)
        slots = residency.lookup(layer, state.row, blocks)
        missing = slots < 0
        hits = torch.where(missing, slots[:, -1:], slots)
        residency.stamp(layer, state.row, hits)
        if row.probe:
            hidden = missing | (residency.fetched[layer, state.row].gather(1, hits) == in_flight)
            return hits, hidden
        landed, late = residency.count_fetched(layer, state.row, hits, in_flight)
        state.stats.prefetched[1] += landed
        state.stats.prefetched[2] += late
        must_wait = in_flight != NOTHING and bool(late)
        heads, columns = missing.nonzero(as_tuple=True)
        state.stats.counts[0] += heads.numel()
        fetches = heads.numel() > 0 and self.recall and state.recall
        wanted = blocks[heads, columns]
        if fetches:
            new_slots, overwrites = residency.replace(
                layer, state.row, state.num_slots, row.candidates, heads, wanted, in_flight
            )
            must_wait |= overwrites
            slots[heads, columns] = new_slots
        if must_wait:
            self.transfers.settle(layer)
        if fetches:
            self.transfers.load(layer, heads, state.host_blocks[wanted], state.pages[new_slots]).wait()
            return slots, None
        return hits, missing if heads.numel() else None

    def _look_ahead(self, layer: int, row: DecodeRow, blocks: torch.Tensor, ahead: list[Wanted]) -> None:
        """Give slots to the missing ones of blocks [head, n], best first; no matter of this step's."""
        assert self.transfers is not None
        if self.transfers.in_flight(layer) != NOTHING:
            return
        state = row.state
        heads, wanted, slots = self.residency.fetch(
            layer, state.row, state.num_slots, row.candidates, blocks, row.lookahead.limit
        )
        if heads.numel():
            state.stats.prefetched[0] += heads.numel()
            ahead.append(Wanted(state.row, heads, state.host_blocks[wanted], state.pages[slots]))
