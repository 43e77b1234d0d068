"""Seal: the sketch of blocks whose last token is committed, read from wherever their keys and values lie."""

import math

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, check_head_dim
from oasis_tp.kernels.rotate import hadamard

FP16_MAX = tl.constexpr(65504.0)
RMS_PER_LEVEL = tl.constexpr(0.151)  # the 2-bit levels ±3, ±10 are ±0.453 and ±1.510 times the rms
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds an fp32 below 2**22 to a whole number, ties to even


@triton.jit
def _tile(x: tl.tensor, start: tl.tensor, B: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """[B, D] fp32 clamped to fp16's range, so that nothing stored is ever infinite."""
    token = tl.arange(0, B)[:, None]
    channel = tl.arange(0, D)[None, :]
    values = tl.load(x + start + token * D + channel).to(tl.float32)
    return tl.minimum(tl.maximum(values, -FP16_MAX), FP16_MAX)


@triton.jit
def _store_mean(
    values: tl.tensor, means: tl.tensor, mean_scales: tl.tensor, at: tl.tensor, B: tl.constexpr, D: tl.constexpr
) -> tl.tensor:
    """Store the mean of values [B, D] over its tokens in int8 with one fp16 scale; returns it as stored, [D] fp32."""
    mean = tl.sum(values, 0) / B
    scale = tl.div_rn(tl.max(tl.abs(mean), 0), 127.0).to(tl.float16)
    step = tl.where(scale > 0, scale.to(tl.float32), 1.0)
    whole = (tl.div_rn(mean, step) + ROUND) - ROUND
    whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
    tl.store(means + at * D + tl.arange(0, D), whole.to(tl.int8))
    tl.store(mean_scales + at, scale)
    return whole * scale.to(tl.float32)


@triton.jit
def seal_kernel(
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    host_blocks: tl.tensor,
    signs: tl.tensor,
    codes: tl.tensor,
    token_scales: tl.tensor,
    means: tl.tensor,
    mean_scales: tl.tensor,
    k_layer_stride: tl.tensor,
    k_page_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_layer_stride: tl.tensor,
    v_page_stride: tl.tensor,
    v_head_stride: tl.tensor,
    num_blocks: int,
    norm: float,
    B: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    index, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    page = tl.load(pages + (layer * tl.num_programs(0) + index) * num_heads + head).to(tl.int64)
    if page < 0:
        return
    home = (layer * num_blocks + tl.load(host_blocks + index).to(tl.int64)) * num_heads + head
    keys = _tile(k, layer * k_layer_stride + page * k_page_stride + head * k_head_stride, B, D)
    mean_key = _store_mean(keys, means, mean_scales, home * 2, B, D)
    values = _tile(v, layer * v_layer_stride + page * v_page_stride + head * v_head_stride, B, D)
    _store_mean(values, means, mean_scales, home * 2 + 1, B, D)
    signed = (keys - mean_key[None, :]) * tl.load(signs + tl.arange(0, D))[None, :]
    residual = hadamard(signed, B, D, STEPS) / norm
    energy = tl.sum(residual * residual, 1)
    if BITS == 2:
        unit = RMS_PER_LEVEL * tl.sqrt_rn(energy / D)[:, None]
        code = (
            (residual > -6.5 * unit).to(tl.int32) + (residual > 0).to(tl.int32) + (residual > 6.5 * unit).to(tl.int32)
        )
        level = tl.where(code >= 2, 1.0, -1.0) * tl.where((code == 1) | (code == 2), 3.0, 10.0)
    else:
        code = (residual > 0).to(tl.int32)
        level = 2.0 * code.to(tl.float32) - 1.0
    projection = tl.sum(residual * level, 1)
    scale = tl.where(projection > 0, tl.div_rn(energy, tl.where(projection > 0, projection, 1.0)), 0.0)
    token = tl.arange(0, B)
    tl.store(token_scales + home * B + token, tl.minimum(scale, FP16_MAX).to(tl.float16))
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = D // PER_BYTE
    shifts = (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
    packed = tl.sum(tl.reshape(code, (B, BYTES, PER_BYTE)) << shifts, 2)  # lowest bits first
    tl.store(codes + (home * B + token[:, None]) * BYTES + tl.arange(0, BYTES)[None, :], packed.to(tl.uint8))


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """fp32 to the nearest bf16, ties to even; its cast is then exact, where triton's interpreter would cut off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def seal_bounds_kernel(
    k: tl.tensor,
    pages: tl.tensor,
    host_blocks: tl.tensor,
    bounds: tl.tensor,
    k_layer_stride: tl.tensor,
    k_page_stride: tl.tensor,
    k_head_stride: tl.tensor,
    num_blocks: int,
    B: tl.constexpr,
    D: tl.constexpr,
) -> None:
    index, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    page = tl.load(pages + (layer * tl.num_programs(0) + index) * num_heads + head).to(tl.int64)
    if page < 0:
        return
    home = (layer * num_blocks + tl.load(host_blocks + index).to(tl.int64)) * num_heads + head
    keys = _tile(k, layer * k_layer_stride + page * k_page_stride + head * k_head_stride, B, D)
    channel = tl.arange(0, D)
    tl.store(bounds + home * 2 * D + channel, _rounded(tl.max(keys, 0)))
    tl.store(bounds + (home * 2 + 1) * D + channel, _rounded(tl.min(keys, 0)))


def seal(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    host_blocks: torch.Tensor,
    signs: torch.Tensor,
    codes: torch.Tensor,
    token_scales: torch.Tensor,
    means: torch.Tensor,
    mean_scales: torch.Tensor,
) -> None:
    """Residual coding of full blocks (2 or 1 bits, as wide as `codes` is) in some layers; engine design, section 7.

    Args:
        k, v: [layer, page, kv_head, block_size, D] roped, each page's tokens contiguous: views of the device pages,
            or of a prompt's fresh K/V.
        pages: [layer, n, kv_head] int64, where each block lies by head; -1 = skip.
        host_blocks: [n] int64 without duplicates, the rows of the sketch to write.
        signs: [D] fp32 of ±1, the rotation's.
        codes [layer, host_block, kv_head, block_size, bytes] uint8, token_scales [layer, host_block, kv_head,
        block_size] fp16, means [layer, host_block, kv_head, K|V, D] int8, mean_scales [layer, host_block, kv_head,
        K|V] fp16: written.

    Raises:
        ValueError: D is no power of two.
    """
    num_layers, _, num_heads, block_size, head_dim = k.shape
    check_head_dim(head_dim)
    _check_source(k, pages, host_blocks)
    _check_source(v, pages, host_blocks)
    num_blocks, num_bytes = codes.shape[1], codes.shape[4]
    bits = 8 * num_bytes // head_dim
    assert bits in (1, 2) and k.dtype == v.dtype, (bits, k.dtype, v.dtype)
    check(signs, (head_dim,), torch.float32, like=k)
    check(codes, (num_layers, num_blocks, num_heads, block_size, head_dim * bits // 8), torch.uint8, like=k)
    check(token_scales, (num_layers, num_blocks, num_heads, block_size), torch.float16, like=k)
    check(means, (num_layers, num_blocks, num_heads, 2, head_dim), torch.int8, like=k)
    check(mean_scales, (num_layers, num_blocks, num_heads, 2), torch.float16, like=k)
    if host_blocks.numel() == 0:
        return
    seal_kernel[(host_blocks.numel(), num_heads, num_layers)](
        k, v, pages, host_blocks, signs, codes, token_scales, means, mean_scales,
        *k.stride()[:3], *v.stride()[:3], num_blocks, math.sqrt(head_dim),
        B=block_size, D=head_dim, STEPS=head_dim.bit_length() - 1, BITS=bits,
    )  # fmt: skip


def seal_bounds(k: torch.Tensor, pages: torch.Tensor, host_blocks: torch.Tensor, bounds: torch.Tensor) -> None:
    """Bounds of full blocks' keys by channel (Quest, section 3.3).

    bounds [layer, host_block, kv_head, max|min, D] bf16 is written; the other arguments are those of `seal`.
    """
    num_layers, _, num_heads, block_size, head_dim = k.shape
    check_head_dim(head_dim)
    _check_source(k, pages, host_blocks)
    check(bounds, (num_layers, bounds.shape[1], num_heads, 2, head_dim), torch.bfloat16, like=k)
    if host_blocks.numel() == 0:
        return
    seal_bounds_kernel[(host_blocks.numel(), num_heads, num_layers)](
        k, pages, host_blocks, bounds, *k.stride()[:3], bounds.shape[1], B=block_size, D=head_dim
    )


def _check_source(x: torch.Tensor, pages: torch.Tensor, host_blocks: torch.Tensor) -> None:
    assert x.dtype in FLOATS and x.stride(4) == 1 and x.stride(3) == x.shape[4], (x.dtype, x.stride())
    check(pages, (x.shape[0], host_blocks.numel(), x.shape[2]), torch.int64, like=x)
    check(host_blocks, (host_blocks.numel(),), torch.int64, like=x)
