"""Needle prompts are as long as asked, the same for the same seed, and hide the needle where they say."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasis_tp.bench import haystack
from oasis_tp.bench.haystack import Needle, noise_needle, prose_needle


class Words:
    """A token for every word."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def prose_of_window_3(tokenizer: Words, num_tokens: int, depth: float, seed: int) -> Needle:
    return prose_needle(tokenizer, num_tokens, depth, seed, window=3)


BUILDERS = pytest.mark.parametrize("build", [noise_needle, prose_of_window_3])


@BUILDERS
def test_the_largest_haystack_that_fits_is_taken(build: Callable[..., Needle]) -> None:
    longest_piece = max(len(Words().encode(piece)) for piece in [haystack.NOISE, *haystack._prose_sentences()])
    for num_tokens in (*range(200, 230), 4001):
        length = len(Words().encode(build(Words(), num_tokens, 0.5, 0).prompt))
        assert num_tokens - longest_piece <= length <= num_tokens
    noise_length = len(Words().encode(noise_needle(Words(), 1000, 0.5, 0).prompt))
    assert 1000 - noise_length < len(Words().encode(haystack.NOISE))


@BUILDERS
def test_the_needle_stands_at_its_depth_once(build: Callable[..., Needle]) -> None:
    for depth in (0.0, 0.3, 1.0):
        needle = build(Words(), 4000, depth, 7)
        assert needle.prompt.count(needle.answer) == 1
        assert f"special magic numbers for {needle.key} is: {needle.answer}." in needle.prompt
        assert needle.prompt.endswith(f"special magic number for {needle.key} mentioned in the provided text is")
        place = len(Words().encode(needle.prompt.split(needle.answer)[0])) / 4000
        assert place == pytest.approx(depth, abs=0.04)


@given(seed=st.integers(0, 2**32), depth=st.floats(0, 1))
def test_a_seed_says_everything(seed: int, depth: float) -> None:
    needle = noise_needle(Words(), 300, depth, seed)
    assert needle == noise_needle(Words(), 300, depth, seed)
    assert len(needle.answer) == 7 and needle.answer.isdigit()


def test_seeds_and_windows_differ() -> None:
    assert len({noise_needle(Words(), 200, 0.5, seed).answer for seed in range(20)}) == 20
    prompts = {prose_needle(Words(), 500, 0.5, 0, window).prompt for window in range(haystack.PROSE_WINDOWS)}
    assert len(prompts) == haystack.PROSE_WINDOWS


def test_prose_is_the_text_itself() -> None:
    assert "".join(haystack._prose_sentences()) == haystack.prose()


@pytest.mark.parametrize(
    ("num_tokens", "depth", "window"), [(10, 0.5, 0), (500, 1.5, 0), (500, -0.1, 0), (500, 0.5, 8)]
)
def test_what_cannot_be_is_refused(num_tokens: int, depth: float, window: int) -> None:
    with pytest.raises(ValueError, match=r"(num_tokens|depth|window) is -?[\d.]+; "):
        prose_needle(Words(), num_tokens, depth, 0, window)
