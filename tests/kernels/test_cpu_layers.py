"""The compiled products and rope against torch, and that a row's bits are its own."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from oasis_tp.kernels import cpu
from oasis_tp.models.hub import cache_dir
from oasis_tp.nn.norm import RmsNorm
from oasis_tp.nn.ops import CpuOps, Ops

SIZES = [(576, 960), (64, 50), (13, 7), (1536, 576), (8, 3)]  # inputs, outputs: tails of both kinds


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = cpu.load(cache_dir())
    if loaded is None:
        pytest.skip("no C++ compiler is found")
    return loaded


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11])
def test_linear_is_torchs(library: ctypes.CDLL, rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    norm_weight, residual = torch.rand(inputs), torch.randn(rows, outputs)
    x, wide = torch.randn(rows, inputs), 4 * torch.randn(rows, 2 * inputs)
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(cpu.linear(library, x, weight), F.linear(x, weight), **close)
    torch.testing.assert_close(
        cpu.linear(library, x, weight, bias=bias, norm=(norm_weight, 1e-5), residual=residual),
        F.linear(F.rms_norm(x, (inputs,), norm_weight, 1e-5), weight, bias) + residual,
        **close,
    )
    gate, up = wide.chunk(2, dim=-1)
    torch.testing.assert_close(
        cpu.linear(library, wide, weight, gated=True), F.linear(F.silu(gate) * up, weight), rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_rows_bits_do_not_depend_on_company_or_threads(
    library: ctypes.CDLL, inputs: int, outputs: int, threads: int
) -> None:
    torch.manual_seed(0)
    x, weight, norm = torch.randn(9, inputs), torch.randn(outputs, inputs), (torch.rand(inputs), 1e-5)
    before = torch.get_num_threads()
    alone = torch.cat([cpu.linear(library, x[row : row + 1], weight, norm=norm) for row in range(9)])
    try:
        torch.set_num_threads(threads)
        for first, last in [(0, 9), (1, 3), (2, 5), (4, 8), (3, 8)]:
            together = cpu.linear(library, x[first:last], weight, norm=norm)
            assert torch.equal(together, alone[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope_is_torchs(library: ctypes.CDLL, head_dim: int, normed: bool) -> None:
    torch.manual_seed(1)
    rows, num_heads, num_kv_heads = 5, 6, 2
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim)
    angle = torch.randn(rows, 1, head_dim // 2)
    norms = [None, None]
    if normed:
        norms = [RmsNorm(head_dim, 1e-6, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
        for norm in norms:
            norm.weight.uniform_(0.5, 2.0)
    args = (qkv, num_heads, num_kv_heads, (angle.cos(), angle.sin()), *norms)
    for ours, torchs in zip(CpuOps(library).split_rotated(*args), Ops().split_rotated(*args), strict=True):
        assert ours.shape == torchs.shape
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
