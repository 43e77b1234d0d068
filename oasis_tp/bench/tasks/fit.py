"""The largest prompt that fits, counted by the model's own tokenizer."""

from collections.abc import Callable

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

    fitting = count(smallest)
    if fitting > num_tokens:
        raise ValueError(f"at least {fitting} prompt tokens are needed, and {num_tokens} are allowed")
    # `low` fits, `high` does not; the first guesses come from how many tokens a size adds.
    low, high = smallest, smallest + num_tokens - fitting + 1
    step = 16
    while low + step < high:
        num = count(low + step)
        if num > num_tokens:
            high = low + step
            break
        low, fitting, step = low + step, num, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        num = count(middle)
        if num <= num_tokens:
            low, fitting = middle, num
        else:
            high = middle
    return low, fitting
