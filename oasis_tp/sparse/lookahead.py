"""Lookahead: which blocks a row brings to the device for the rows after it. Nothing here changes what a row attends."""

import math
from dataclasses import dataclass

import torch

HYSTERESIS = 0.25
"""Blocks ranked just under the budget are wanted too, this share of it: where neighbouring rows differ, they differ there."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """What one row per request and step (its probe, else its last verify row) may order in the background."""

    limit: int
    """Most blocks per layer and KV head; 0: none."""
    reach: int
    """How many of the row's best candidates are wanted."""

    @classmethod
    def of(cls, budget: int, fetch_ratio: float, num_open: int) -> "Lookahead":
        """For `budget` blocks per row, of which at most the share `fetch_ratio` may move.

        `num_open` blocks may begin in one step. Their slots are the victims that a row always leaves: the blocks it
        selects itself.
        """
        limit = math.ceil(round(fetch_ratio * budget, 6)) if budget >= num_open else 0
        return cls(limit, budget + math.ceil(HYSTERESIS * budget))


NONE = Lookahead(0, 0)


def most_wanted(scores: torch.Tensor, reach: int) -> torch.Tensor:
    """The `reach` best candidates per head, best first, ties by lower id: scores [head, n] -> positions [head, reach]."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :reach]
