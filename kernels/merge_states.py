"""Put the states of split attention together (log-sum-exp merge, as in Flash-Decoding)."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, check_head_dim
from oasis_tp.kernels.rows import NUM_FACTS, USE_TAIL, Rows

TILE = 16


@triton.jit
def _highest(row_lse: tl.tensor, first: tl.tensor, last: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The largest of the states' logs of mass, first .. last-1."""
    highest = tl.full((), float("-inf"), tl.float32)
    for start in range(first, last, TILE):
        index = start + tl.arange(0, TILE)
        highest = tl.maximum(highest, tl.max(tl.load(row_lse + index, mask=index < last, other=float("-inf")), 0))
    return highest


@triton.jit
def _sums(
    states: tl.tensor,
    row_lse: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    origin: tl.tensor,
    own_origin: tl.tensor,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weighted values and weights over states first .. last-1 against `origin`, and their mass against `own_origin`.

    Tiles count from `first`, and empty states add zeros: how many of them follow changes no bit.
    """
    value = tl.zeros((D,), tl.float32)
    total = tl.zeros((), tl.float32)
    mass = tl.zeros((), tl.float32)
    for start in range(first, last, TILE):
        index = start + tl.arange(0, TILE)
        part = tl.load(row_lse + index, mask=index < last, other=float("-inf"))
        weight = tl.exp(part - origin)
        at = states + index[:, None] * D + tl.arange(0, D)[None, :]
        value += tl.sum(tl.load(at, mask=(weight > 0)[:, None], other=0) * weight[:, None], 0)
        total += tl.sum(weight, 0)
        mass += tl.sum(tl.exp(part - own_origin), 0)
    return value, total, mass


@triton.jit
def merge_states_kernel(
    states: tl.tensor,
    lse: tl.tensor,
    facts: tl.tensor,
    out: tl.tensor,
    out_lse: tl.tensor,
    missed: tl.tensor,
    num_attended: int,
    num_states: int,
    heads_per_row: int,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query_head = row * heads_per_row + head
    row_lse = lse + query_head * num_states
    row_states = states + query_head * num_states * D
    use_tail = tl.load(facts + row * NUM_FACTS + USE_TAIL) != 0
    highest_inside = _highest(row_lse, 0, num_attended, TILE)
    highest_outside = _highest(row_lse, num_attended, num_states, TILE)
    # Where the tail does not contribute, it must not push the attended states' weights below what fp32 holds either.
    highest = tl.where(use_tail, tl.maximum(highest_inside, highest_outside), highest_inside)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    origin_inside = tl.where(highest_inside == float("-inf"), 0.0, highest_inside)
    origin_outside = tl.where(highest_outside == float("-inf"), 0.0, highest_outside)
    value, total, inside = _sums(row_states, row_lse, 0, num_attended, origin, origin_inside, D, TILE)
    tail_origin = tl.where(use_tail, origin, origin_outside)
    tail_value, tail_total, outside = _sums(
        row_states, row_lse, num_attended, num_states, tail_origin, origin_outside, D, TILE
    )
    value += tl.where(use_tail, tail_value, 0.0)
    total += tl.where(use_tail, tail_total, 0.0)
    safe = tl.where(total > 0, total, 1.0)
    tl.store(out + query_head * D + tl.arange(0, D), (value / safe).to(out.dtype.element_ty))
    tl.store(out_lse + query_head, tl.where(total > 0, origin + tl.log(safe), float("-inf")))
    gap = (
        origin_inside
        + tl.log(tl.where(inside > 0, inside, 1.0))
        - origin_outside
        - tl.log(tl.where(outside > 0, outside, 1.0))
    )
    share = tl.where(inside > 0, 1 / (1 + tl.exp(gap)), 1.0)
    tl.store(missed + query_head, tl.where(outside > 0, share, 0.0))


def merge_states(
    states: torch.Tensor, lse: torch.Tensor, num_attended: int, rows: Rows, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row's attention from its states; no states, or empty ones alone, give (0, -inf).

    Args:
        states: [row, kv_head, group, state, D] fp32; lse: [row, kv_head, group, state] fp32, -inf = empty.
        num_attended: the first states are attended blocks; the others are the tail, which a row with `use_tail`
            lets contribute and every row counts as missed.

    Returns:
        output [row, kv_head, group, D] in `dtype`, its log-sum-exp [row, kv_head, group] fp32, and the tail's share of
        the mass [row, kv_head, group] fp32.

    Raises:
        ValueError: D is no power of two.
    """
    num_rows, num_heads, group, num_states, head_dim = states.shape
    check_head_dim(head_dim)
    assert dtype in FLOATS and 0 <= num_attended <= num_states
    check(states, (rows.num_rows, num_heads, group, num_states, head_dim), torch.float32, like=states)
    check(lse, (num_rows, num_heads, group, num_states), torch.float32, like=states)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=states)
    shape = (num_rows, num_heads, group)
    out = torch.empty(*shape, head_dim, dtype=dtype, device=states.device)
    out_lse = torch.empty(shape, dtype=torch.float32, device=states.device)
    missed = torch.empty(shape, dtype=torch.float32, device=states.device)
    merge_states_kernel[(num_heads * group, num_rows)](
        states, lse, rows.facts, out, out_lse, missed, num_attended, num_states, num_heads * group,
        D=head_dim, TILE=TILE, num_warps=1 if head_dim <= 64 else 4,
    )  # fmt: skip
    return out, out_lse, missed
