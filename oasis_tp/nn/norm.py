"""Root-mean-square norm (Zhang and Sennrich, 2019)."""

import torch
import torch.nn.functional as F


class RmsNorm:
    """x / rms(x) * weight over the last dimension; statistics in float32, result in x's dtype."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
