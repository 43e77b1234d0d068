"""Linear layers cut over the ranks: by output rows (no communication) or by input columns (one all-reduce)."""

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.nn.norm import RmsNorm
from oasis_tp.nn.ops import Place


class ColumnLinear:
    """y = f(x) Wᵀ + b for this rank's rows of W: x [T, in] whole, y [T, local_out] local."""

    def __init__(self, in_features: int, local_out: int, place: Place, *, bias: bool) -> None:
        self.ops = place.ops
        self.weight = place.empty(local_out, in_features)
        self.bias = place.empty(local_out) if bias else None

    def __call__(self, x: torch.Tensor, *, norm: RmsNorm | None = None) -> torch.Tensor:
        """f is `norm`, or nothing."""
        return self.ops.linear(x, self.weight, self.bias, norm=norm)


class RowLinear:
    """y = f(x) Wᵀ + b + residual for this rank's columns of W: x [T, local_in] local, y [T, out] whole.

    The products are summed over the ranks; bias and residual are whole on every rank and added once.
    """

    def __init__(self, local_in: int, out_features: int, tp: TpGroup, place: Place, *, bias: bool) -> None:
        self.tp, self.ops = tp, place.ops
        self.weight = place.empty(out_features, local_in)
        self.bias = place.empty(out_features) if bias else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """`gated`: x is [T, 2 * local_in] and f(x) = silu(first half) * second half."""
        if self.tp.size == 1:
            return self.ops.linear(x, self.weight, self.bias, gated=gated, residual=residual)
        y = self.tp.all_reduce(self.ops.linear(x, self.weight, gated=gated))
        if self.bias is not None:
            y = y + self.bias
        return y + residual
