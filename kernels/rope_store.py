"""Turn a step's queries and keys by their positions, and put keys and values into the open pages."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, next_power_of_2


@triton.jit
def _turn(x: tl.tensor, out: tl.tensor, cos: tl.tensor, sin: tl.tensor, half: tl.tensor, HALF: tl.constexpr) -> None:
    """Dimension i turns with i + D/2: x and out point at a head's first channel."""
    inside = half < HALF
    low = tl.load(x + half, mask=inside).to(tl.float32)
    high = tl.load(x + HALF + half, mask=inside).to(tl.float32)
    tl.store(out + half, (low * cos - high * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + HALF + half, (high * cos + low * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_store_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    pages: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    position = tl.load(positions + token)
    cos_row = tl.load(cos + position * HALF + half, mask=half < HALF)
    sin_row = tl.load(sin + position * HALF + half, mask=half < HALF)
    if head < NUM_HEADS:
        target = out + (token * NUM_HEADS + head) * 2 * HALF
        _turn(q + token * q_stride + head * 2 * HALF, target, cos_row, sin_row, half, HALF)
    else:
        kv_head = head - NUM_HEADS
        page = tl.load(pages + token * NUM_KV_HEADS + kv_head).to(tl.int64)
        if page >= 0:
            row = (page * NUM_KV_HEADS + kv_head) * 2 * BLOCK_SIZE + position % BLOCK_SIZE
            _turn(k + token * k_stride + kv_head * 2 * HALF, kv + row * 2 * HALF, cos_row, sin_row, half, HALF)
            channel = tl.arange(0, 2 * HALF_PAD)
            value = tl.load(v + token * v_stride + kv_head * 2 * HALF + channel, mask=channel < 2 * HALF)
            tl.store(kv + (row + BLOCK_SIZE) * 2 * HALF + channel, value, mask=channel < 2 * HALF)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    kv: torch.Tensor,
) -> torch.Tensor:
    """Roped queries; roped keys and values are written to their pages.

    Args:
        q: [token, head, D]; k, v: [token, kv_head, D]. Tokens may be strided (slices of one fused projection).
        cos, sin: [max_model_len, D / 2] fp32.
        positions: [token] int64.
        pages: [token, kv_head] int64, the open page of each head; -1 = the token is not kept.
        kv: one layer's pages [page, kv_head, K|V, block_size, D], written.

    Returns:
        [token, head, D] in q's dtype.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k.shape[1], kv.shape[3]
    check(kv, (kv.shape[0], num_kv_heads, 2, block_size, head_dim), q.dtype, like=q)
    check(pages, (num_tokens, num_kv_heads), torch.int64, like=q)
    check(positions, (num_tokens,), torch.int64, like=q)
    check(cos, (cos.shape[0], head_dim // 2), torch.float32, like=q)
    check(sin, (cos.shape[0], head_dim // 2), torch.float32, like=q)
    assert q.dtype in FLOATS and k.dtype == v.dtype == q.dtype and k.shape == v.shape and head_dim % 2 == 0
    assert all(x.stride(2) == 1 and x.stride(1) == head_dim and x.device == q.device for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    rope_store_kernel[(num_tokens, num_heads + num_kv_heads)](
        q, k, v, cos, sin, positions, pages, kv, out, q.stride(0), k.stride(0), v.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size,
        HALF=head_dim // 2, HALF_PAD=next_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip
    return out
