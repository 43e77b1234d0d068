"""Linear layers cut over the ranks: by output rows (no communication) or by input columns (one all-reduce)."""

import torch
import torch.nn.functional as F

from oasis_tp.comm import TpGroup


class ColumnLinear:
    """y = x Wᵀ + b for this rank's rows of W: x [T, in] whole, y [T, local_out] local."""

    def __init__(
        self, in_features: int, local_out: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(local_out, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(local_out, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear:
    """y = x Wᵀ + b for this rank's columns of W: x [T, local_in] local, y [T, out] whole, summed over the ranks.

    The bias is whole on every rank and is added once, after the sum.
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
    ) -> None:
        self.tp = tp
        self.weight = torch.empty(out_features, local_in, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tp.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias
