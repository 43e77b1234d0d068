"""RULER's two aggregation tasks: the commonest words of a list, and of a coded text."""

import math
import random
import string

from oasis_tp.bench.tasks.draft import Ask, Draft, distinct, unlike_words
from oasis_tp.bench.tasks.fit import largest_fit

NUM_COMMON = 10
SHORT_TOKENS = 4096
"""Below it the lists of `cwe` repeat less, as RULER's do: the common words alone would not fit."""
FILLER = "…"
"""The coded text's commonest word, shown as this: it is not asked for."""


def cwe(ask: Ask) -> Draft:
    """A shuffled, numbered list in which 10 words stand 30 times (6 in a short one) and all others 3 times (once).

    The answer is the ten, in any order. A small solved list stands before it.
    """
    short = ask.num_tokens < SHORT_TOKENS
    common, others = (6, 1) if short else (30, 3)
    example_common, example_others, example_words = (3, 1, 20) if short else (10, 3, 40)
    # As many words as could be used at all, so that each size is the start of the next.
    words = unlike_words(ask.rng, 2 * NUM_COMMON + example_words + ask.num_tokens // others)
    answer, other_answer, rest = words[:NUM_COMMON], words[NUM_COMMON : 2 * NUM_COMMON], words[2 * NUM_COMMON :]
    example = _list(other_answer, rest[: example_words - NUM_COMMON], example_common, example_others, ask.rng.random())
    rest, order = rest[example_words - NUM_COMMON :], ask.rng.random()
    head = f"{_question(example)}{_prefix()} {_numbered(other_answer)}\n\n"

    def text(size: int) -> str:
        return head + _question(_list(answer, rest[:size], common, others, order))

    size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, lambda size: text(size) + _prefix(), 0)
    return Draft(input=text(size), outputs=tuple(answer), answer_prefix=_prefix(), num_prompt_tokens=num_tokens)


def _list(common: list[str], others: list[str], num_common: int, num_others: int, order: float) -> str:
    entries = common * num_common + others * num_others
    random.Random(order).shuffle(entries)
    return _numbered(entries)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _question(listed: str) -> str:
    return (
        f"Below is a numbered list of words, some of which stand in it more often than the others. Memorize those that "
        f"stand in it most often.\n{listed}\nQuestion: what are the {NUM_COMMON} most common words in the list above?"
    )


def _prefix() -> str:
    return f" Answer: the {NUM_COMMON} words that stand in the list most often are:"


def fwe(ask: Ask) -> Draft:
    """A text of invented words of six letters whose counts fall by zeta(2) with their rank.

    The commonest is shown as FILLER; the answer is the next three, in any order.
    """
    rng = ask.rng
    num_words = max(10, ask.num_tokens // 50)
    coded = [FILLER, *distinct(lambda rng: "".join(rng.choices(string.ascii_lowercase, k=6)), rng, num_words - 1)]
    order = rng.random()

    def text(size: int) -> str:
        entries = [word for rank, word in enumerate(coded, 1) for _ in range(zeta_count(size, rank))]
        random.Random(order).shuffle(entries)
        return (
            "The following coded text is made of words without meaning. Keep track of how often each of them appears.\n"
            f"{' '.join(entries)}\nQuestion: leaving {FILLER} aside, what are the three words that appear most often "
            "in the coded text above? Give no explanation."
        )

    prefix = " Answer: the three words that appear most often in the coded text are:"
    smallest = next(size for size in range(1, 1000) if zeta_count(size, 4) > zeta_count(size, 5))
    size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, lambda size: text(size) + prefix, smallest)
    while zeta_count(size, 4) == zeta_count(size, 5):  # a tie has no answer; few sizes have one
        size -= 1
        num_tokens = len(ask.tokenizer.encode(text(size) + prefix))
    return Draft(input=text(size), outputs=tuple(coded[1:4]), answer_prefix=prefix, num_prompt_tokens=num_tokens)


def zeta_count(size: int, rank: int) -> int:
    """How often the word of that rank, from 1, stands in a text of about `size` words: size / (zeta(2) rank²)."""
    return int(size / (math.pi**2 / 6) / rank**2)
