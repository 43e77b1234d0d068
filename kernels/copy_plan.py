"""Turn choices into page lists and into copy plans, without the host: for what is missing, and for what comes next.

Rows of one request share its tables and go one after the other, in waves (see rows.Bounds). A wave takes two launches:
`lookup` marks what its rows attend as selected now, and only then does `replace` choose victims.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import check, next_power_of_2
from oasis_tp.kernels.rows import (
    BUDGET,
    FETCHES,
    FIRST,
    LAST,
    LIMIT,
    NUM_FACTS,
    NUM_SLOTS,
    POSITION,
    PROBE,
    REACH,
    RESIDENT,
    TABLE_ROW,
    Rows,
)

NEVER = tl.constexpr(2**31 - 1)
CHUNK = 256
VICTIM_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Tables:
    """One layer's residency (kv/residency.py); updated in place, as `Residency` does, to the slot."""

    block_in_slot: torch.Tensor  # [table_row, kv_head, max_slots] int16 or int32, -1 = empty
    slot_of_block: torch.Tensor  # [table_row, kv_head, max_blocks], of the same type, -1 = not resident
    last_selected: torch.Tensor  # [table_row, kv_head, max_slots] int32
    fetched: torch.Tensor  # [table_row, kv_head, max_slots] int32, tick of the background load into a slot; -1 = none


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a step's rows attend in one layer, and what must be fetched first."""

    pages: torch.Tensor  # [row, kv_head, max_attended] int32 in ascending block order, -1 behind the last
    num_tokens: torch.Tensor  # [row, kv_head] int32, all tokens of those pages but the last page's unwritten ones
    num_missing: torch.Tensor  # [row, kv_head] int32, to be fetched: 0 for a row that does not fetch
    missing: torch.Tensor  # [row, kv_head, max_attended] int32, position in `pages` of each missing block
    sources: torch.Tensor  # [row, kv_head, max_attended] int32 host blocks; the first num_missing count
    targets: torch.Tensor  # [row, kv_head, max_attended] int32 pages, likewise; -1 = no slot was to be had


@triton.jit
def _attended(
    chosen: tl.tensor, index: tl.tensor, first: tl.tensor, last: tl.tensor, num_chosen: tl.tensor
) -> tl.tensor:
    """Block at `index` of a row's list: the sink, the chosen, then the recent blocks."""
    picked = index - first
    is_picked = (picked >= 0) & (picked < num_chosen)
    block = tl.load(chosen + picked, mask=is_picked, other=0) + first
    return tl.where(picked < 0, index, tl.where(is_picked, block, last + picked - num_chosen))


