"""Who computes what stands around attention: torch, the compiled CPU path, or Triton kernels; and where it lies."""

import ctypes
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from oasis_tp.kernels import cpu
from oasis_tp.nn.norm import RmsNorm
from oasis_tp.nn.rotary import Angles, apply_rotary

FEW_ROWS = 128
"""Most rows for the compiled CPU products: they stream weights, and a row's bits depend on that row alone."""


class Ops:
    """By torch's operations, anywhere."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: RmsNorm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """f(x) Wᵀ + bias + residual; f is `norm`, or with `gated` silu(first half of x) * second half, or nothing."""
        if norm is not None:
            x = self.norm(x, norm)
        if gated:
            x = self.gate(x)
        y = F.linear(x, weight, bias)
        return y if residual is None else y + residual

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """`norm` of x [T, size]."""
        return norm(x)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] -> silu(first half) * second half, [T, size]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def split_rotated(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        angles: Angles,
        q_norm: RmsNorm | None = None,
        k_norm: RmsNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> contiguous q, k, v [T, heads, head_dim].

        q and k are normed by head, where there is a norm, and turned by `angles`.
        """
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q), k_norm(k)
        return apply_rotary(q, *angles), apply_rotary(k, *angles), v.contiguous()


class CpuOps(Ops):
    """A few rows by kernels/cpu_layers.cpp, each with bits of its own; more by torch. fp32 on a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: RmsNorm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if x.shape[0] > FEW_ROWS:
            return super().linear(x, weight, bias, norm=norm, gated=gated, residual=residual)
        before = None if norm is None else (norm.weight, norm.eps)
        return cpu.linear(self.library, x, weight, bias=bias, norm=before, gated=gated, residual=residual)

    def split_rotated(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        angles: Angles,
        q_norm: RmsNorm | None = None,
        k_norm: RmsNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if qkv.shape[0] > FEW_ROWS:
            return super().split_rotated(qkv, num_heads, num_kv_heads, angles, q_norm, k_norm)
        norms = {} if q_norm is None or k_norm is None else {"q_norm": q_norm.weight, "k_norm": k_norm.weight}
        eps = 0.0 if q_norm is None else q_norm.eps
        return cpu.rope(self.library, qkv, *angles, num_heads, num_kv_heads, norm_eps=eps, **norms)


class TritonOps(Ops):
    """Norm and gate by Triton kernels, one launch each; products by torch, which asks cuBLAS."""

    def __init__(self) -> None:
        from oasis_tp.kernels import rms_norm, silu_mul  # load triton, which only a GPU needs

        self._rms_norm, self._silu_mul = rms_norm.rms_norm, silu_mul.silu_mul

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return self._rms_norm(x, norm.weight, norm.eps)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return self._silu_mul(x)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's tensors lie, of what type they are, and who computes on them."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops = field(default_factory=Ops)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def rms_norm(self, size: int, eps: float) -> RmsNorm:
        return RmsNorm(size, eps, dtype=self.dtype, device=self.device)
