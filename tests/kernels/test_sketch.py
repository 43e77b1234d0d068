"""Sketches and selection against the slow truth, and what must hold whatever the numbers are."""

import pytest
import torch

from oasis_tp.config import SketchKind
from oasis_tp.kernels import reference
from oasis_tp.sparse.sketch import Sketch, _signs, rotate, top_blocks
from oasis_tp.sparse.sketch_size import sketch_bytes_per_block

CPU = torch.device("cpu")
B = 16
LEVELS = {"2bit": reference.TWO_BIT_LEVELS, "1bit": reference.ONE_BIT_LEVELS}

# (operation, input type) -> absolute tolerance in logits (keys and queries of unit variance and a common offset).
# Inputs are widened to fp32 exactly, so the input type adds nothing: what remains is fp32 summation against float64,
# over D products of size up to about 100.
TOLERANCE = {
    ("score", torch.float32): 1e-3,
    ("score", torch.float16): 1e-3,
    ("score", torch.bfloat16): 1e-3,
    ("tail", torch.float32): 1e-3,
    ("tail", torch.float16): 1e-3,
    ("tail", torch.bfloat16): 1e-3,
}


def make_sketch(kind: SketchKind, head_dim: int, num_kv_heads: int = 2, num_blocks: int = 70) -> Sketch:
    """A sketch whose storage is poisoned: scores of sealed blocks must not see it."""
    sketch = Sketch(
        kind,
        num_layers=2,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=B,
        device=CPU,
    )
    for tensor in sketch.tensors():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 101)
    return sketch


