"""What a task's generator hands back, and the words that tasks share."""

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from oasis_tp.bench.haystack import Tokenizer, prose


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A sample before it is numbered. Fields as in `Sample`."""

    input: str
    outputs: tuple[str, ...]
    answer_prefix: str
    num_prompt_tokens: int
    depth: float | None = None
    answer_start: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a generator is asked for: a prompt of at most `num_tokens` tokens, drawn with `rng`."""

    tokenizer: Tokenizer
    num_tokens: int
    rng: random.Random
    index: int
    """Number of the sample within its task and length."""
    depth: float
    """Where the (first) needle is to stand, one of DEPTHS."""
    haystack: tuple[str, ...] = ()
    """Sentences of the prose; joined without a separator they are the text."""
    questions: "tuple[Question, ...]" = ()
    """The user's questions (task qa)."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the paragraph that answers it, and every answer that counts."""

    question: str
    paragraph: str
    answers: tuple[str, ...]


_LONG = re.compile(r"[\s\S]{1,400}(?=\s|\Z)|[\s\S]{1,400}")
"""Up to 400 characters, to the end of a word where there is one."""
Generator = Callable[[Ask], Draft]


def sentences(text: str) -> tuple[str, ...]:
    """The text cut after each sentence, and within one that is very long; joined without a separator it is the text."""
    pieces = re.split(r"(?<=[.!?])(?=\s)", text)
    return tuple(cut for piece in pieces for cut in _LONG.findall(piece))


@cache
def vocabulary() -> tuple[str, ...]:
    """About 2,000 English words in small letters, those of Python's help topics, in alphabetical order."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", prose()))))


def unlike_words(rng: random.Random, count: int) -> list[str]:
    """`count` words that all differ; hyphenated pairs once the vocabulary is used up."""
    words = list(vocabulary())
    rng.shuffle(words)
    seen = set(words)
    while len(words) < count:
        pair = f"{rng.choice(vocabulary())}-{rng.choice(vocabulary())}"
        if pair not in seen:
            seen.add(pair)
            words.append(pair)
    return words[:count]


def word_key(rng: random.Random) -> str:
    """A key of two words, such as `amber-candle`."""
    return f"{rng.choice(vocabulary())}-{rng.choice(vocabulary())}"


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randrange(1_000_000, 10_000_000))


def uuid_text(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(draw: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    """`count` draws that all differ."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
