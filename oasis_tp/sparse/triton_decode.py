"""TritonDecode: the decoded rows of a step through the Triton kernels (kernels/README.md)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from oasis_tp.config import SketchKind
from oasis_tp.kernels import (
    attention,
    copy_plan,
    group_scores,
    merge_states,
    rotate,
    score,
    seal,
    tail_attention,
    top_blocks,
)
from oasis_tp.kernels.launch import check_head_dim
from oasis_tp.kernels.rows import NUM_FACTS, POSITION, PROBE, RESIDENT, TABLE_ROW, Bounds, RowFacts, Rows, in_turn
from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.residency import Residency
from oasis_tp.kv.transfers import Transfers
from oasis_tp.sparse.sketch import Sketch
from oasis_tp.sparse.sketch import rotate as rotate_rows


@dataclass(frozen=True, slots=True)
class TritonRow:
    """One row of a step; `kind` None: it selects nothing and attends everything."""

    facts: RowFacts
    kind: SketchKind | None


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of a step that one launch serves: those of one sketch."""

    kind: SketchKind | None
    first: int
    last: int
    bounds: Bounds


class TritonStep:
    """One step's rows. All that differs between steps of one `key` is in `inputs`, so that a graph that was captured
    with one step serves another: copy its inputs over the first one's.

    inputs: int32, [row, fact] by groups, [row] turns within the groups, [row] places of the groups' rows, the tick.
    """

    def __init__(self, rows: list[TritonRow], tick: int, block_size: int, device: torch.device) -> None:
        # Rows that select nothing go with those of the step's first sketch.
        kinds: list[SketchKind | None] = list(dict.fromkeys(row.kind for row in rows if row.kind is not None)) or [None]
        place = {None: 0, **{kind: index for index, kind in enumerate(kinds)}}
        order = sorted(range(len(rows)), key=lambda index: place[rows[index].kind])
        self.groups: list[_Group] = []
        turns: list[int] = []
        for kind in kinds:
            members = [rows[index].facts for index in order if place[rows[index].kind] == place[kind]]
            first = len(turns)
            turns += [row for _, row in in_turn(members)]
            self.groups.append(_Group(kind, first, len(turns), Bounds.of(members, block_size).rounded()))
        self.num_rows = len(rows)
        self.is_ordered = order == sorted(order)
        facts = [value for index in order for value in rows[index].facts.as_list()]
        self.inputs = torch.tensor([*facts, *turns, *order, tick], dtype=torch.int32).to(device)
        self.key = (self.num_rows, self.is_ordered, tuple((g.kind, g.first, g.last, g.bounds) for g in self.groups))

    @property
    def facts(self) -> torch.Tensor:
        """[row, fact]"""
        return self.inputs[: self.num_rows * NUM_FACTS.value].view(self.num_rows, NUM_FACTS.value)

    @property
    def turns(self) -> torch.Tensor:
        return self.inputs[self.num_rows * NUM_FACTS.value :][: self.num_rows]

    @property
    def order(self) -> torch.Tensor:
        """The groups' rows in the step's order, [row] int64."""
        return self.inputs[self.num_rows * (NUM_FACTS.value + 1) :][: self.num_rows].long()

    @property
    def tick(self) -> torch.Tensor:
        return self.inputs[-1:]


@dataclass(slots=True)
class _Begun:
    """What a step's layers share."""

    tokens: torch.Tensor  # [layer, row * head] int64, flat token rows of the keys in the pool, step's order
    table_rows: torch.Tensor  # [row] int64, groups' order
    is_probe: torch.Tensor  # [row] bool, likewise
    missed: torch.Tensor  # [row, head, group] fp32, added to
    counts: torch.Tensor  # [row, head, 3] int32, added to: see copy_plan.plan_copies


