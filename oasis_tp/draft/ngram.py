"""NgramDrafter: prompt lookup. What followed the latest earlier occurrence of the text's last words may follow again.

The method is prompt lookup decoding (Saxena, 2023): no model, only the request's own tokens, so every rank drafts the
same without a word to the others.
"""

from collections.abc import Sequence


class NgramDrafter:
    """Drafts for one request, from an index over its own tokens that grows with it.

    Draft length follows the acceptance seen: it grows by one when a whole draft was accepted, falls to what was
    accepted when not, and after drafts of which nothing was accepted pauses for ever longer (1, 2, 4 … up to
    `MAX_PAUSE` steps), so that text without repetition costs next to nothing.
    """

    MAX_PAUSE = 32

    def __init__(self, num_tokens: int, *, min_ngram: int, max_ngram: int) -> None:
        assert num_tokens >= 1 and 1 <= min_ngram <= max_ngram
        self.num_tokens = num_tokens
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram -> where the token after its latest occurrence stands
        self._length = num_tokens
        self._pause = 0
        self._waiting = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """The request has gained tokens."""
        for token in tokens:
            at = len(self.tokens)
            for size in self.sizes:
                if size <= at:
                    self._after[tuple(self.tokens[at - size :])] = at
            self.tokens.append(token)

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next; () when nothing matches, or while it pauses."""
        if self._waiting > 0:
            self._waiting -= 1
            return ()
        count = min(limit, self._length)
        if count <= 0:
            return ()
        for size in self.sizes:
            at = self._after.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if at is not None:
                return tuple(self.tokens[at : at + count])
        return ()

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """How the last draft fared."""
        if num_accepted == 0:
            self._pause = min(self.MAX_PAUSE, max(1, 2 * self._pause))
            self._waiting = self._pause
            self._length = 1
            return
        self._pause = 0
        # A draft that was right to its end may have been cut short by its limit: it says nothing against longer ones.
        longest = max(self._length, num_accepted + 1) if num_accepted == num_proposed else num_accepted + 1
        self._length = min(self.num_tokens, longest)
