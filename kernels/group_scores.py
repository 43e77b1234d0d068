"""One score per block and KV head from those of its query heads."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import check, next_power_of_2
from oasis_tp.kernels.rows import FIRST, LAST, NUM_FACTS, Rows


@triton.jit
def group_scores_kernel(
    scores: tl.tensor,
    facts: tl.tensor,
    out: tl.tensor,
    max_candidates: int,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair = row * tl.num_programs(0) + head
    num_candidates = tl.load(facts + row * NUM_FACTS + LAST) - tl.load(facts + row * NUM_FACTS + FIRST)
    member, column = tl.arange(0, GROUP_PAD), tl.arange(0, CHUNK)
    rows = scores + (pair * GROUP + member[:, None]) * max_candidates
    # The padding's scores are 0, so that its sums stay finite; they are left out of the maximum below.
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    for start in range(0, num_candidates, CHUNK):
        alive = (start + column < num_candidates)[None, :]
        tile = tl.load(rows + start + column[None, :], mask=alive & (member < GROUP)[:, None], other=0)
        tile = tl.where(alive, tile, float("-inf"))
        higher = tl.maximum(highest, tl.max(tile, 1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(tile - higher[:, None]), 1)
        highest = higher
    log_mass = highest + tl.log(total)
    for start in range(0, max_candidates, CHUNK):
        alive = start + column < num_candidates
        tile = tl.load(rows + start + column[None, :], mask=alive[None, :] & (member < GROUP)[:, None], other=0)
        share = tl.where((member < GROUP)[:, None], tile - log_mass[:, None], float("-inf"))
        best = tl.where(alive, tl.max(share, 0), float("-inf"))
        tl.store(out + pair * max_candidates + start + column, best, mask=start + column < max_candidates)


def group_scores(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The largest log share of the candidates' mass that any query head gives a block.

    scores [row, kv_head, group, max_candidates] fp32 as `score` returns them -> [row, kv_head, max_candidates] fp32,
    -inf past a row's candidates.
    """
    num_rows, num_heads, group, count = scores.shape
    check(scores, (rows.num_rows, num_heads, group, rows.bounds.max_candidates), torch.float32, like=scores)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=scores)
    out = torch.empty(num_rows, num_heads, count, dtype=torch.float32, device=scores.device)
    group_scores_kernel[(num_heads, num_rows)](
        scores, rows.facts, out, count,
        GROUP=group, GROUP_PAD=next_power_of_2(group), CHUNK=min(1024, next_power_of_2(count)),
    )  # fmt: skip
    return out
