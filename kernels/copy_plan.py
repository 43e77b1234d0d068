"""Turn choices into page lists and into a copy plan for what is missing, without the host.

Two launches: `lookup` marks what every row attends as selected now, and only then does `replace` choose victims.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import check, next_power_of_2
from oasis_tp.kernels.rows import BUDGET, FIRST, LAST, NUM_FACTS, NUM_SLOTS, POSITION, RESIDENT, TABLE_ROW, Rows

NEVER = tl.constexpr(2**31 - 1)
CHUNK = 256
VICTIM_CHUNK = 32


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a step's rows attend in one layer, and what must be fetched first."""

    pages: torch.Tensor  # [row, kv_head, max_attended] int32 in ascending block order, -1 behind the last
    num_tokens: torch.Tensor  # [row, kv_head] int32, all tokens of those pages but the last page's unwritten ones
    num_missing: torch.Tensor  # [row, kv_head] int32
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
    block_table: tl.tensor,
    slot_of_block: tl.tensor,
    last_selected: tl.tensor,
    tick: tl.tensor,
    pages: tl.tensor,
    num_tokens: tl.tensor,
    num_missing: tl.tensor,
    missing: tl.tensor,
    targets: tl.tensor,
    max_chosen: int,
    max_attended: int,
    max_pages: int,
    max_slots: int,
    max_blocks: int,
    B: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(0)
    fact = facts + row * NUM_FACTS
    pair = row * num_heads + head
    table_row = tl.load(fact + TABLE_ROW).to(tl.int64)
    first, last, position = tl.load(fact + FIRST), tl.load(fact + LAST), tl.load(fact + POSITION)
    resident = tl.load(fact + RESIDENT)
    num_chosen = tl.minimum(tl.load(fact + BUDGET), last - first)
    length = first + num_chosen + position // B + 1 - last
    table = table_row * num_heads + head
    now = tl.load(tick)
    tabled = tl.where(resident == 0, length, 0)  # blocks of which the residency tables say where they are
    seen = tl.zeros((), tl.int32)
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
        gone = (alive & (slot < 0)).to(tl.int32)
        tl.store(missing + pair * max_attended + seen + tl.cumsum(gone, 0) - gone, index, mask=gone == 1)
        seen += tl.sum(gone, 0)
    tl.store(num_missing + pair, seen)
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
def replace_kernel(
    chosen: tl.tensor,
    facts: tl.tensor,
    host_table: tl.tensor,
    block_table: tl.tensor,
    block_in_slot: tl.tensor,
    slot_of_block: tl.tensor,
    last_selected: tl.tensor,
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
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
    slot_of_block += table * max_blocks

    slot = tl.arange(0, SLOTS)
    key = _victim_keys(slot, block_in_slot, last_selected, num_slots, first, last, now)
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, num_slots, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key = _victim_keys(other, block_in_slot, last_selected, num_slots, first, last, now)[None, :]
        sooner = (other_key < key[:, None]) | ((other_key == key[:, None]) & (other[None, :] < slot[:, None]))
        rank += tl.sum(sooner.to(tl.int32), 1)
    victim = (key != NEVER) & (rank < needed)
    held = tl.load(block_in_slot + slot, mask=victim, other=-1).to(tl.int32)
    at = tl.load(missing + pair * max_attended + rank, mask=victim, other=0)
    block = _attended(chosen + pair * max_chosen, at, first, last, num_chosen)
    page = tl.load(block_table + table_row * max_pages + slot, mask=victim, other=-1)
    source = tl.load(host_table + table_row * host_stride + block, mask=victim, other=-1)
    # Every warp has read the tables before any writes to them.
    tl.debug_barrier()
    kind = block_in_slot.dtype.element_ty
    tl.store(slot_of_block + held, tl.full((SLOTS,), -1, kind), mask=victim & (held >= 0))
    tl.store(slot_of_block + block, slot.to(kind), mask=victim)
    tl.store(block_in_slot + slot, block.to(kind), mask=victim)
    tl.store(last_selected + slot, tl.full((SLOTS,), 0, tl.int32) + now, mask=victim)
    tl.store(pages + pair * max_attended + at, page, mask=victim)
    tl.store(sources + pair * max_attended + rank, source, mask=victim)
    tl.store(targets + pair * max_attended + rank, page, mask=victim)


def plan_copies(
    chosen: torch.Tensor,
    rows: Rows,
    host_table: torch.Tensor,
    block_table: torch.Tensor,
    block_in_slot: torch.Tensor,
    slot_of_block: torch.Tensor,
    last_selected: torch.Tensor,
    tick: torch.Tensor,
    block_size: int,
) -> CopyPlan:
    """Look up every row's blocks, give the missing ones slots, and say which copies make the page lists true.

    The tables of one layer are updated in place as `Residency.stamp` and `Residency.replace` do, to the slot. Victims
    are sealed and stored candidates that no row selected in this tick. What is missing past the slots that may go
    (never, where slots were planned for the budget) keeps page -1 and is not attended.

    Args:
        chosen: [row, kv_head, max_chosen] int32, as `top_blocks` returns it.
        host_table: [table_row, max_blocks] int32, block -> host block.
        block_table: [table_row, max_pages] int32, slot -> page.
        block_in_slot: [table_row, kv_head, max_slots]; slot_of_block: [table_row, kv_head, max_blocks]; both int16 or
            both int32; last_selected: [table_row, kv_head, max_slots] int32.
        tick: [1] int32, the step's number: larger than any before it.
    """
    num_rows, num_heads, max_chosen = chosen.shape
    num_tables, _, max_slots = block_in_slot.shape
    max_blocks = slot_of_block.shape[2]
    check(chosen, (rows.num_rows, num_heads, rows.max_chosen), torch.int32, like=chosen)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=chosen)
    check(host_table, (num_tables, host_table.shape[1]), torch.int32, like=chosen)
    check(block_table, (num_tables, block_table.shape[1]), torch.int32, like=chosen)
    check(block_in_slot, (num_tables, num_heads, max_slots), torch.int16, torch.int32, like=chosen)
    check(slot_of_block, (num_tables, num_heads, max_blocks), block_in_slot.dtype, like=chosen)
    check(last_selected, (num_tables, num_heads, max_slots), torch.int32, like=chosen)
    check(tick, (1,), torch.int32, like=chosen)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(num_rows, num_heads, *shape, dtype=torch.int32, device=chosen.device)

    length = rows.max_attended
    plan = CopyPlan(empty(length), empty(), empty(), empty(length), empty(length), empty(length))
    widths = (max_chosen, length, block_table.shape[1], max_slots, max_blocks)
    lookup_kernel[(num_heads, num_rows)](
        chosen, rows.facts, block_table, slot_of_block, last_selected, tick,
        plan.pages, plan.num_tokens, plan.num_missing, plan.missing, plan.targets, *widths,
        B=block_size, CHUNK=min(CHUNK, next_power_of_2(length)),
    )  # fmt: skip
    replace_kernel[(num_heads, num_rows)](
        chosen, rows.facts, host_table, block_table, block_in_slot, slot_of_block, last_selected, tick,
        plan.pages, plan.num_missing, plan.missing, plan.sources, plan.targets, host_table.shape[1], *widths,
        SLOTS=next_power_of_2(max_slots), CHUNK=VICTIM_CHUNK,
    )  # fmt: skip
    return plan
