"""Lookahead: which blocks a row brings to the device for the rows after it. It never changes what a row attends."""

import math
from dataclasses import dataclass

import torch

from oasis_tp.kv.layout import SelectionLayout

HYSTERESIS = 0.25
"""Blocks ranked just under the budget are wanted too, this share of it: there neighbouring rows differ.

SmolLM2, 3,900 tokens of prose, budget 512, hot factor 2: 99.4 % of what a rightly drafted row selects is then resident
(99.1 % without; 91.3 % with nothing brought in ahead), for 1.6 times the bytes. Twice the share brought no more.
"""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """What one row per request and step (its probe, else its last verify row) may order in the background."""

    limit: int
    """Most blocks per layer and KV head; 0: none."""
    reach: int
    """How many of the row's best candidates are wanted."""

    @classmethod
    def of(cls, selection: SelectionLayout, fetch_ratio: float) -> "Lookahead":
        """At most the share `fetch_ratio` of the budget moves.

        What a step's rows selected is never in flight, so blocks that begin in the next step find victims among it; a
        budget too small for that orders nothing.
        """
        budget = selection.budget
        if budget is None or budget < selection.num_open:
            return NONE
        return cls(math.ceil(round(fetch_ratio * budget, 6)), budget + math.ceil(HYSTERESIS * budget))


NONE = Lookahead(0, 0)


def most_wanted(scores: torch.Tensor, reach: int) -> torch.Tensor:
    """The `reach` best candidates per head, best first, ties by lower id: scores [head, n] -> positions of the same."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :reach]
