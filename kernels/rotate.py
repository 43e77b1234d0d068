"""The sketch's fixed rotation: random signs, then a Walsh-Hadamard transform."""

import math

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, check_head_dim, next_power_of_2


@triton.jit
def hadamard(x: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr) -> tl.tensor:
    """x [ROWS, WIDTH] fp32 transformed along its rows, times sqrt(WIDTH); WIDTH = 2 ** STEPS.

    Pease's constant-geometry butterflies: no matrix to keep in shared memory, and sums in the order of
    oasis_tp/sparse/sketch.py, so both give the same bits.
    """
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, WIDTH))
    return x


@triton.jit
def rotate_kernel(
    x: tl.tensor,
    signs: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    norm: float,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    at = row[:, None] * D + channel[None, :]
    alive = (row < num_rows)[:, None]
    rows = tl.load(x + at, mask=alive, other=0).to(tl.float32) * tl.load(signs + channel)[None, :]
    turned = hadamard(rows, ROWS, D, STEPS) / norm
    tl.store(out + at, turned.to(out.dtype.element_ty), mask=alive)


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """x [..., D] times the rotation that `signs` [D] fp32 (of ±1) define, fp32 inside, in x's dtype.

    Raises:
        ValueError: D is no power of two.
    """
    head_dim = x.shape[-1]
    check_head_dim(head_dim)
    check(x, tuple(x.shape), *FLOATS, like=x)
    check(signs, (head_dim,), torch.float32, like=x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // head_dim
    if num_rows == 0:
        return out
    rows = min(16, next_power_of_2(num_rows))
    rotate_kernel[(triton.cdiv(num_rows, rows),)](
        x, signs, out, num_rows, math.sqrt(head_dim), ROWS=rows, D=head_dim, STEPS=head_dim.bit_length() - 1
    )
    return out
