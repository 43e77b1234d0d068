"""ModelRunner: runs a StepPlan on this rank, from token ids to sampled ids."""

from dataclasses import dataclass

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.engine.cuda_graphs import DecodeGraphs, Tensors
from oasis_tp.engine.decode_batch import RowState, RowStats
from oasis_tp.engine.kv_cache import KvCache
from oasis_tp.engine.plan import PrefillChunk, StepPlan
from oasis_tp.engine.sampler import Sampled, Sampler
from oasis_tp.engine.scheduler import Scheduler
from oasis_tp.engine.token_logprobs import PromptLogprobs, chunk_logprobs, is_finite
from oasis_tp.models.llama import Attend, LlamaModel
from oasis_tp.nn.attention import causal_mask
from oasis_tp.request import Request

NO_TOKEN = -2
"""Fills a request's row of the token broadcast after its last one."""


@dataclass(slots=True)
class PromptEnd:
    """What a finished prompt leaves for its own decoding and for forks."""

    last_query: torch.Tensor  # [layer, local_head, head_dim]
    logits: torch.Tensor | None = None  # [vocab] at rank 0


@dataclass(slots=True)
class Segment:
    """A prompt chunk's rows [first, last) among the step's prompt tokens."""

    chunk: PrefillChunk
    state: RowState
    first: int
    last: int
    mask: torch.Tensor
    end: PromptEnd | None


