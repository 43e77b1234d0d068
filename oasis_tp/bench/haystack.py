"""Needle prompts: one fact hidden in a long text, and the question that asks for it.

The task is RULER's niah_single (Hsieh et al. 2024, section 3), made anew: lengths are counted with the model's own
tokenizer and the prompt ends with the answer prefix, so that the answer is the first thing to be generated.
"""

import pydoc_data.topics
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

NOISE = "\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PROSE_WINDOWS = 8
"""How many places `prose_needle` can begin at."""

_INTRO = "A special magic number is hidden within the following text. Memorize it: I will quiz you about it afterwards."
_ADJECTIVES = (
    "amber",
    "brave",
    "calm",
    "distant",
    "eager",
    "gentle",
    "hollow",
    "ivory",
    "lucky",
    "quiet",
    "rapid",
    "silver",
)
_NOUNS = (
    "anchor",
    "basket",
    "candle",
    "falcon",
    "garden",
    "harbor",
    "island",
    "lantern",
    "meadow",
    "orchard",
    "pebble",
    "violin",
)


class Tokenizer(Protocol):
    def encode(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt, and what a right answer contains."""

    prompt: str
    answer: str
    key: str


def noise_needle(tokenizer: Tokenizer, num_tokens: int, depth: float, seed: int) -> Needle:
    """A needle among repeated noise sentences (niah_single_1).

    Args:
        tokenizer: counts tokens.
        num_tokens: most tokens the prompt may have; the largest haystack that fits is taken.
        depth: where the needle stands, 0 (first) to 1 (last).
        seed: chooses key and value.

    Raises:
        ValueError: depth out of range, or num_tokens too few for the question alone.
    """
    return _hide(tokenizer, num_tokens, depth, seed, lambda size: [NOISE] * size)


def prose_needle(tokenizer: Tokenizer, num_tokens: int, depth: float, seed: int, window: int) -> Needle:
    """A needle in technical prose, the standard library's help topics (niah_single_2).

    `window`, 0 to PROSE_WINDOWS - 1, says at which eighth of the prose the haystack begins; past the end it goes on
    at the start. Otherwise as `noise_needle`.

    Raises:
        ValueError: as `noise_needle`; a window out of range.
    """
    if not 0 <= window < PROSE_WINDOWS:
        raise ValueError(f"window is {window}; allowed: 0 to {PROSE_WINDOWS - 1}")
    sentences = _prose_sentences()
    start = window * len(sentences) // PROSE_WINDOWS
    ordered = sentences[start:] + sentences[:start]
    return _hide(tokenizer, num_tokens, depth, seed, lambda size: ordered[:size])


def prose() -> str:
    """The technical prose: about 465,000 characters, fixed by the Python version."""
    return "\n".join(pydoc_data.topics.topics.values())


def _prose_sentences() -> list[str]:
    """The prose cut after each sentence; joined without a separator the pieces are the text again."""
    return re.split(r"(?<=[.!?])(?=\s)", prose())


def _hide(
    tokenizer: Tokenizer, num_tokens: int, depth: float, seed: int, haystack: Callable[[int], list[str]]
) -> Needle:
    """Build the prompt over the largest `haystack(size)` that keeps it within `num_tokens`."""
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth is {depth}; allowed: 0 to 1")
    rng = random.Random(seed)
    key = f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
    answer = str(rng.randrange(1_000_000, 10_000_000))

    def prompt(size: int) -> str:
        pieces = haystack(size)
        pieces.insert(round(depth * len(pieces)), f"\nOne of the special magic numbers for {key} is: {answer}.")
        text = "".join(pieces)
        return (
            f"{_INTRO}{text}\nWhat is the special magic number for {key} mentioned in the provided text? "
            f"The special magic number for {key} mentioned in the provided text is"
        )

    def fits(size: int) -> bool:
        return len(tokenizer.encode(prompt(size))) <= num_tokens

    if not fits(0):
        raise ValueError(f"num_tokens is {num_tokens}; the question alone needs {len(tokenizer.encode(prompt(0)))}")
    # `low` fits, `high` does not; no piece is shorter than a token.
    low, high = 0, num_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Needle(prompt(low), answer, key)
