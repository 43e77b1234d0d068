"""NgramDrafter: prompt lookup. What followed the latest earlier occurrence of the text's last words may follow again.

The method is prompt lookup decoding (Saxena, 2023): no model, only the request's own tokens, so every rank drafts the
same without a word to the others.
"""

from collections.abc import Sequence

from oasis_tp.draft.drafter import Drafter
from oasis_tp.request import Request


class NgramIndex:
    """Where every n-gram of one request's tokens occurred last; grows with the request."""

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram -> where the token after its latest occurrence stands

    def extend(self, tokens: Sequence[int]) -> None:
        """The request has gained tokens."""
        for token in tokens:
            at = len(self.tokens)
            for size in self.sizes:
                if size <= at:
                    self._after[tuple(self.tokens[at - size :])] = at
            self.tokens.append(token)

    def propose(self, count: int) -> tuple[int, ...]:
        """At most `count` tokens that may come next; () when nothing matches."""
        for size in self.sizes:
            at = self._after.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if at is not None:
                return tuple(self.tokens[at : at + count])
        return ()


class NgramDrafter(Drafter):
    """An index per row. Drafts follow from tokens alone: the same on every rank."""

    needs_broadcast = False

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self._indexes: dict[int, NgramIndex] = {}

    @property
    def device_bytes(self) -> int:
        return 0

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._propose(request, count) for request, count in zip(requests, counts, strict=True)]

    def release(self, row: int) -> None:
        self._indexes.pop(row, None)

    def _propose(self, request: Request, count: int) -> tuple[int, ...]:
        index = self._indexes.get(request.row)
        if index is None:
            index = self._indexes[request.row] = NgramIndex(min_ngram=self.min_ngram, max_ngram=self.max_ngram)
            index.extend(request.spec.prompt_ids)
        index.extend(request.output_ids[len(index.tokens) - request.num_prompt_tokens :])
        return index.propose(count)
