"""Drafter: whoever proposes tokens that may come next. Drafts are given tokens, so they never change an answer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oasis_tp.request import Request

if TYPE_CHECKING:
    import torch


class Drafter(ABC):
    """Proposes what may follow the last committed token of requests that decode.

    Every rank has one and makes the same calls, after a step's tokens are committed. State is kept by a request's
    row; it may lag behind while nobody asks, and catches up from the request's own tokens.
    """

    needs_broadcast = True
    """Ranks compute drafts from numbers that may differ in their last bits: what rank 0 proposes counts for all."""

    feature_layers: tuple[int, ...] = ()
    """Target layers whose entering hidden states the drafter wants to see, lowest first."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """What it holds on this rank's device: weights and KV."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """For each request at most `counts[i]` (at least 1) tokens after its last one; () where nothing is known."""

    @abstractmethod
    def release(self, row: int) -> None:
        """The request in this row ended. Rows without state are ignored."""

    def learn(self, request: Request, start: int, features: "torch.Tensor") -> None:
        """Hidden states of the request's committed tokens from `start` on, as the target computed them in this step.

        features [T, len(feature_layers) * hidden]: the layers side by side. Called only with `feature_layers`, for
        every running request and in order; the token after the last of them is committed too.
        """
        assert not self.feature_layers, "a drafter that wants features learns from them"
