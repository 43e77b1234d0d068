"""What a request adds to its logits before a token is chosen: bias by token, and penalties for what was said."""

from collections.abc import Sequence

import torch

from oasis_tp.request import Request, SamplingParams


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether `penalized` would change anything."""
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def penalized(logits: torch.Tensor, request: Request, just_said: Sequence[int] = ()) -> torch.Tensor:
    """A request's logits [vocab] with its own changes, as a new tensor.

    `just_said`: tokens of this step that the row follows and that `request.output_ids` does not hold yet.

    Repetition (Keskar et al., CTRL, 2019, section 4.1) divides positive and multiplies negative logits of every token
    of prompt and output. Presence and frequency (OpenAI) are subtracted once and per occurrence in the output.
    The bias is added last.
    """
    sampling, changed = request.spec.sampling, logits.clone()
    said = torch.tensor([*request.output_ids, *just_said], dtype=torch.int64, device=logits.device)
    if sampling.repetition_penalty != 1.0:
        prompt = torch.tensor(request.spec.prompt_ids, dtype=torch.int64, device=logits.device)
        seen = torch.unique(torch.cat([prompt, said]))
        values = changed[seen]
        factor = sampling.repetition_penalty
        changed[seen] = torch.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = torch.unique(said, return_counts=True)
        changed[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        tokens = torch.tensor([token for token, _ in sampling.logit_bias], device=logits.device)
        bias = [value for _, value in sampling.logit_bias]
        changed[tokens] += torch.tensor(bias, dtype=changed.dtype, device=logits.device)
    return changed
