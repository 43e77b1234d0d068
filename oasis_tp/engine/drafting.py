"""Where drafts are made: after a step's tokens are committed, for the requests that decode in the next one."""

from collections.abc import Sequence

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import SpeculationConfig
from oasis_tp.draft.drafter import Drafter
from oasis_tp.draft.ngram import NgramDrafter
from oasis_tp.request import Request

NO_DRAFT = -1
"""Fills a request's row of the draft broadcast after its last token."""


def make_drafter(config: SpeculationConfig) -> Drafter | None:
    """The drafter of --spec-method; None when nobody drafts."""
    if config.spec_method == "none":
        return None
    return NgramDrafter(min_ngram=config.prompt_lookup_min, max_ngram=config.prompt_lookup_max)


def draft(drafter: Drafter, tp: TpGroup, wanted: Sequence[tuple[Request, int]]) -> None:
    """Fill `draft_ids` of requests with at most so many tokens each (at least 1); the same on every rank.

    Collective where the drafter asks for it: who is asked, and for how much, follows from the replicated scheduler.
    """
    requests = [request for request, _ in wanted]
    counts = [count for _, count in wanted]
    if not requests:
        return
    proposals = drafter.propose(requests, counts)
    if drafter.needs_broadcast and tp.size > 1:
        message = torch.full((len(requests), max(counts)), NO_DRAFT, dtype=torch.int64)
        for row, tokens in zip(message, proposals, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        tp.broadcast(message)
        proposals = [tuple(token for token in row if token != NO_DRAFT) for row in message.tolist()]
    for request, tokens, count in zip(requests, proposals, counts, strict=True):
        assert len(tokens) <= count, "a drafter proposed more than it was asked for"
        request.draft_ids = tokens
