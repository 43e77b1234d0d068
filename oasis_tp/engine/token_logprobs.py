"""Log-probabilities of tokens: of sampled ones, and of a prompt's own, piece by piece while it is computed."""

import math
from collections.abc import Sequence

import torch

from oasis_tp.engine.plan import PrefillChunk
from oasis_tp.models.llama import LlamaModel
from oasis_tp.request import TokenLogprobs

PromptLogprobs = list[TokenLogprobs]
"""An entry per prompt token but the first."""
PIECE_ROWS = 64
"""Rows whose logits exist at once: a prompt's would need more memory than its KV."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of the model's own distribution: before penalties, temperature and truncation.

    Args:
        logits: [n, vocab].
        token_ids: n tokens, each of which its row predicted.
        num_top: alternatives to name.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = torch.topk(logprobs, num_top, dim=-1)
    return [
        TokenLogprobs(logprob=logprob, top=tuple(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def chunk_logprobs(model: LlamaModel, hidden: torch.Tensor, chunk: PrefillChunk) -> PromptLogprobs:
    """What a prompt's chunk says of the tokens after each of its own, at rank 0; nothing elsewhere.

    Collective: every rank has the same chunk.

    Args:
        hidden: [chunk, hidden], the chunk's states after the final norm.
    """
    spec, scores = chunk.request.spec, PromptLogprobs()
    num_top = spec.sampling.prompt_logprobs or 0
    targets = spec.prompt_ids[chunk.start + 1 : chunk.stop + 1]
    for first in range(0, len(targets), PIECE_ROWS):
        piece = targets[first : first + PIECE_ROWS]
        rows = hidden[first : first + len(piece)]
        logits = model.tp.gather_logits(model.logits(rows), model.vocab_ranges)
        if logits is not None:
            scores += token_logprobs(logits, piece, num_top)
    return scores


def is_finite(scores: PromptLogprobs) -> bool:
    """Whether the model gave numbers; a token may have no probability at all."""
    return not any(math.isnan(score.logprob) for score in scores)
