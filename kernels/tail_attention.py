"""What the candidates that were not chosen contribute: each block at its mean key, with its mean value."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import check, check_head_dim, padded_group
from oasis_tp.kernels.rows import FIRST, LAST, NUM_FACTS, TABLE_ROW, Rows

SPLIT_BLOCKS = 256
TILE_BLOCKS = 64
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def tail_attention_kernel(
    tail_logits: tl.tensor,
    host_table: tl.tensor,
    facts: tl.tensor,
    means: tl.tensor,
    mean_scales: tl.tensor,
    states: tl.tensor,
    lse: tl.tensor,
    table_stride: int,
    max_candidates: int,
    first_state: int,
    num_states: int,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    pair = row * num_heads + head
    first = tl.load(facts + row * NUM_FACTS + FIRST)
    count = tl.minimum(tl.load(facts + row * NUM_FACTS + LAST) - first, (split + 1) * SPLIT)
    table = host_table + tl.load(facts + row * NUM_FACTS + TABLE_ROW).to(tl.int64) * table_stride + first
    member, channel = tl.arange(0, GROUP_PAD), tl.arange(0, D)
    members = (member < GROUP)[:, None]
    logits_row = tail_logits + (pair * GROUP + member[:, None]) * max_candidates
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    out = tl.zeros((GROUP_PAD, D), tl.float32)
    for start in range(split * SPLIT, count, TILE):
        candidate = start + tl.arange(0, TILE)
        alive = candidate < count
        logits = tl.load(logits_row + candidate[None, :], mask=members & alive[None, :], other=float("-inf"))
        home = tl.load(table + candidate, mask=alive, other=0).to(tl.int64) * num_heads + head
        mean_scale = tl.load(mean_scales + home * 2 + 1, mask=alive, other=0).to(tl.float32)
        mean = tl.load(means + (home[:, None] * 2 + 1) * D + channel[None, :], mask=alive[:, None], other=0)
        higher = tl.maximum(highest, tl.max(logits, 1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(logits - origin[:, None])
        fade = tl.exp(highest - origin)
        value = (mean.to(tl.float32) * mean_scale[:, None]).to(DTYPE)
        out = tl.dot(weight.to(DTYPE), value, out * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        highest = higher
    some = total > 0
    state = (pair * GROUP + member) * num_states + first_state + split
    tl.store(states + state[:, None] * D + channel[None, :], out / tl.where(some, total, 1.0)[:, None], mask=members)
    log_mass = tl.where(some, highest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + state, log_mass, mask=member < GROUP)


def num_splits(max_candidates: int) -> int:
    """States that `tail_attention` writes."""
    return triton.cdiv(max_candidates, SPLIT_BLOCKS)


def tail_attention(
    tail_logits: torch.Tensor,
    host_table: torch.Tensor,
    rows: Rows,
    means: torch.Tensor,
    mean_scales: torch.Tensor,
    states: torch.Tensor,
    lse: torch.Tensor,
    first_state: int,
    dtype: torch.dtype,
) -> None:
    """States over splits of the candidates, as `sparse_attention` writes them, from `first_state` on.

    Args:
        tail_logits: [row, kv_head, group, max_candidates] fp32, -inf at what was chosen (see `top_blocks`).
        host_table: [table_row, max_blocks] int32.
        means, mean_scales: one layer's, as `seal` writes them.
        dtype: of the products' factors, the model's; sums are fp32.

    Raises:
        ValueError: D is no power of two.
    """
    num_rows, num_heads, group, count = tail_logits.shape
    head_dim, num_states = means.shape[3], lse.shape[3]
    check_head_dim(head_dim)
    check(tail_logits, (rows.num_rows, num_heads, group, rows.bounds.max_candidates), torch.float32, like=tail_logits)
    check(rows.facts, (num_rows, NUM_FACTS.value), torch.int32, like=tail_logits)
    check(host_table, tuple(host_table.shape), torch.int32, like=tail_logits)
    check(means, (means.shape[0], num_heads, 2, head_dim), torch.int8, like=tail_logits)
    check(mean_scales, (means.shape[0], num_heads, 2), torch.float16, like=tail_logits)
    check(states, (num_rows, num_heads, group, num_states, head_dim), torch.float32, like=tail_logits)
    check(lse, (num_rows, num_heads, group, num_states), torch.float32, like=tail_logits)
    splits = num_splits(count)
    assert first_state + splits <= num_states, (first_state, splits, num_states)
    tail_attention_kernel[(splits, num_heads, num_rows)](
        tail_logits, host_table, rows.facts, means, mean_scales, states, lse,
        host_table.shape[1], count, first_state, num_states,
        GROUP=group, GROUP_PAD=padded_group(group), D=head_dim, SPLIT=SPLIT_BLOCKS, TILE=TILE_BLOCKS,
        DTYPE=TYPES[dtype],
    )  # fmt: skip
