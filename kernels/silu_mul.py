"""silu(gate) * up of a fused gate/up projection."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, next_power_of_2


@triton.jit
def silu_mul_kernel(gate_up: tl.tensor, out: tl.tensor, size: int, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * size + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [row, 2 size], gate first -> [row, size] in its dtype, fp32 inside."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    check(gate_up, (num_rows, 2 * size), *FLOATS, like=gate_up)
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(1024, next_power_of_2(size))
    silu_mul_kernel[(num_rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
    return out
