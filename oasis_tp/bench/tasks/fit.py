"""The largest prompt that fits, counted by the model's own tokenizer."""

from collections.abc import Callable
from itertools import count as count_up

from oasis_tp.bench.haystack import Tokenizer


def largest_fit(tokenizer: Tokenizer, num_tokens: int, prompt: Callable[[int], str], smallest: int) -> tuple[int, int]:
    """The largest `size` whose `prompt(size)` has at most `num_tokens` tokens, and how many it has.

    `prompt` must grow by a token or more with each size; `smallest` is the least size that makes sense. The answer is
    exact where the number of tokens never falls with the size, and otherwise a size that fits with a next one that
    does not.

    Raises:
        ValueError: the smallest prompt does not fit.
    """

    def count(size: int) -> int:
        return len(tokenizer.encode(prompt(size)))

    low, fitting = smallest, count(smallest)
    if fitting > num_tokens:
        raise ValueError(f"at least {fitting} prompt tokens are needed, and {num_tokens} are allowed")
    # `low` fits, `high` does not. Prompts grow evenly, so that a straight line through both is a good guess, and a
    # long prompt is encoded only a few times; every third guess is the middle, for those that do not.
    high, too_many = smallest + num_tokens - fitting + 1, 0
    guess = low + 16
    for turn in count_up(1):
        if high - low == 1:
            break
        guess = min(max(guess, low + 1), high - 1)
        num = count(guess)
        if num <= num_tokens:
            slope = (num - fitting) / (guess - low)
            low, fitting = guess, num
        else:
            high, too_many = guess, num
        if too_many:
            slope = (too_many - fitting) / (high - low)
        guess = (low + high) // 2 if too_many and turn % 3 == 0 else low + int((num_tokens - fitting) / max(1.0, slope))
    return low, fitting