class ModelRunner:
    """The model, its KV cache and the rows of running requests on this rank.

    Every rank runs the same plan; only the tier work inside `KvCache` differs. Nothing is read back from the device
    but the sampled ids.
    """

    def __init__(
        self, model: LlamaModel, cache: KvCache, tp: TpGroup, sampler: Sampler, graphs: DecodeGraphs | None = None
    ) -> None:
        self.model = model
        self.graphs = graphs
        self.cache = cache
        self.tp = tp
        self.sampler = sampler
        self.states: dict[int, RowState] = {}
        self._prompt_ends: dict[int, PromptEnd] = {}
        self.feature_layers: tuple[int, ...] = ()
        """Layers whose entering hidden states a drafter wants."""
        self.features: dict[int, torch.Tensor] = {}
        """Those of the latest step's rows per request id, [T, layers * hidden], the layers side by side."""
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}  # by row, of prompts that are not done

    @torch.inference_mode()
    def run(self, plan: StepPlan, scheduler: Scheduler) -> Sampled:
        """One step: released rows go, admitted ones come, forks start, tokens are computed and sampled.

        Returns tokens for each of `plan.sampled`, the same on every rank; logprobs at rank 0 only.
        """
        for row in plan.released_rows:
            self._prompt_logprobs.pop(row, None)
            if (state := self.states.pop(row, None)) is not None:
                self.cache.release(state)
        for parent_id in plan.dropped_prefixes:
            self._prompt_ends.pop(parent_id, None)
        for request in plan.admitted:
            selection = scheduler.selection(request.sparsity)
            self.states[request.row] = self.cache.admit(request, selection, scheduler.looks_ahead(request))
        for start in plan.starts:
            end = self._prompt_ends[start.parent_id]
            self._begin(start.request, end, start.partial_source)
        if plan.num_tokens == 0 and not plan.sampled:
            return Sampled([], [])
        self.features = {}
        logits = self._forward(plan) if plan.num_tokens else None
        sampled = self._sample(plan, logits)
        self._seal(plan, sampled)
        return sampled

    def stats(self, request: Request) -> RowStats:
        """What an ended request did on this rank; valid until its row is given to another one."""
        state = self.states[request.row]
        self.cache.count_loads(state)
        return state.stats

    def _forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits [rows, vocab] at rank 0: decoded rows, then prompts that end.

        The two pass the model apart, so that a decoded row's bits do not depend on what is prefilled beside it.
        """
        segments: list[Segment] = []
        for chunk in plan.prefill:
            segments.append(self._segment(chunk, segments[-1].last if segments else 0))
        wanted = self._decode(plan) if plan.decode else []
        wanted += self._prefill(segments) if segments else []
        logits = None
        if wanted:
            logits = self.tp.gather_logits(self.model.logits(torch.cat(wanted)), self.model.vocab_ranges)
        self._finish_prompts(plan, segments, logits)
        return logits

    def _decode(self, plan: StepPlan) -> list[torch.Tensor]:
        """Hidden states of the decoded rows but the probes, [rows, hidden]."""
        states: list[RowState] = []
        positions: list[int] = []
        token_ids: list[int] = []
        is_probe: list[bool] = []
        num_rows: dict[int, int] = {}
        for request, drafts, probes in zip(plan.decode, plan.drafts, plan.probes, strict=True):
            tokens = [request.output_ids[-1], *drafts, *probes]
            states += [self.states[request.row]] * len(tokens)
            positions += range(request.num_computed, request.num_computed + len(tokens))
            token_ids += tokens
            is_probe += [False] * (1 + len(drafts)) + [True] * len(probes)
            num_rows[request.request_id] = len(tokens)
        batch = self.cache.prepare(states, positions, is_probe)
        inputs = self._upload(token_ids, positions)
        if self.graphs is None or batch.step is None:
            outputs = self._pass(inputs, lambda layer, q, k, v: self.cache.decode(layer, batch, q, k, v))
        else:
            step = batch.step

            def forward(inputs: Tensors) -> Tensors:
                step.inputs = inputs[2]
                return self._pass(inputs[:2], lambda layer, q, k, v: self.cache.decode(layer, batch, q, k, v))

            outputs = self.graphs.run(step.key, [*inputs, step.inputs], forward)
        hidden = self._keep_features(outputs, num_rows)
        if not any(is_probe):
            return [hidden]
        return [hidden[[row for row, probe in enumerate(is_probe) if not probe]]]

    def _prefill(self, segments: list[Segment]) -> list[torch.Tensor]:
        """Hidden states [1, hidden] of the last token of each prompt that ends."""
        token_ids: list[int] = []
        positions: list[int] = []
        for segment in segments:
            chunk = segment.chunk
            token_ids += chunk.request.spec.prompt_ids[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
        num_rows = {segment.chunk.request.request_id: segment.last - segment.first for segment in segments}
        outputs = self._pass(
            self._upload(token_ids, positions), lambda layer, q, k, v: self._attend(layer, q, k, v, segments)
        )
        hidden = self._keep_features(outputs, num_rows)
        for segment in segments:
            request = segment.chunk.request
            if request.spec.sampling.prompt_logprobs is not None:
                scores = chunk_logprobs(self.model, hidden[segment.first : segment.last], segment.chunk)
                self._prompt_logprobs.setdefault(request.row, []).extend(scores)
        return [hidden[segment.last - 1 : segment.last] for segment in segments if segment.end is not None]

    def _upload(self, token_ids: list[int], positions: list[int]) -> list[torch.Tensor]:
        device = self.model.device
        return [torch.tensor(token_ids, device=device), torch.tensor(positions, device=device)]

    def _pass(self, inputs: Tensors, attend: Attend) -> Tensors:
        """Hidden states [T, hidden] of token ids and positions [T]; then, for a drafter that wants them, those that
        enter its `feature_layers`, side by side.
        """
        features = dict.fromkeys(self.feature_layers, torch.empty(0)) if self.feature_layers else None
        hidden = self.model.forward(inputs[0], inputs[1], attend, features)
        if features is None:
            return [hidden]
        return [hidden, torch.cat([features[layer] for layer in self.feature_layers], dim=-1)]

    def _keep_features(self, outputs: Tensors, num_rows: dict[int, int]) -> torch.Tensor:
        """The hidden states; `num_rows` of each request id, in the order of the rows."""
        if len(outputs) > 1:
            self.features |= zip(num_rows, outputs[1].split(list(num_rows.values())), strict=True)
        return outputs[0]

    def _segment(self, chunk: PrefillChunk, first: int) -> Segment:
        mask = causal_mask(chunk.start, chunk.stop, self.model.dtype, self.model.device)
        arch, shard = self.model.arch, self.model.shard
        end = None
        if chunk.is_last:
            query = torch.empty(
                arch.num_layers, shard.num_heads, arch.head_dim, dtype=self.model.dtype, device=self.model.device
            )
            end = PromptEnd(query)
        last = first + chunk.stop - chunk.start
        return Segment(chunk, self.states[chunk.request.row], first, last, mask, end)

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[Segment]
    ) -> torch.Tensor:
        parts = []
        for segment in segments:
            rows = slice(segment.first, segment.last)
            parts.append(
                self.cache.prefill(layer, segment.state, segment.chunk.start, q[rows], k[rows], v[rows], segment.mask)
            )
            if segment.end is not None:
                segment.end.last_query[layer] = q[segment.last - 1]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish_prompts(self, plan: StepPlan, segments: list[Segment], logits: torch.Tensor | None) -> None:
        ended = [segment for segment in segments if segment.end is not None]
        for index, segment in enumerate(ended):
            request, end = segment.chunk.request, segment.end
            assert end is not None
            if logits is not None:
                end.logits = logits[plan.num_decode_rows + index].clone()
            if not request.spec.hold:
                self._begin(request, end, -1)
            if request.request_id in plan.keep_prefix_of:
                self._prompt_ends[request.request_id] = end

    def _begin(self, request: Request, end: PromptEnd, partial_source: int) -> None:
        state = self.states[request.row]
        self.cache.begin_decode(state, request.num_prompt_tokens, end.last_query, partial_source)

    def _sample(self, plan: StepPlan, logits: torch.Tensor | None) -> Sampled:
        """Sample at rank 0, tell everybody."""
        requests = plan.sampled
        drafts = plan.drafts + [()] * (len(requests) - len(plan.decode))
        message = torch.empty(len(requests), 1 + max(map(len, drafts), default=0), dtype=torch.int64)
        sampled = Sampled([], [])
        if self.tp.rank == 0 and requests:
            holds = [chunk.request.spec.hold for chunk in plan.prefill if chunk.is_last]
            num_rows = plan.num_decode_rows
            keep = [*range(num_rows), *(num_rows + i for i, hold in enumerate(holds) if not hold)]
            rows = [] if logits is None else list(logits[keep])
            for start in plan.starts:
                first_logits = self._prompt_ends[start.parent_id].logits
                assert first_logits is not None
                rows.append(first_logits)
            sampled = self.sampler.sample(torch.stack(rows), requests, drafts)
            self._add_prompt_logprobs(plan, sampled)
            for row, tokens in zip(message, sampled.token_ids, strict=True):
                row[:] = torch.tensor(tokens + [NO_TOKEN] * (len(row) - len(tokens)))
        if requests:
            self.tp.broadcast(message)
        accepted = [[token for token in row if token != NO_TOKEN] for row in message.tolist()]
        return Sampled(accepted, sampled.logprobs, sampled.prompt_logprobs)

    def _add_prompt_logprobs(self, plan: StepPlan, sampled: Sampled) -> None:
        """Rank 0: hand over those of prompts that end here; numbers that are not finite end their request."""
        for request, tokens in zip(plan.sampled, sampled.token_ids, strict=True):
            scores = self._prompt_logprobs.pop(request.row, None)
            if scores is not None:
                sampled.prompt_logprobs[request.request_id] = scores
                if not is_finite(scores):
                    tokens[:] = [-1]

    def _seal(self, plan: StepPlan, sampled: Sampled) -> None:
        """Seal the blocks that this step's committed tokens completed; rejected drafts complete nothing."""
        block_size = self.cache.layout.block_size
        for request, tokens in zip(plan.decode, sampled.token_ids[: len(plan.decode)], strict=True):
            computed = request.num_computed
            for block in range(computed // block_size, (computed + len(tokens)) // block_size):
                self.cache.seal(self.states[request.row], block)
