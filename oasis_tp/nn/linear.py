"""Linear layers cut over the ranks: by output rows (no communication) or by input columns (one all-reduce)."""

import ctypes

import torch
import torch.nn.functional as F

from oasis_tp.comm import TpGroup
from oasis_tp.kernels import cpu
from oasis_tp.nn.norm import RmsNorm

FEW_ROWS = 128
"""Most rows for the compiled CPU product: it streams weights, and a row's bits depend on that row alone."""


class ColumnLinear:
    """y = f(x) Wᵀ + b for this rank's rows of W: x [T, in] whole, y [T, local_out] local.

    `library` is the compiled CPU path, for fp32 on a CPU.
    """

    def __init__(
        self,
        in_features: int,
        local_out: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.weight = torch.empty(local_out, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(local_out, dtype=dtype, device=device) if bias else None
        self.library = library

    def __call__(self, x: torch.Tensor, *, norm: RmsNorm | None = None) -> torch.Tensor:
        """f is `norm`, or nothing."""
        if self.library is not None and x.shape[0] <= FEW_ROWS:
            before = None if norm is None else (norm.weight, norm.eps)
            return cpu.linear(self.library, x, self.weight, bias=self.bias, norm=before)
        return F.linear(x if norm is None else norm(x), self.weight, self.bias)


class RowLinear:
    """y = f(x) Wᵀ + b + residual for this rank's columns of W: x [T, local_in] local, y [T, out] whole.

    The products are summed over the ranks; bias and residual are whole on every rank and added once.
    """

    def __init__(
        self,
        local_in: int,
        out_features: int,
        tp: TpGroup,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.tp = tp
        self.weight = torch.empty(out_features, local_in, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.library = library

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """`gated`: x is [T, 2 * local_in] and f(x) = silu(first half) * second half."""
        if self.library is not None and x.shape[0] <= FEW_ROWS:
            alone = self.tp.size == 1
            y = cpu.linear(
                self.library,
                x,
                self.weight,
                gated=gated,
                bias=self.bias if alone else None,
                residual=residual if alone else None,
            )
            if alone:
                return y
        else:
            if gated:
                gate, up = x.chunk(2, dim=-1)
                x = F.silu(gate) * up
            y = F.linear(x, self.weight)
        y = self.tp.all_reduce(y)
        if self.bias is not None:
            y = y + self.bias
        return y + residual