def make_blocks(
    n: int, num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block ids [n] in random order of the sketch's 70, k and v [n, H, B, D] with channel and block offsets, and q."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    k = normal(n, num_kv_heads, B, head_dim) + 3 * normal(1, num_kv_heads, 1, head_dim) + normal(n, num_kv_heads, 1, 1)
    v = normal(n, num_kv_heads, B, head_dim)
    q = normal(num_kv_heads, group, head_dim)
    ids = torch.randperm(70, generator=generator)[:n]
    return ids, k.to(dtype), v.to(dtype), q.to(dtype)


def unpack(sketch: Sketch, layer: int, ids: torch.Tensor) -> list[torch.Tensor]:
    """What is stored for blocks `ids`, in float64, codes as levels [n, H, B, D]: the reference's arguments."""
    codes, token_scales, means, mean_scales = (tensor[layer, ids] for tensor in sketch.tensors())
    bits = 2 if sketch.kind == "2bit" else 1
    levels = torch.empty(*codes.shape[:3], sketch.head_dim, dtype=torch.float64)
    for channel in range(sketch.head_dim):
        byte, place = divmod(channel, 8 // bits)
        code = codes[..., byte].long() >> (bits * place) & (2**bits - 1)
        levels[..., channel] = torch.tensor(LEVELS[sketch.kind], dtype=torch.float64)[code]
    return [levels, token_scales.double(), means.double(), mean_scales.double()]


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_rotation_is_the_signed_hadamard_matrix(head_dim: int) -> None:
    matrix = rotate(torch.eye(head_dim))
    torch.testing.assert_close(matrix.double(), reference.rotation(_signs(head_dim)), atol=1e-6, rtol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6, rtol=0)


def test_signs_are_fixed_for_ever() -> None:
    assert "".join("+-"[sign < 0] for sign in _signs(32)) == "--+++++++---++-+-+-+--++--++--+-"
    assert _signs(64) == _signs(256)[:64]
    assert abs(sum(_signs(256))) < 48


@pytest.mark.parametrize("kind", ["2bit", "1bit", "minmax"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_bytes_per_block_is_what_is_allocated(kind: SketchKind, head_dim: int, block_size: int) -> None:
    sketch = Sketch(
        kind, num_layers=3, num_blocks=5, num_kv_heads=2, head_dim=head_dim, block_size=block_size, device=CPU
    )
    allocated = sum(tensor.nbytes for tensor in sketch.tensors())
    assert allocated == 3 * 5 * 2 * sketch_bytes_per_block(kind, head_dim, block_size)


def test_bytes_per_block_of_the_design() -> None:
    assert sketch_bytes_per_block("2bit", 128, 16) == 6 * 128 + 36
    assert sketch_bytes_per_block("1bit", 128, 16) == 4 * 128 + 36
    assert sketch_bytes_per_block("minmax", 128, 16) == 4 * 128


def test_head_dim_that_fills_no_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1bit.*head_dim is 12.*multiple of 8"):
        sketch_bytes_per_block("1bit", 12, 16)
    with pytest.raises(ValueError, match=r"2bit.*head_dim is 6.*multiple of 4"):
        Sketch("2bit", num_layers=1, num_blocks=1, num_kv_heads=1, head_dim=6, block_size=16, device=CPU)


@pytest.mark.parametrize("kind", ["2bit", "1bit"])
@pytest.mark.parametrize(
    ("head_dim", "n", "dtype"),
    [
        (64, 65, torch.float32),
        (128, 1, torch.float32),
        (80, 15, torch.float32),
        (256, 3, torch.float32),
        (64, 5, torch.float16),
        (80, 5, torch.bfloat16),
    ],
)
def test_seal_matches_reference(kind: SketchKind, head_dim: int, n: int, dtype: torch.dtype) -> None:
    sketch = make_sketch(kind, head_dim, num_kv_heads=1)
    ids, k, v, _ = make_blocks(n, 1, 1, head_dim, dtype)
    sketch.seal(1, ids, k, v)
    levels, token_scales, means, mean_scales = unpack(sketch, 1, ids)
    want_levels, want_token_scales, want_means, want_mean_scales = reference.seal_residual(
        k, v, _signs(head_dim), LEVELS[kind]
    )
    # A value that rounding sees as a tie may fall to either side: one step of a mean, one level of a residual.
    torch.testing.assert_close(mean_scales, want_mean_scales, atol=0, rtol=2**-10)
    same_mean = (means == want_means).all(-1)[..., 0] & (mean_scales == want_mean_scales)[..., 0]
    assert (means - want_means).abs().max() <= 1
    assert same_mean.double().mean() >= (0.9 if n > 5 else 1)
    same_level = (levels == want_levels)[same_mean]
    assert same_level.double().mean() > 1 - 1e-4
    same_token = same_level.all(-1)
    torch.testing.assert_close(
        token_scales[same_mean][same_token], want_token_scales[same_mean][same_token], atol=0, rtol=2**-10
    )


@pytest.mark.parametrize("kind", ["2bit", "1bit"])
@pytest.mark.parametrize(
    ("head_dim", "group", "n", "dtype"),
    [
        (64, 3, 65, torch.float32),
        (64, 1, 63, torch.float16),
        (128, 8, 1, torch.float32),
        (128, 4, 7, torch.bfloat16),
        (80, 3, 5, torch.float32),
        (256, 4, 3, torch.float16),
    ],
)
def test_score_and_tail_match_reference(
    kind: SketchKind, head_dim: int, group: int, n: int, dtype: torch.dtype
) -> None:
    sketch = make_sketch(kind, head_dim)
    ids, k, v, q = make_blocks(n, 2, group, head_dim, dtype)
    sketch.seal(1, ids, k, v)
    levels, token_scales, means, mean_scales = unpack(sketch, 1, ids)
    want = reference.score_residual(q, levels, token_scales, means, mean_scales, _signs(head_dim))
    score = sketch.score(1, ids, q)
    assert score.dtype == torch.float32
    torch.testing.assert_close(score.double(), want, atol=TOLERANCE["score", dtype], rtol=0)
    logits, values = sketch.tail(1, ids, q)
    want_logits, want_values = reference.tail(q, means, mean_scales, B)
    torch.testing.assert_close(logits.double(), want_logits, atol=TOLERANCE["tail", dtype], rtol=0)
    torch.testing.assert_close(values.double(), want_values, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "group", "n", "dtype"),
    [
        (64, 3, 65, torch.float32),
        (128, 1, 63, torch.bfloat16),
        (80, 8, 1, torch.float16),
        (256, 4, 5, torch.float32),
    ],
)
def test_minmax_score_matches_reference(head_dim: int, group: int, n: int, dtype: torch.dtype) -> None:
    sketch = make_sketch("minmax", head_dim)
    ids, k, v, q = make_blocks(n, 2, group, head_dim, dtype)
    sketch.seal(1, ids, k, v)
    score = sketch.score(1, ids, q)
    torch.testing.assert_close(score.double(), reference.score_minmax(q, k), atol=TOLERANCE["score", dtype], rtol=0)
    if dtype != torch.bfloat16:  # bounds are rounded to nearest: only what bfloat16 holds is bounded exactly
        k = k.bfloat16()
        sketch.seal(1, ids, k, v)
        score = sketch.score(1, ids, q)
    mass = (torch.einsum("hgd,nhbd->hgnb", q.float(), k.float()) / head_dim**0.5).logsumexp(-1)
    assert (score >= mass - 1e-4).all()


@pytest.mark.parametrize(("kind", "bound"), [("2bit", 0.15), ("1bit", 0.4)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_score_estimates_the_true_mass(kind: SketchKind, bound: float, head_dim: int) -> None:
    sketch = make_sketch(kind, head_dim)
    ids, k, v, q = make_blocks(65, 2, 3, head_dim)
    sketch.seal(0, ids, k, v)
    mass = (torch.einsum("hgd,nhbd->hgnb", q, k) / head_dim**0.5).logsumexp(-1)
    assert (sketch.score(0, ids, q) - mass).abs().mean() < bound
    _, values = sketch.tail(0, ids, q)
    torch.testing.assert_close(values, v.mean(2).transpose(0, 1), atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["2bit", "1bit"])
def test_a_residual_estimate_is_unbiased_along_the_residual(kind: SketchKind) -> None:
    """<r, r̂> = <r, r>: a query that is the residual itself gets its exact logit."""
    sketch = make_sketch(kind, 64, num_kv_heads=1)
    ids, k, v, _ = make_blocks(4, 1, 1, 64)
    sketch.seal(0, ids, k, v)
    levels, token_scales, means, mean_scales = unpack(sketch, 0, ids)
    residual = k.double() - means[:, :, :1] * mean_scales[:, :, :1, None]
    estimate = (levels * token_scales[..., None]) @ reference.rotation(_signs(64)).T
    torch.testing.assert_close((residual * estimate).sum(-1), residual.square().sum(-1), atol=0, rtol=1e-3)


@pytest.mark.parametrize("kind", ["2bit", "1bit", "minmax"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_sketch_depends_on_its_block_alone_to_the_bit(kind: SketchKind, head_dim: int) -> None:
    together, alone = make_sketch(kind, head_dim), make_sketch(kind, head_dim)
    ids, k, v, _ = make_blocks(63, 2, 1, head_dim)
    together.seal(1, ids, k, v)
    for i in range(len(ids)):
        alone.seal(1, ids[i : i + 1], k[i : i + 1], v[i : i + 1])
    one_head = make_sketch(kind, head_dim, num_kv_heads=1)
    one_head.seal(1, ids, k[:, 1:], v[:, 1:])
    for a, b, c in zip(together.tensors(), alone.tensors(), one_head.tensors(), strict=True):
        assert torch.equal(a[1, ids], b[1, ids])
        assert torch.equal(a[1, ids, 1:], c[1, ids])


@pytest.mark.parametrize("kind", ["2bit", "1bit", "minmax"])
def test_scores_follow_the_block_ids_and_no_other_layer(kind: SketchKind) -> None:
    sketch = make_sketch(kind, 64)
    ids, k, v, q = make_blocks(30, 2, 3, 64)
    sketch.seal(1, ids, k, v)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sketch.score(1, ids[order], q), sketch.score(1, ids, q)[..., order])
    before = sketch.score(1, ids, q)
    sketch.seal(0, ids, -k, v)
    assert torch.equal(sketch.score(1, ids, q), before)
    assert sketch.score(1, ids[:0], q).shape == (2, 3, 0)
    sketch.seal(1, ids[:0], k[:0], v[:0])
    assert torch.equal(sketch.score(1, ids, q), before)


def test_a_long_scan_in_chunks_gives_every_block_its_own_score() -> None:
    sketch = make_sketch("2bit", 64, num_blocks=300)
    k = torch.randn(300, 2, B, 64, generator=torch.Generator().manual_seed(0))
    ids, q = torch.arange(300), torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    sketch.seal(0, ids, k, k)
    one_by_one = torch.cat([sketch.score(0, ids[i : i + 1], q) for i in range(300)], -1)
    torch.testing.assert_close(sketch.score(0, ids, q), one_by_one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["2bit", "1bit", "minmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, 1e-30, 3e-6, 1.0, 6e4, 1e30])
@pytest.mark.parametrize("shape", ["constant", "one_channel", "one_token"])
def test_extreme_keys_and_values_stay_finite(kind: SketchKind, dtype: torch.dtype, value: float, shape: str) -> None:
    sketch = make_sketch(kind, 64)
    ids, k, _, q = make_blocks(3, 2, 3, 64)
    if shape == "constant":
        k = torch.full_like(k, value)
    elif shape == "one_channel":
        k[..., 5] = value
    else:
        k[:, :, 3] = -value
    k = k.clamp(max=torch.finfo(dtype).max).to(dtype)
    sketch.seal(0, ids, k, -k)
    for tensor in sketch.tensors():
        if tensor.is_floating_point():
            assert tensor[0, ids].isfinite().all()
    assert sketch.score(0, ids, q).isfinite().all()
    if sketch.has_tail:
        logits, values = sketch.tail(0, ids, q)
        assert logits.isfinite().all()
        assert values.isfinite().all()


@pytest.mark.parametrize("kind", ["2bit", "1bit"])
@pytest.mark.parametrize("value", [0.0, 0.7, -300.0])
def test_a_block_of_equal_tokens_is_told_by_its_mean(kind: SketchKind, value: float) -> None:
    sketch = make_sketch(kind, 64, num_kv_heads=1)
    key = value * torch.linspace(0.5, 1, 64)
    k = key.expand(1, 1, B, 64)
    q = torch.linspace(-1, 2, 64)[None, None]
    sketch.seal(0, torch.tensor([9]), k, k)
    want = q[0, 0] @ key / 8 + torch.log(torch.tensor(float(B)))
    score = sketch.score(0, torch.tensor([9]), q)[0, 0, 0]
    torch.testing.assert_close(score, want, atol=1e-6, rtol=2e-3)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 63, 65])
@pytest.mark.parametrize("spread", [1.0, 500.0])
def test_group_scores_match_reference(group: int, n: int, spread: float) -> None:
    scores = spread * torch.randn(2, group, n, generator=torch.Generator().manual_seed(n))
    # fp32 holds a logit near 1,000 to 1e-4.
    torch.testing.assert_close(
        Sketch.group_scores(scores).double(), reference.group_scores(scores), atol=1e-4, rtol=1e-6
    )


def test_group_scores_keep_the_order_of_shares_too_small_for_a_float() -> None:
    scores = torch.tensor([[[0.0, -200.0, -300.0, -250.0]]])
    assert Sketch.group_scores(scores)[0].argsort(descending=True).tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("n", [1, 63, 65, 1000])
@pytest.mark.parametrize("k", [0, 1, 16, 64, 2000])
@pytest.mark.parametrize("num_values", [1, 4, 10**6])
def test_top_blocks_match_reference_with_ties(n: int, k: int, num_values: int) -> None:
    scores = torch.randint(num_values, (3, n), generator=torch.Generator().manual_seed(n + k)).float()
    chosen = top_blocks(scores, k)
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen, reference.top_blocks(scores, k))