class TritonDecode:
    """Rows are scored, choose, are looked up, fetch and attend without a word from the host: `run` launches kernels
    and reads nothing back, so a step can be captured in a CUDA graph. What the host would have to know, the requests'
    counters, stays in tensors by table row until a request ends.

    A step's background loads join the compute at the step's end, so that none is in flight when the next one begins.
    """

    def __init__(
        self,
        pool: DevicePool,
        residency: Residency,
        transfers: Transfers | None,
        sketches: Mapping[SketchKind, Sketch],
        group: int,
    ) -> None:
        """
        Raises:
            ValueError: head_dim is no power of two.
        """
        layout, device = pool.layout, pool.kv.device
        check_head_dim(layout.head_dim)
        self.pool, self.transfers, self.sketches, self.group = pool, transfers, sketches, group
        self.layout = layout
        self.tables = [
            copy_plan.Tables(
                residency.block_in_slot[layer],
                residency.slot_of_block[layer],
                residency.last_selected[layer],
                residency.fetched[layer],
            )
            for layer in range(layout.num_layers)
        ]
        self._slot_of_block = residency.slot_of_block
        num_rows, max_blocks = residency.slot_of_block.shape[1], residency.slot_of_block.shape[3]
        # Without eviction slot i is block i, so a row of pages is as long as one of blocks.
        self.block_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.host_table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.missed_mass = torch.zeros(num_rows, device=device)
        self.counts = torch.zeros(num_rows, 4, dtype=torch.int64, device=device)  # copy_plan's three, and nothing late
        self._signs = rotate_rows(torch.eye(layout.head_dim))[:, 0].sign().to(device)
        self._tokens = pool.kv.view(-1, layout.head_dim)
        self._heads = torch.arange(layout.num_kv_heads, device=device)
        self._layers = torch.arange(layout.num_layers, device=device)[:, None, None]
        self._begun: _Begun | None = None

    def admit(
        self, table_row: int, pages: torch.Tensor, host_blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A request takes a row: pages [num_slots] and host_blocks [total blocks] int64, on the device.

        Returns what its steps will add to: missed mass [] fp32, and counts [4] int64 (see engine/decode_batch.py).
        """
        self.block_table[table_row, : pages.numel()] = pages
        self.host_table[table_row, : host_blocks.numel()] = host_blocks
        self.missed_mass[table_row] = 0
        self.counts[table_row] = 0
        return self.missed_mass[table_row], self.counts[table_row]

    @staticmethod
    def row(
        *,
        sketch: Sketch | None,
        candidates: tuple[int, int],
        budget: int | None,
        table_row: int,
        position: int,
        num_slots: int,
        resident: bool,
        use_tail: bool,
        recall: bool,
        probe: bool,
        reach: int,
        fetch_limit: int,
    ) -> TritonRow:
        """One row of a step; counts in blocks."""
        first, last = candidates
        selects = budget is not None and last - first > budget
        kind = sketch.kind if sketch is not None and selects else None
        facts = RowFacts(
            table_row=table_row,
            first=first if selects else 0,
            last=last if selects else 0,
            budget=budget if selects and budget is not None else 0,
            position=position,
            num_slots=num_slots,
            resident=resident,
            use_tail=use_tail and kind is not None,
            fetches=recall,
            probe=probe,
            reach=0 if resident else reach,
            limit=0 if resident else fetch_limit,
        )
        return TritonRow(facts, kind)

    def seal_prompt(self, layer: int, host_blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sketch fresh full blocks of a prompt: host_blocks [n] int64, k and v [n, kv_head, block_size, head_dim]."""
        count, num_heads = k.shape[:2]
        pages = torch.arange(count, device=k.device)[None, :, None].expand(1, count, num_heads).contiguous()
        self._seal(slice(layer, layer + 1), host_blocks, k[None], v[None], pages)

    def seal_block(self, pages: torch.Tensor, host_block: int) -> None:
        """Sketch a block that is on the device, in all layers: pages [layer, kv_head] int64."""
        ids = torch.tensor([host_block], device=pages.device)
        kv = self.pool.kv
        self._seal(slice(None), ids, kv[:, :, :, 0], kv[:, :, :, 1], pages[:, None].contiguous())

    def _seal(
        self, layers: slice, host_blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor
    ) -> None:
        for sketch in self.sketches.values():
            if sketch.has_tail:
                seal.seal(k, v, pages, host_blocks, self._signs, *(x[layers] for x in sketch.tensors()))
            else:
                seal.seal_bounds(k, pages, host_blocks, sketch.bounds[layers])

    def begin(self, rows: list[TritonRow], tick: int) -> TritonStep:
        """A step over rows, for all layers in turn. What was stored before may be fetched from now on."""
        if self.transfers is not None:
            self.transfers.settle_stores()
        return TritonStep(rows, tick, self.layout.block_size, self._heads.device)

    def run(self, layer: int, step: TritonStep, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep the rows' tokens and attend, in one layer: q [row, local_head, head_dim] -> the same.

        k and v: [row, local_kv_head, head_dim].
        """
        layout = self.layout
        if layer == 0:
            self._begun = self._begin(step)
        begun = self._begun
        assert begun is not None
        self._tokens.index_copy_(0, begun.tokens[layer], k.reshape(-1, layout.head_dim))
        self._tokens.index_copy_(0, begun.tokens[layer] + layout.block_size, v.reshape(-1, layout.head_dim))
        grouped = q.reshape(step.num_rows, layout.num_kv_heads, self.group, layout.head_dim)
        if not step.is_ordered:
            grouped = grouped.index_select(0, step.order)
        parts = [self._attend(layer, step, group, begun, grouped[group.first : group.last]) for group in step.groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not step.is_ordered:
            out = torch.empty_like(out).index_copy_(0, step.order, out)
        if layer == layout.num_layers - 1:
            self._end(begun)
        return out.view(q.shape)

    def _begin(self, step: TritonStep) -> _Begun:
        layout, facts = self.layout, step.facts.long()
        if not step.is_ordered:  # the step's order, for its keys and values
            facts = torch.empty_like(facts).index_copy_(0, step.order, facts)
        rows, positions = facts[:, TABLE_ROW.value], facts[:, POSITION.value]
        blocks = positions // layout.block_size
        slots = self._slot_of_block[:, rows, :, blocks].permute(1, 0, 2).long()  # [layer, row, head]
        slots = torch.where(facts[:, RESIDENT.value, None] != 0, blocks[:, None], slots)
        pages = self.block_table[rows[:, None], slots].long()
        places = (self._layers * self.pool.num_pages + pages) * layout.num_kv_heads + self._heads
        tokens = places * 2 * layout.block_size + (positions % layout.block_size)[:, None]
        shape = (step.num_rows, layout.num_kv_heads)
        device = facts.device
        return _Begun(
            tokens=tokens.flatten(1),
            table_rows=step.facts[:, TABLE_ROW.value].long(),
            is_probe=step.facts[:, PROBE.value] != 0,
            missed=torch.zeros(*shape, self.group, device=device),
            counts=torch.zeros(*shape, 3, dtype=torch.int32, device=device),
        )

    def _end(self, begun: _Begun) -> None:
        missed = begun.missed.sum((1, 2)).masked_fill(begun.is_probe, 0)
        self.missed_mass.index_add_(0, begun.table_rows, missed)
        self.counts[:, :3].index_add_(0, begun.table_rows, begun.counts.sum(1))
        if self.transfers is not None:
            self.transfers.join()
        self._begun = None

    def _attend(self, layer: int, step: TritonStep, group: _Group, begun: _Begun, q: torch.Tensor) -> torch.Tensor:
        """One group's rows: q [row, kv_head, group, head_dim] -> the same."""
        part = slice(group.first, group.last)
        rows = Rows(step.facts[part], step.turns[part], group.bounds)
        counts = begun.counts[part]
        shares = tail_logits = sketch = None
        if group.kind is None:
            chosen = torch.full((*q.shape[:2], group.bounds.max_chosen), -1, dtype=torch.int32, device=q.device)
        else:
            sketch = self.sketches[group.kind]
            scores, tail_logits = self._score(layer, sketch, rows, q)
            shares = group_scores.group_scores(scores, rows)
            chosen = top_blocks.top_blocks(shares, rows, tail_logits)
        where = (rows, self.host_table, self.block_table, self.tables[layer], step.tick, counts)
        plan = copy_plan.plan_copies(chosen, *where, self.layout.block_size)
        if self.transfers is not None and group.bounds.max_slots:
            self.transfers.load_planned(layer, plan.sources, plan.targets, plan.num_missing)
            if shares is not None and group.bounds.max_limit:
                ahead = copy_plan.plan_ahead(top_blocks.most_wanted(shares, rows), *where)
                self.transfers.prefetch_planned(layer, ahead.sources, ahead.targets, ahead.num_fetched)
        splits = attention.num_splits(group.bounds.max_attended)
        num_states = splits + (0 if tail_logits is None else tail_attention.num_splits(group.bounds.max_candidates))
        states = torch.empty(*q.shape[:3], num_states, q.shape[3], dtype=torch.float32, device=q.device)
        lse = torch.empty(*q.shape[:3], num_states, dtype=torch.float32, device=q.device)
        attention.sparse_attention(q, self.pool.kv[layer], plan.pages, plan.num_tokens, states, lse)
        if sketch is not None and tail_logits is not None:
            tail_attention.tail_attention(
                tail_logits, self.host_table, rows, sketch.means[layer], sketch.mean_scales[layer],
                states, lse, splits, q.dtype,
            )  # fmt: skip
        out, _, missed = merge_states.merge_states(states, lse, splits, rows, q.dtype)
        begun.missed[part] += missed
        return out

    def _score(
        self, layer: int, sketch: Sketch, rows: Rows, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Block scores, and tail logits where the sketch has means, [row, kv_head, group, candidate] fp32."""
        if not sketch.has_tail:
            bounds = sketch.bounds[layer]
            return score.score_bounds(q, self.host_table, rows, bounds, self.layout.block_size), None
        stored = (x[layer] for x in sketch.tensors())
        return score.score(q, rotate.rotate(q, self._signs), self.host_table, rows, *stored)
