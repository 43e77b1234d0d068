"""RULER's eight needle tasks (Hsieh et al. 2024, section 3), made anew: one sentence or more hidden in a haystack."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oasis_tp.bench.haystack import NOISE
from oasis_tp.bench.tasks.draft import Ask, Draft, distinct, number, uuid_text, word_key
from oasis_tp.bench.tasks.fit import largest_fit
from oasis_tp.bench.tasks.hide import DEPTHS, hide

Kind = Literal["words", "uuids"]
Hay = Literal["noise", "prose", "needles"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Niah:
    """One of the tasks. `keys` and `values`: what they are made of; `num_*`: how many; `asked`: how many keys are."""

    hay: Hay
    keys: Kind = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1
    asked: int = 1

    def __call__(self, ask: Ask) -> Draft:
        rng = ask.rng
        draw = {"words": word_key, "uuids": uuid_text}[self.keys]
        keys = distinct(draw, rng, self.num_keys)
        values = distinct({"numbers": number, "uuids": uuid_text}[self.values], rng, self.num_keys * self.num_values)
        needles = [
            self._needle(key, value)
            for index, key in enumerate(keys)
            for value in values[index * self.num_values : (index + 1) * self.num_values]
        ]
        outputs = tuple(values[: self.asked * self.num_values])
        # The first needle is (one of) the asked: its depth is given, the others' are drawn.
        first = ask.depth
        others = rng.sample([depth for depth in DEPTHS if depth != first], len(needles) - 1)
        placed = list(zip([first, *others], needles, strict=True))
        hay = self._haystack(ask, set(keys))
        query, several = self._question(keys[: self.asked])

        def text(size: int) -> str:
            return (
                f"Special magic {self.values} are hidden within the following text. Memorize them: I will quiz you "
                f"about the {self.values} afterwards.{hide(hay(size), placed)}\n{query}"
            )

        prefix = (
            f" The special magic {self.values if several else self.values[:-1]} for {_listed(keys[: self.asked])} "
            f"mentioned in the provided text {'are' if several else 'is'}"
        )
        size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, lambda size: text(size) + prefix, 0)
        return Draft(
            input=text(size),
            outputs=outputs,
            answer_prefix=prefix,
            num_prompt_tokens=num_tokens,
            depth=None if several else first,
        )

    def _question(self, asked: list[str]) -> tuple[str, bool]:
        several = self.asked * self.num_values > 1
        if several:
            return f"What are all the special magic {self.values} for {_listed(asked)} mentioned in the text?", True
        return f"What is the special magic {self.values[:-1]} for {asked[0]} mentioned in the text?", False

    def _needle(self, key: str, value: str) -> str:
        return f"\nOne of the special magic {self.values} for {key} is: {value}."

    def _haystack(self, ask: Ask, keys: set[str]) -> Callable[[int], list[str]]:
        """The haystack's first `size` pieces; none is a needle of one of `keys`."""
        if self.hay == "noise":
            return lambda size: [NOISE] * size
        if self.hay == "prose":
            pieces = ask.haystack
            start = ask.rng.randrange(len(pieces))
            return lambda size: [pieces[(start + index) % len(pieces)] for index in range(size)]
        # Every size must be the start of the next, so these draw from a stream of their own, as far as is asked.
        stream = random.Random(ask.rng.getrandbits(64))
        draw = {"words": word_key, "uuids": uuid_text}[self.keys]
        value = {"numbers": number, "uuids": uuid_text}[self.values]
        drawn: list[str] = []

        def needles(size: int) -> list[str]:
            while len(drawn) < size:
                key = draw(stream)
                if key not in keys:
                    drawn.append(self._needle(key, value(stream)))
            return drawn[:size]

        return needles


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


TASKS = {
    "niah_single_1": Niah(hay="noise"),
    "niah_single_2": Niah(hay="prose"),
    "niah_single_3": Niah(hay="prose", values="uuids"),
    "niah_multikey_1": Niah(hay="prose", num_keys=4),
    "niah_multikey_2": Niah(hay="needles"),
    "niah_multikey_3": Niah(hay="needles", keys="uuids", values="uuids"),
    "niah_multivalue": Niah(hay="prose", num_values=4),
    "niah_multiquery": Niah(hay="prose", num_keys=4, asked=4),
}
