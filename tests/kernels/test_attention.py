"""Attention over gathered keys and values against the slow truth."""

import pytest
import torch

from oasis_tp.kernels import reference
from oasis_tp.nn.attention import attend_blocks, attend_chunk, causal_mask

# Type -> absolute tolerance on outputs of values of unit variance: fp32 sums against float64; half types round the
# result (attend_blocks) or the softmax weights too (the library's chunk attention).
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim", "num_tokens"), [(1, 64, 1), (3, 64, 65), (4, 128, 63), (8, 16, 200)])
def test_blocks_match_reference(group: int, head_dim: int, num_tokens: int, dtype: torch.dtype) -> None:
    q, k, v = (normal(2, n, head_dim, seed=n, dtype=dtype) for n in (group, num_tokens, num_tokens + 1))
    v = v[:, :num_tokens]
    out, missed = attend_blocks(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape and missed is None
    close(out, reference.attend(q, k, v)[0], dtype)


@pytest.mark.parametrize("use_tail", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_tail"), [(1, 5), (40, 1), (65, 30)])
def test_blocks_that_were_left_out_count_at_their_estimate(use_tail: bool, num_tokens: int, num_tail: int) -> None:
    q, k, v = normal(2, 3, 64), normal(2, num_tokens, 64, seed=1), normal(2, num_tokens, 64, seed=2)
    logits, values = 2 * normal(2, 3, num_tail, seed=3), normal(2, num_tail, 64, seed=4)
    logits[:, :, ::3] = -torch.inf  # those that were chosen
    arguments = {"tail_logits": logits, "tail_values": values, "use_tail": use_tail}
    out, missed = attend_blocks(q, k, v, **arguments)
    want, want_missed = reference.attend(q, k, v, **arguments)
    close(out, want)
    assert missed is not None
    close(missed, want_missed)
    assert (missed > 0).all() == (num_tail > 1)
    if not use_tail:
        close(out, reference.attend(q, k, v)[0])


@pytest.mark.parametrize("num_tail", [0, 4])
def test_a_tail_of_nothing_misses_nothing(num_tail: int) -> None:
    q, k, v = normal(2, 3, 64), normal(2, 30, 64, seed=1), normal(2, 30, 64, seed=2)
    logits = torch.full((2, 3, num_tail), -torch.inf)
    out, missed = attend_blocks(q, k, v, tail_logits=logits, tail_values=normal(2, num_tail, 64), use_tail=True)
    assert missed is not None and torch.equal(missed, torch.zeros(2, 3))
    close(out, reference.attend(q, k, v)[0])


def test_hidden_tokens_are_not_read() -> None:
    q, k, v = normal(2, 3, 64), normal(2, 48, 64, seed=1), normal(2, 48, 64, seed=2)
    hidden = normal(2, 48, seed=5) > 0
    hidden[:, -1] = False
    assert hidden[0].any() and not torch.equal(hidden[0], hidden[1])
    close(attend_blocks(q, k, v, hidden=hidden)[0], reference.attend(q, k, v, hidden=hidden)[0])
    changed = torch.where(hidden[..., None], 1e3, k), torch.where(hidden[..., None], -1e3, v)
    assert torch.equal(attend_blocks(q, *changed, hidden=hidden)[0], attend_blocks(q, k, v, hidden=hidden)[0])


def test_logits_of_any_size_stay_finite() -> None:
    q, k, v = 300 * normal(2, 3, 64), 300 * normal(2, 48, 64, seed=1), normal(2, 48, 64, seed=2)
    close(attend_blocks(q, k, v)[0], reference.attend(q, k, v)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("start", "num_tokens", "num_heads", "num_kv_heads"), [(0, 1, 3, 3), (0, 33, 9, 3), (16, 17, 8, 1), (48, 1, 4, 2)]
)
def test_chunk_matches_reference(
    start: int, num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    q = normal(num_tokens, num_heads, 32, dtype=dtype)
    k, v = (normal(num_kv_heads, start + num_tokens, 32, seed=seed, dtype=dtype) for seed in (1, 2))
    mask = causal_mask(start, start + num_tokens, dtype, torch.device("cpu"))
    out = attend_chunk(q, k, v, mask)
    assert out.dtype == dtype
    close(out, reference.attend_chunk(q, k, v, start), dtype)


def test_a_later_token_changes_no_earlier_row() -> None:
    q, k, v = normal(20, 6, 32), normal(2, 36, 32, seed=1), normal(2, 36, 32, seed=2)
    mask = causal_mask(16, 36, torch.float32, torch.device("cpu"))
    before = attend_chunk(q, k, v, mask)
    k[:, 30:], v[:, 30:] = 99.0, 99.0
    after = attend_chunk(q, k, v, mask)
    assert torch.equal(before[:14], after[:14])
    assert not torch.equal(before[14:], after[14:])
