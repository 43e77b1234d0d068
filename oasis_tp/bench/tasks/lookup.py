"""Two plain look-ups: a pass key in noise, and one value of a JSON object of random pairs."""

import json
import random

from oasis_tp.bench.haystack import NOISE
from oasis_tp.bench.tasks.draft import Ask, Draft, uuid_text
from oasis_tp.bench.tasks.fit import largest_fit
from oasis_tp.bench.tasks.hide import hide


def passkey(ask: Ask) -> Draft:
    """Five digits hidden in noise (Mohtashami and Jaggi 2023)."""
    key = str(ask.rng.randrange(10_000, 100_000))
    needle = f"\nThe pass key is {key}. Remember it: {key} is the pass key."

    def text(size: int) -> str:
        return (
            "An important fact is hidden in a lot of irrelevant text. Find it and memorize it: I will ask you about it."
            f"{hide([NOISE] * size, [(ask.depth, needle)])}\nWhat is the pass key?"
        )

    prefix = " The pass key is"
    size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, lambda size: text(size) + prefix, 0)
    return Draft(input=text(size), outputs=(key,), answer_prefix=prefix, num_prompt_tokens=num_tokens, depth=ask.depth)


def kv_retrieval(ask: Ask) -> Draft:
    """A JSON object of UUID pairs, and the value of one of its keys (Liu et al. 2023, section 3)."""
    key, value = uuid_text(ask.rng), uuid_text(ask.rng)
    stream = random.Random(ask.rng.getrandbits(64))
    drawn: list[tuple[str, str]] = []

    def text(size: int) -> str:
        while len(drawn) < size:
            drawn.append((uuid_text(stream), uuid_text(stream)))
        pairs = drawn[:size]
        pairs.insert(round(ask.depth * size), (key, value))
        return (
            "Extract the value that belongs to the given key from the JSON object below.\n"
            f'{json.dumps(dict(pairs), indent=0)}\nKey: "{key}"'
        )

    prefix = '\nCorresponding value: "'
    size, num_tokens = largest_fit(ask.tokenizer, ask.num_tokens, lambda size: text(size) + prefix, 0)
    return Draft(
        input=text(size), outputs=(value,), answer_prefix=prefix, num_prompt_tokens=num_tokens, depth=ask.depth
    )
