"""Selection: which candidate blocks a row attends, from its own query and the sketches alone."""

from dataclasses import dataclass

import torch

from oasis_tp.sparse.sketch import Sketch, top_blocks


@dataclass(frozen=True, slots=True)
class Selection:
    """What one row chose in one layer.

    `tail_logits` and `tail_values` stand for the candidates that were not chosen; None with a sketch that has no means.
    """

    chosen: torch.Tensor  # [head, budget] int64, positions among the candidates, ascending
    scores: torch.Tensor  # [head, num_candidates] fp32, what they were chosen by
    tail_logits: torch.Tensor | None  # [head, group, num_candidates] fp32, -inf where chosen
    tail_values: torch.Tensor | None  # [head, num_candidates, head_dim] fp32


def select_blocks(sketch: Sketch, layer: int, candidate_ids: torch.Tensor, q: torch.Tensor, budget: int) -> Selection:
    """The `budget` candidates with the largest estimated attention mass, per KV head.

    Args:
        candidate_ids: host blocks of the row's candidates in ascending block order, [n] int64, n > budget.
        q: the row's roped queries [head, group, head_dim].
    """
    scores = sketch.group_scores(sketch.score(layer, candidate_ids, q))
    chosen = top_blocks(scores, budget)
    if not sketch.has_tail:
        return Selection(chosen, scores, None, None)
    logits, values = sketch.tail(layer, candidate_ids, q)
    taken = chosen[:, None, :].expand(-1, logits.shape[1], -1)
    return Selection(chosen, scores, logits.scatter(2, taken, float("-inf")), values)


def rank_blocks(sketch: Sketch, layer: int, candidate_ids: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """All candidates per KV head from the best to the worst, ties by lower id: [head, n] int64 positions."""
    scores = sketch.group_scores(sketch.score(layer, candidate_ids, q))
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices
