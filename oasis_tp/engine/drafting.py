"""Where drafts are made: after a step's tokens are committed, for the requests that decode in the next one."""

from collections.abc import Sequence
from pathlib import Path

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import Config
from oasis_tp.draft.draft_model import ModelDrafter
from oasis_tp.draft.drafter import Drafter
from oasis_tp.draft.eagle3 import Eagle3Drafter
from oasis_tp.draft.eagle3_head import Eagle3Head, load_head, load_head_config
from oasis_tp.draft.ngram import NgramDrafter
from oasis_tp.engine.plan import StepPlan
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.registry import ModelArch, load_arch
from oasis_tp.models.tokenizer import load_tokenizer
from oasis_tp.models.weights import load_weights
from oasis_tp.request import Request

NO_DRAFT = -1
"""Fills a request's row of the draft broadcast after its last token."""


def make_drafter(config: Config, target: LlamaModel, model_dir: Path, max_model_len: int) -> Drafter | None:
    """The drafter of --spec-method with its weights and KV in place; None when nobody drafts.

    Raises:
        ValueError: a --spec-model that cannot draft for this model.
    """
    speculation, num_rows = config.speculation, config.batching.max_num_seqs
    if speculation.spec_method == "none":
        return None
    if speculation.spec_method == "ngram":
        return NgramDrafter(min_ngram=speculation.prompt_lookup_min, max_ngram=speculation.prompt_lookup_max)
    alone = TpGroup.single(target.device)
    if speculation.spec_method == "eagle3":
        head_dir = resolve_model(speculation.spec_model, option="--spec-model", more_files=["pytorch_model.bin"])
        head_config = load_head_config(head_dir, target.arch)
        head = Eagle3Head(
            head_config,
            target.arch.hidden_size,
            target.embedding.lookup,
            alone,
            target.place,
            max_model_len=max_model_len,
        )
        load_head(head, head_dir)
        return Eagle3Drafter(head, head_config.feature_layers, num_rows=num_rows, max_model_len=max_model_len)
    draft_dir = resolve_model(speculation.spec_model, option="--spec-model")
    arch = load_arch(draft_dir)
    _check_vocabulary(speculation.spec_model, arch, draft_dir, target.arch, model_dir)
    model = LlamaModel(arch, alone, target.place, max_model_len=max_model_len)
    load_weights(model, draft_dir)
    return ModelDrafter(model, num_rows=num_rows, max_model_len=max_model_len)


def _check_vocabulary(name: str, draft: ModelArch, draft_dir: Path, target: ModelArch, target_dir: Path) -> None:
    """Token ids must mean the same to both models."""
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"--spec-model {name}: its vocabulary has {draft.vocab_size} tokens and the model's {target.vocab_size}; a "
            "draft model must have the same vocabulary"
        )
    ours, theirs = (load_tokenizer(path).backend.get_vocab() for path in (target_dir, draft_dir))
    if ours != theirs:
        token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ValueError(
            f"--spec-model {name}: its vocabulary differs from the model's: token {token!r} has id "
            f"{theirs.get(token, 'none')} there and {ours.get(token, 'none')} here; a draft model must have the same "
            "vocabulary"
        )


def learn(
    drafter: Drafter, plan: StepPlan, features: dict[int, torch.Tensor], token_ids: Sequence[Sequence[int]]
) -> None:
    """Hand the step's hidden states of committed tokens to a drafter that reads them. Call after the commit.

    `features` are the rows' per request id; of a decoding request as many count as it gained tokens (`token_ids` per
    `plan.sampled`).
    """
    for request, tokens in zip(plan.decode, token_ids, strict=False):
        if request.finish_reason is None:
            drafter.learn(request, request.num_computed - len(tokens), features[request.request_id][: len(tokens)])
    for chunk in plan.prefill:
        if chunk.request.finish_reason is None:
            drafter.learn(chunk.request, chunk.start, features[chunk.request.request_id])


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
