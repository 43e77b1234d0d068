"""RULER's variable tracking: a chain of assignments in noise, and the question which variables hold its value."""

import random
import string

from oasis_tp.bench.haystack import NOISE
from oasis_tp.bench.tasks.draft import Ask, Draft, distinct
from oasis_tp.bench.tasks.fit import largest_fit
from oasis_tp.bench.tasks.hide import hide

NUM_HOPS = 4
EXAMPLE_PIECES = 5


def vt(ask: Ask) -> Draft:
    """One chain of 4 hops; the answer is its five variables, in any order. A small solved problem stands before it."""
    rng = ask.rng
    names = distinct(_name, rng, 2 * (NUM_HOPS + 1))
    example, solution = _problem(names[NUM_HOPS + 1 :], rng, EXAMPLE_PIECES)
    chain, value = _chain(names[: NUM_HOPS + 1], rng)
    prefix = _answer(value)

    def text(size: int) -> str:
        return f"{example}{solution}\n\n{_ask(_hidden(chain, size), value)}"

    size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, lambda size: text(size) + prefix, NUM_HOPS + 1)
    return Draft(
        input=text(size),
        outputs=tuple(names[: NUM_HOPS + 1]),
        answer_prefix=prefix,
        num_prompt_tokens=num_tokens,
    )


def _problem(names: list[str], rng: random.Random, size: int) -> tuple[str, str]:
    """A whole problem and its answer."""
    chain, value = _chain(names, rng)
    return _ask(_hidden(chain, size), value), f"{_answer(value)} {', '.join(names)}"


def _chain(names: list[str], rng: random.Random) -> tuple[list[tuple[float, str]], str]:
    """The assignments in order, each at a depth of its own, and the value they pass on."""
    value = str(rng.randrange(10_000, 100_000))
    sides = [value, *(f"VAR {name}" for name in names[:-1])]
    depths = sorted(rng.random() for _ in names)
    lines = [f"\nVAR {name} = {side}" for name, side in zip(names, sides, strict=True)]
    return list(zip(depths, lines, strict=True)), value


def _hidden(chain: list[tuple[float, str]], size: int) -> str:
    return hide([NOISE] * size, chain)


def _ask(context: str, value: str) -> str:
    return (
        f"Variables are assigned one to another in the following text. Track the assignments.\n{context}\n"
        f"Question: which variables are assigned the value {value}, directly or through others?"
    )


def _answer(value: str) -> str:
    return f" Answer: by the assignments in the text, {NUM_HOPS + 1} variables are assigned the value {value}:"


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=5))
