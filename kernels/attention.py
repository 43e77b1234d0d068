"""Attention of decoded rows over their page lists, in splits of the list; `merge_states` puts the splits together."""

import math

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, check_head_dim, padded_group

SPLIT_BLOCKS = 16
"""Pages per split. A constant, so that how a list is split depends on nothing but its length."""
TILE_BLOCKS = 4


@triton.jit
def sparse_attention_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    pages: tl.tensor,
    num_tokens: tl.tensor,
    states: tl.tensor,
    lse: tl.tensor,
    max_attended: int,
    num_states: int,
    page_stride: int,
    scale: float,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pair = row * tl.num_programs(1) + head
    member, channel = tl.arange(0, GROUP_PAD), tl.arange(0, D)
    members = (member < GROUP)[:, None]
    query = tl.load(q + (pair * GROUP + member[:, None]) * D + channel[None, :], mask=members, other=0)
    length = tl.minimum(tl.load(num_tokens + pair), (split + 1) * SPLIT * B)
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    out = tl.zeros((GROUP_PAD, D), tl.float32)
    for start in range(split * SPLIT * B, length, TILE * B):
        token = start + tl.arange(0, TILE * B)
        page = tl.load(pages + pair * max_attended + token // B, mask=token < length, other=-1).to(tl.int64)
        alive = (token < length) & (page >= 0)
        at = page * page_stride + (head * 2 * B + token % B) * D
        key = tl.load(kv + at[None, :] + channel[:, None], mask=alive[None, :], other=0)
        logits = tl.dot(query, key, input_precision="ieee") * scale
        logits = tl.where(alive[None, :], logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: weights of 0, not NaN
        weight = tl.exp(logits - origin[:, None])
        fade = tl.exp(highest - origin)
        value = tl.load(kv + at[:, None] + B * D + channel[None, :], mask=alive[:, None], other=0)
        out = tl.dot(weight.to(value.dtype), value, out * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        highest = higher
    some = total > 0
    state = (pair * GROUP + member) * num_states + split
    mean = out / tl.where(some, total, 1.0)[:, None]
    tl.store(states + state[:, None] * D + channel[None, :], mean, mask=members)
    log_mass = tl.where(some, highest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + state, log_mass, mask=member < GROUP)


def num_splits(max_attended: int) -> int:
    """States that `sparse_attention` writes for lists of up to `max_attended` pages."""
    return triton.cdiv(max_attended, SPLIT_BLOCKS)


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    pages: torch.Tensor,
    num_tokens: torch.Tensor,
    states: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Softmax-weighted means of values over each split of a row's page list, and the split's log of summed weights.

    Args:
        q: [row, kv_head, group, D] roped.
        kv: [page, kv_head, K|V, block_size, D], one layer's pages.
        pages: [row, kv_head, max_attended] int32; -1 = not there, not read.
        num_tokens: [row, kv_head] int32, counted from the list's first page as if all were there.
        states: [row, kv_head, group, state, D] fp32 and lse [row, kv_head, group, state] fp32: the first
            `num_splits(max_attended)` states are written, (0, -inf) for a split without tokens.

    Raises:
        ValueError: D is no power of two.
    """
    num_rows, num_heads, group, head_dim = q.shape
    block_size, count = kv.shape[3], lse.shape[3]
    check_head_dim(head_dim)
    splits = num_splits(pages.shape[2])
    check(q, tuple(q.shape), *FLOATS, like=q)
    check(kv, (kv.shape[0], num_heads, 2, block_size, head_dim), q.dtype, like=q)
    check(pages, (num_rows, num_heads, pages.shape[2]), torch.int32, like=q)
    check(num_tokens, (num_rows, num_heads), torch.int32, like=q)
    check(states, (num_rows, num_heads, group, count, head_dim), torch.float32, like=q)
    check(lse, (num_rows, num_heads, group, count), torch.float32, like=q)
    assert count >= splits, (count, splits)
    sparse_attention_kernel[(splits, num_heads, num_rows)](
        q, kv, pages, num_tokens, states, lse, pages.shape[2], count, kv.stride(0), 1 / math.sqrt(head_dim),
        GROUP=group, GROUP_PAD=padded_group(group), B=block_size, D=head_dim, SPLIT=SPLIT_BLOCKS, TILE=TILE_BLOCKS,
        num_warps=8 if head_dim >= 128 else 4,  # with four a thread's registers overflow
    )  # fmt: skip
