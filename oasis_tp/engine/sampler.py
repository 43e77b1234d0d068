"""Sampler: rank 0 turns logits into tokens, each request with a random stream of its own."""

import zlib
from dataclasses import dataclass, field

import torch

from oasis_tp.engine.penalties import changes_logits, penalized
from oasis_tp.engine.token_logprobs import PromptLogprobs, token_logprobs
from oasis_tp.request import Request, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """Per request, the tokens it gains in a step and their logprobs (None where not wanted)."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs | None]]
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By request id, of prompts that have ended."""


class Sampler:
    """Greedy and sampled choice. A request's draws depend on its seed and its own logits, never on its neighbours."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[int, torch.Generator] = {}

    def sample(
        self, logits: torch.Tensor, requests: list[Request], drafts: list[tuple[int, ...]] | None = None
    ) -> Sampled:
        """One token per request, and one more for each draft that it finds right.

        Args:
            logits: [n, vocab] fp32: per request a row for its next token, then one for what follows each draft.
            drafts: per request; none where absent.

        Each row is sampled as it would be without drafts, and the next row counts only if the token is the draft it
        follows: with drafts that are given and not drawn this is rejection sampling, and the target's distribution
        (here even its draws) is preserved. -1 where a row's logits are not finite numbers.
        """
        greedy: list[int] = []
        if any(request.spec.sampling.temperature == 0.0 for request in requests):
            greedy = logits.argmax(dim=-1).tolist()
        # A NaN is both the greatest and the least; to ask every logit takes ten times as long.
        ends = torch.stack((logits.amax(dim=-1), logits.amin(dim=-1)))
        corrupted = (~torch.isfinite(ends).all(dim=0)).tolist()
        token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprobs | None]] = []
        row = 0
        for request, own in zip(requests, drafts or [()] * len(requests), strict=True):
            sampling = request.spec.sampling
            token_ids.append([])
            logprobs.append([])
            changes = changes_logits(sampling)
            for index in range(row, row + len(own) + 1):
                adjusts = changes and not corrupted[index]
                adjusted = penalized(logits[index], request, token_ids[-1]) if adjusts else logits[index]
                if corrupted[index]:
                    token_id = -1
                elif sampling.temperature == 0.0:
                    token_id = int(adjusted.argmax()) if adjusts else int(greedy[index])
                else:
                    token_id = _draw(adjusted, sampling, self._generator(request))
                wanted = sampling.logprobs is not None and token_id >= 0
                token_ids[-1].append(token_id)
                own_logits = logits[index : index + 1]
                reported = token_logprobs(own_logits, [token_id], sampling.logprobs or 0)[0] if wanted else None
                logprobs[-1].append(reported)
                if index - row == len(own) or token_id != own[index - row]:
                    break
            row += len(own) + 1
        return Sampled(token_ids, logprobs)

    def forget(self, request_id: int) -> None:
        """The request ended."""
        self._generators.pop(request_id, None)

    def _generator(self, request: Request) -> torch.Generator:
        generator = self._generators.get(request.request_id)
        if generator is None:
            generator = torch.Generator()
            seed = request.spec.sampling.seed
            # torch's CPU generator takes 32 bits of a seed: both numbers must reach them.
            own = zlib.crc32(f"{self.seed} {request.request_id}".encode())
            generator.manual_seed(seed if seed is not None else own)
            self._generators[request.request_id] = generator
        return generator


def _draw(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    """One draw after temperature, then top-k, top-p and min-p, each on what the one before left."""
    # The best becomes 0 first, so that no temperature, however low, makes it infinite.
    scaled = (logits.double() - logits.max()).div_(sampling.temperature)
    order = None
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        scaled, order = torch.sort(scaled, descending=True, stable=True)
    if sampling.top_k > 0:
        scaled[sampling.top_k :] = float("-inf")
    probs = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1.0:
        before = probs.cumsum(-1) - probs
        probs = torch.where(before < sampling.top_p, probs, 0.0)
    if sampling.min_p > 0.0:
        probs = torch.where(probs >= sampling.min_p * probs[0], probs, 0.0)
    draw = torch.rand((), generator=generator, dtype=probs.dtype).to(probs.device)
    ladder = probs.cumsum(-1)
    # Below the top of the ladder, also when the draw rounds up to it: then a rung above it has a probability.
    height = torch.minimum(draw * ladder[-1], torch.nextafter(ladder[-1], torch.zeros_like(draw)))
    picked = int(torch.searchsorted(ladder, height, right=True))
    return picked if order is None else int(order[picked])
