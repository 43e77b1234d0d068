"""Root-mean-square norm, with the residual added first where there is one (Zhang and Sennrich, 2019)."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, next_power_of_2


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: int,
    eps: float,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(x + row * size + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * size + column, mask=inside, other=0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * size + column, rounded, mask=inside)
        values = rounded.to(tl.float32)  # what later layers will read
    mean_square = tl.sum(values * values, 0) / size
    scaled = values * tl.rsqrt(mean_square + eps) * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * size + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, statistics in fp32, in x's dtype.

    x [row, size], weight [size]. With `residual` [row, size] it becomes residual + x, in place, and that is normalised.
    """
    num_rows, size = x.shape
    check(x, (num_rows, size), *FLOATS, like=x)
    check(weight, (size,), x.dtype, like=x)
    if residual is not None:
        check(residual, (num_rows, size), x.dtype, like=x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    rms_norm_kernel[(num_rows,)](
        x, x if residual is None else residual, weight, out, size, eps,
        BLOCK=next_power_of_2(size), ADD=residual is not None,
    )  # fmt: skip
    return out
