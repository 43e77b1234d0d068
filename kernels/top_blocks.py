"""The best candidates of every row and KV head: score descending, id ascending, a total order."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import check, next_power_of_2
from oasis_tp.kernels.rows import BUDGET, FIRST, LAST, NUM_FACTS, REACH, Rows

MAX_CHUNK = 2048


@triton.jit
def _keys(scores: tl.tensor, index: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Scores as int32 of the same order; both zeros are one."""
    score = tl.load(scores + index, mask=index < count, other=0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def top_blocks_kernel(
    scores: tl.tensor,
    facts: tl.tensor,
    tail_logits: tl.tensor,
    chosen: tl.tensor,
    max_candidates: int,
    max_chosen: int,
    GROUP: tl.constexpr,
    WANTED: tl.constexpr,
    CHUNK: tl.constexpr,
    MARK: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair = row * tl.num_programs(0) + head
    count = tl.load(facts + row * NUM_FACTS + LAST) - tl.load(facts + row * NUM_FACTS + FIRST)
    wanted = tl.minimum(tl.load(facts + row * NUM_FACTS + WANTED), count)
    scores += pair * max_candidates
    chosen += pair * max_chosen
    column = tl.arange(0, CHUNK)

    # Radix select from the highest byte down: `threshold` is the wanted-th largest key, `ties` how many equal to it
    # are still wanted when all larger ones are taken.
    digit = tl.arange(0, 256)
    threshold = tl.zeros((), tl.int32)
    ties = wanted
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, count, CHUNK):
            key = _keys(scores, start + column, count)
            alive = start + column < count
            if shift < 24:
                alive = alive & ((key & -(1 << (shift + 8))) == threshold)  # the bytes above are those settled
            byte = (key >> shift) & 255
            if shift == 24:
                byte = byte ^ 128  # the sign bit: negative keys come first
            counts += tl.histogram(byte, 256, mask=alive)
        not_below = tl.cumsum(counts, 0, reverse=True)
        best = tl.sum((not_below >= ties).to(tl.int32), 0) - 1
        ties -= tl.sum(tl.where(digit == best, not_below - counts, 0), 0)
        if shift == 24:
            best = best ^ 128
        threshold |= best << shift

    taken = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(0, count, CHUNK):
        index = start + column
        key = _keys(scores, index, count)
        tie = ((key == threshold) & (index < count)).to(tl.int32)
        tie_rank = equal + tl.cumsum(tie, 0) - tie
        take = ((key > threshold) & (index < count)) | ((tie == 1) & (tie_rank < ties))
        ones = take.to(tl.int32)
        tl.store(chosen + taken + tl.cumsum(ones, 0) - ones, index, mask=take)
        if MARK:
            for member in tl.static_range(GROUP):
                logits = tail_logits + (pair * GROUP + member) * max_candidates
                tl.store(logits + index, tl.full((CHUNK,), float("-inf"), tl.float32), mask=take)
        taken += tl.sum(ones, 0)
        equal += tl.sum(tie, 0)
    for start in range(0, max_chosen, CHUNK):
        index = start + column
        tl.store(chosen + index, tl.full((CHUNK,), -1, tl.int32), mask=(index >= wanted) & (index < max_chosen))


def top_blocks(scores: torch.Tensor, rows: Rows, tail_logits: torch.Tensor | None = None) -> torch.Tensor:
    """Each row's budget of best candidates, in ascending position.

    Args:
        scores: [row, kv_head, max_candidates] fp32 without NaN, as `group_scores` returns them.
        tail_logits: [row, kv_head, group, max_candidates] fp32; set to -inf at what is chosen.

    Returns:
        Positions among the candidates, [row, kv_head, max_chosen] int32, -1 behind the last.
    """
    return _top_blocks(scores, rows, BUDGET.value, rows.bounds.max_chosen, tail_logits)


def most_wanted(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Each row's `reach` best candidates, best first, ties by lower position: [row, kv_head, max_reach] int32.

    As `top_blocks` otherwise. Few are left to sort once the choice is made.
    """
    ascending = _top_blocks(scores, rows, REACH.value, rows.bounds.max_reach, None)
    their_scores = scores.gather(2, ascending.clamp(min=0).long()).masked_fill(ascending < 0, float("-inf"))
    return ascending.gather(2, torch.sort(their_scores, dim=-1, descending=True, stable=True).indices)


def _top_blocks(
    scores: torch.Tensor, rows: Rows, wanted: int, max_chosen: int, tail_logits: torch.Tensor | None
) -> torch.Tensor:
    """`wanted`: the column of the facts that says how many."""
    num_rows, num_heads, count = scores.shape
    check(scores, (rows.num_rows, num_heads, rows.bounds.max_candidates), torch.float32, like=scores)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=scores)
    group = 1 if tail_logits is None else tail_logits.shape[2]
    if tail_logits is not None:
        check(tail_logits, (num_rows, num_heads, group, count), torch.float32, like=scores)
    chosen = torch.empty(num_rows, num_heads, max_chosen, dtype=torch.int32, device=scores.device)
    top_blocks_kernel[(num_heads, num_rows)](
        scores, rows.facts, scores if tail_logits is None else tail_logits, chosen, count, max_chosen,
        GROUP=group, WANTED=wanted, CHUNK=min(MAX_CHUNK, max(16, next_power_of_2(count))), MARK=tail_logits is not None,
    )  # fmt: skip
    return chosen
