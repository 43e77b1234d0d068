"""Drafter: whoever proposes tokens that may come next. Drafts are given tokens, so they never change an answer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from oasis_tp.request import Request


class Drafter(ABC):
    """Proposes what may follow the last committed token of requests that decode.

    Every rank has one and makes the same calls, after a step's tokens are committed. State is kept by a request's
    row; it may lag behind while nobody asks, and catches up from the request's own tokens.
    """

    needs_broadcast = True
    """Ranks compute drafts from numbers that may differ in their last bits: what rank 0 proposes counts for all."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """For each request at most `counts[i]` (at least 1) tokens after its last one; () where nothing is known."""

    @abstractmethod
    def release(self, row: int) -> None:
        """The request in this row ended. Rows without state are ignored."""