@triton.jit
def lookup_kernel(
    chosen: tl.tensor,
    facts: tl.tensor,
    order: tl.tensor,
    block_table: tl.tensor,
    slot_of_block: tl.tensor,
    last_selected: tl.tensor,
    fetched: tl.tensor,
    tick: tl.tensor,
    pages: tl.tensor,
    num_tokens: tl.tensor,
    num_missing: tl.tensor,
    missing: tl.tensor,
    targets: tl.tensor,
    counts: tl.tensor,
    max_chosen: int,
    max_attended: int,
    max_pages: int,
    max_slots: int,
    max_blocks: int,
    B: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.load(order + tl.program_id(1)).to(tl.int64)
    num_heads = tl.num_programs(0)
    fact = facts + row * NUM_FACTS
    pair = row * num_heads + head
    table_row = tl.load(fact + TABLE_ROW).to(tl.int64)
    probe = tl.load(fact + PROBE)
    first, last, position = tl.load(fact + FIRST), tl.load(fact + LAST), tl.load(fact + POSITION)
    resident = tl.load(fact + RESIDENT)
    num_chosen = tl.minimum(tl.load(fact + BUDGET), last - first)
    length = first + num_chosen + position // B + 1 - last
    table = table_row * num_heads + head
    now = tl.load(tick)
    tabled = tl.where(resident == 0, length, 0)  # blocks of which the residency tables say where they are
    counted = tl.where(probe == 0, tabled, 0)
    seen = tl.zeros((), tl.int32)
    landed = tl.zeros((), tl.int32)
    for start in range(0, max_attended, CHUNK):
        index = start + tl.arange(0, CHUNK)
        alive = index < length
        block = _attended(chosen + pair * max_chosen, index, first, last, num_chosen)
        held = tl.load(slot_of_block + table * max_blocks + block, mask=index < tabled, other=-1)
        slot = tl.where(index < tabled, held.to(tl.int32), block)
        hit = alive & (slot >= 0)
        page = tl.load(block_table + table_row * max_pages + slot, mask=hit, other=-1)
        tl.store(pages + pair * max_attended + index, page, mask=index < max_attended)
        tl.store(targets + pair * max_attended + index, tl.full((CHUNK,), -1, tl.int32), mask=index < max_attended)
        stamp = hit & (index < tabled)
        tl.store(last_selected + table * max_slots + slot, tl.full((CHUNK,), 0, tl.int32) + now, mask=stamp)
        came = fetched + table * max_slots + slot
        ahead = hit & (index < counted) & (tl.load(came, mask=stamp, other=-1) >= 0)
        tl.debug_barrier()  # threads may hold the same entry: all have read it
        tl.store(came, tl.full((CHUNK,), -1, tl.int32), mask=ahead)
        landed += tl.sum(ahead.to(tl.int32), 0)
        gone = (alive & (slot < 0)).to(tl.int32)
        tl.store(missing + pair * max_attended + seen + tl.cumsum(gone, 0) - gone, index, mask=gone == 1)
        seen += tl.sum(gone, 0)
    tl.store(num_missing + pair, tl.where(tl.load(fact + FETCHES) != 0, seen, 0))
    missed = counts + pair * 3
    tl.store(missed, tl.load(missed) + tl.where(probe == 0, seen, 0))
    tl.store(missed + 2, tl.load(missed + 2) + landed)
    tl.store(num_tokens + pair, (length - 1) * B + position % B + 1)


@triton.jit
def _victim_keys(
    slot: tl.tensor,
    block_in_slot: tl.tensor,
    last_selected: tl.tensor,
    num_slots: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    now: tl.tensor,
) -> tl.tensor:
    """When each slot may go: free ones first, then the least recently selected; NEVER if it may not."""
    inside = slot < num_slots
    held = tl.load(block_in_slot + slot, mask=inside, other=-1).to(tl.int32)
    stamp = tl.load(last_selected + slot, mask=inside, other=0)
    free = held < 0
    may_go = inside & (free | ((held >= first) & (held < last))) & (stamp != now)
    return tl.where(may_go, tl.where(free, -2, stamp), NEVER)


@triton.jit
def _victims(
    slot: tl.tensor,
    block_in_slot: tl.tensor,
    last_selected: tl.tensor,
    num_slots: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    now: tl.tensor,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of every slot, whether it may go, and how many go before it."""
    key = _victim_keys(slot, block_in_slot, last_selected, num_slots, first, last, now)
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, num_slots, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key = _victim_keys(other, block_in_slot, last_selected, num_slots, first, last, now)[None, :]
        sooner = (other_key < key[:, None]) | ((other_key == key[:, None]) & (other[None, :] < slot[:, None]))
        rank += tl.sum(sooner.to(tl.int32), 1)
    return key != NEVER, rank


@triton.jit
def _put(
    slot: tl.tensor,
    block: tl.tensor,
    held: tl.tensor,
    victim: tl.tensor,
    block_in_slot: tl.tensor,
    slot_of_block: tl.tensor,
    last_selected: tl.tensor,
    fetched: tl.tensor,
    now: tl.tensor,
    came: tl.tensor,
    SLOTS: tl.constexpr,
) -> None:
    """Let the victims' slots hold `block` and forget what they `held`; every warp has read the tables."""
    kind = block_in_slot.dtype.element_ty
    tl.store(slot_of_block + held, tl.full((SLOTS,), -1, kind), mask=victim & (held >= 0))
    tl.store(slot_of_block + block, slot.to(kind), mask=victim)
    tl.store(block_in_slot + slot, block.to(kind), mask=victim)
    tl.store(last_selected + slot, tl.full((SLOTS,), 0, tl.int32) + now, mask=victim)
    tl.store(fetched + slot, tl.full((SLOTS,), 0, tl.int32) + came, mask=victim)


@triton.jit
def replace_kernel(
    chosen: tl.tensor,
    facts: tl.tensor,
    order: tl.tensor,
    host_table: tl.tensor,
    block_table: tl.tensor,
    block_in_slot: tl.tensor,
    slot_of_block: tl.tensor,
    last_selected: tl.tensor,
    fetched: tl.tensor,
    tick: tl.tensor,
    pages: tl.tensor,
    num_missing: tl.tensor,
    missing: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    host_stride: int,
    max_chosen: int,
    max_attended: int,
    max_pages: int,
    max_slots: int,
    max_blocks: int,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.load(order + tl.program_id(1)).to(tl.int64)
    num_heads = tl.num_programs(0)
    fact = facts + row * NUM_FACTS
    pair = row * num_heads + head
    needed = tl.load(num_missing + pair)
    if needed == 0:
        return
    table_row = tl.load(fact + TABLE_ROW).to(tl.int64)
    first, last, num_slots = tl.load(fact + FIRST), tl.load(fact + LAST), tl.load(fact + NUM_SLOTS)
    num_chosen = tl.minimum(tl.load(fact + BUDGET), last - first)
    now = tl.load(tick)
    table = table_row * num_heads + head
    block_in_slot += table * max_slots
    last_selected += table * max_slots
    fetched += table * max_slots
    slot_of_block += table * max_blocks

    slot = tl.arange(0, SLOTS)
    may_go, rank = _victims(slot, block_in_slot, last_selected, num_slots, first, last, now, SLOTS, CHUNK)
    victim = may_go & (rank < needed)
    held = tl.load(block_in_slot + slot, mask=victim, other=-1).to(tl.int32)
    at = tl.load(missing + pair * max_attended + rank, mask=victim, other=0)
    block = _attended(chosen + pair * max_chosen, at, first, last, num_chosen)
    page = tl.load(block_table + table_row * max_pages + slot, mask=victim, other=-1)
    source = tl.load(host_table + table_row * host_stride + block, mask=victim, other=-1)
    # Every warp has read the tables before any writes to them.
    tl.debug_barrier()
    _put(slot, block, held, victim, block_in_slot, slot_of_block, last_selected, fetched, now, -1, SLOTS)
    tl.store(pages + pair * max_attended + at, page, mask=victim)
    tl.store(sources + pair * max_attended + rank, source, mask=victim)
    tl.store(targets + pair * max_attended + rank, page, mask=victim)


@triton.jit
def ahead_kernel(
    wanted: tl.tensor,
    facts: tl.tensor,
    host_table: tl.tensor,
    block_table: tl.tensor,
    block_in_slot: tl.tensor,
    slot_of_block: tl.tensor,
    last_selected: tl.tensor,
    fetched: tl.tensor,
    tick: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    num_fetched: tl.tensor,
    counts: tl.tensor,
    host_stride: int,
    max_reach: int,
    max_limit: int,
    max_pages: int,
    max_slots: int,
    max_blocks: int,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    REACH_CHUNK: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(0)
    fact = facts + row * NUM_FACTS
    pair = row * num_heads + head
    first, last, num_slots = tl.load(fact + FIRST), tl.load(fact + LAST), tl.load(fact + NUM_SLOTS)
    reach, limit = tl.minimum(tl.load(fact + REACH), last - first), tl.load(fact + LIMIT)
    table_row = tl.load(fact + TABLE_ROW).to(tl.int64)
    now = tl.load(tick)
    table = table_row * num_heads + head
    block_in_slot += table * max_slots
    last_selected += table * max_slots
    fetched += table * max_slots
    slot_of_block += table * max_blocks
    sources += pair * max_limit
    targets += pair * max_limit

    # The first `limit` missing ones, noted in `sources` as blocks.
    missing = tl.zeros((), tl.int32)
    for start in range(0, tl.where(limit > 0, reach, 0), REACH_CHUNK):
        index = start + tl.arange(0, REACH_CHUNK)
        alive = index < reach
        block = first + tl.load(wanted + pair * max_reach + index, mask=alive, other=0)
        held = tl.load(slot_of_block + block, mask=alive, other=0).to(tl.int32)
        gone = (alive & (held < 0)).to(tl.int32)
        place = missing + tl.cumsum(gone, 0) - gone
        tl.store(sources + place, block, mask=(gone == 1) & (place < limit))
        missing += tl.sum(gone, 0)
    needed = tl.minimum(missing, limit)
    if needed == 0:
        tl.store(num_fetched + pair, 0)
        return
    tl.debug_barrier()

    slot = tl.arange(0, SLOTS)
    may_go, rank = _victims(slot, block_in_slot, last_selected, num_slots, first, last, now, SLOTS, CHUNK)
    victim = may_go & (rank < needed)
    held = tl.load(block_in_slot + slot, mask=victim, other=-1).to(tl.int32)
    block = tl.load(sources + rank, mask=victim, other=0)
    page = tl.load(block_table + table_row * max_pages + slot, mask=victim, other=-1)
    home = tl.load(host_table + table_row * host_stride + block, mask=victim, other=-1)
    tl.debug_barrier()
    _put(slot, block, held, victim, block_in_slot, slot_of_block, last_selected, fetched, now, now, SLOTS)
    tl.store(sources + rank, home, mask=victim)
    tl.store(targets + rank, page, mask=victim)
    count = tl.sum(victim.to(tl.int32), 0)
    tl.store(num_fetched + pair, count)
    tl.store(counts + pair * 3 + 1, tl.load(counts + pair * 3 + 1) + count)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Copies for the next step."""

    sources: torch.Tensor  # [row, kv_head, max_limit] int32 host blocks; the first num_fetched count
    targets: torch.Tensor  # [row, kv_head, max_limit] int32 pages, likewise
    num_fetched: torch.Tensor  # [row, kv_head] int32


def plan_copies(
    chosen: torch.Tensor,
    rows: Rows,
    host_table: torch.Tensor,
    block_table: torch.Tensor,
    tables: Tables,
    tick: torch.Tensor,
    counts: torch.Tensor,
    block_size: int,
) -> CopyPlan:
    """Look up every row's blocks, give the missing ones slots, and say which copies make the page lists true.

    Victims are sealed and stored candidates that no row selected in this tick. What is missing past the slots that may
    go (never, where slots were planned for the budget) keeps page -1 and is not attended; so is all that a row misses
    which does not fetch.

    Args:
        chosen: [row, kv_head, max_chosen] int32, as `top_blocks` returns it.
        host_table: [table_row, max_blocks] int32, block -> host block.
        block_table: [table_row, max_pages] int32, slot -> page.
        tick: [1] int32, the step's number: larger than any before it.
        counts: [row, kv_head, 3] int32, added to: blocks missing, ordered ahead (by `plan_ahead`), and found that were
            brought in ahead.
    """
    num_rows, num_heads, max_chosen = chosen.shape
    _check_tables(tables, host_table, block_table, tick, chosen)
    check(chosen, (rows.num_rows, num_heads, rows.bounds.max_chosen), torch.int32, like=chosen)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=chosen)
    check(rows.order, (num_rows,), torch.int32, like=chosen)
    check(counts, (num_rows, num_heads, 3), torch.int32, like=chosen)
    assert sum(rows.bounds.waves) == num_rows, (rows.bounds.waves, num_rows)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(num_rows, num_heads, *shape, dtype=torch.int32, device=chosen.device)

    length, max_slots, max_blocks = (
        rows.bounds.max_attended,
        tables.block_in_slot.shape[2],
        tables.slot_of_block.shape[2],
    )
    plan = CopyPlan(empty(length), empty(), empty(), empty(length), empty(length), empty(length))
    widths = (max_chosen, length, block_table.shape[1], max_slots, max_blocks)
    for order in rows.order.split(list(rows.bounds.waves)):
        grid = (num_heads, order.numel())
        lookup_kernel[grid](
            chosen, rows.facts, order, block_table, tables.slot_of_block, tables.last_selected, tables.fetched, tick,
            plan.pages, plan.num_tokens, plan.num_missing, plan.missing, plan.targets, counts, *widths,
            B=block_size, CHUNK=min(CHUNK, next_power_of_2(length)),
        )  # fmt: skip
        if rows.bounds.max_slots == 0:
            continue
        replace_kernel[grid](
            chosen, rows.facts, order, host_table, block_table,
            tables.block_in_slot, tables.slot_of_block, tables.last_selected, tables.fetched, tick,
            plan.pages, plan.num_missing, plan.missing, plan.sources, plan.targets, host_table.shape[1], *widths,
            SLOTS=next_power_of_2(rows.bounds.max_slots), CHUNK=VICTIM_CHUNK,
        )  # fmt: skip
    return plan


def plan_ahead(
    wanted: torch.Tensor,
    rows: Rows,
    host_table: torch.Tensor,
    block_table: torch.Tensor,
    tables: Tables,
    tick: torch.Tensor,
    counts: torch.Tensor,
) -> Ahead:
    """Give slots to what is missing of the blocks that rows want next; no slot that this tick selected is touched.

    At most one row of a request looks ahead, and `plan_copies` has planned all rows of the step. Who finds no victim
    stays out.

    Args:
        wanted: [row, kv_head, max_reach] int32 positions among the candidates, best first (`top_blocks.most_wanted`).
        host_table, block_table, tick, counts: as for `plan_copies`.
    """
    num_rows, num_heads, max_reach = wanted.shape
    _check_tables(tables, host_table, block_table, tick, wanted)
    check(wanted, (rows.num_rows, num_heads, rows.bounds.max_reach), torch.int32, like=wanted)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=wanted)
    check(counts, (num_rows, num_heads, 3), torch.int32, like=wanted)
    limit = rows.bounds.max_limit

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(num_rows, num_heads, *shape, dtype=torch.int32, device=wanted.device)

    ahead = Ahead(empty(limit), empty(limit), empty())
    max_slots, max_blocks = tables.block_in_slot.shape[2], tables.slot_of_block.shape[2]
    ahead_kernel[(num_heads, num_rows)](
        wanted, rows.facts, host_table, block_table,
        tables.block_in_slot, tables.slot_of_block, tables.last_selected, tables.fetched, tick,
        ahead.sources, ahead.targets, ahead.num_fetched, counts,
        host_table.shape[1], max_reach, limit, block_table.shape[1], max_slots, max_blocks,
        SLOTS=next_power_of_2(rows.bounds.max_slots), CHUNK=VICTIM_CHUNK,
        REACH_CHUNK=min(CHUNK, next_power_of_2(max_reach)),
    )  # fmt: skip
    return ahead


def _check_tables(
    tables: Tables, host_table: torch.Tensor, block_table: torch.Tensor, tick: torch.Tensor, like: torch.Tensor
) -> None:
    num_tables, num_heads, max_slots = tables.block_in_slot.shape
    assert num_heads == like.shape[1], (num_heads, like.shape)
    max_blocks = tables.slot_of_block.shape[2]
    check(host_table, (num_tables, host_table.shape[1]), torch.int32, like=like)
    check(block_table, (num_tables, block_table.shape[1]), torch.int32, like=like)
    check(tables.block_in_slot, (num_tables, num_heads, max_slots), torch.int16, torch.int32, like=like)
    check(tables.slot_of_block, (num_tables, num_heads, max_blocks), tables.block_in_slot.dtype, like=like)
    check(tables.last_selected, (num_tables, num_heads, max_slots), torch.int32, like=like)
    check(tables.fetched, (num_tables, num_heads, max_slots), torch.int32, like=like)
    check(tick, (1,), torch.int32, like=like)
