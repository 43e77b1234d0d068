"""What lookahead achieves, watched from outside the engine: per step and layer, which blocks the next row selects and
which of them are on the device when its query is known."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from oasis_tp.engine.decode_batch import DecodeBatch, DecodeRow
from oasis_tp.engine.kv_cache import KvCache
from oasis_tp.engine.model_runner import ModelRunner
from oasis_tp.engine.plan import StepPlan
from oasis_tp.engine.sampler import Sampled
from oasis_tp.engine.scheduler import Scheduler
from oasis_tp.sparse.cpu_decode import CpuStep
from oasis_tp.sparse.select import select_blocks
from oasis_tp.sparse.sketch import Sketch, top_blocks

FIGURES = {
    "selected": "blocks, pinned ones aside",
    "resident": "those of them that were on the device",
    "mass": "what exact attention gives the selected blocks",
    "resident_mass": "what it gives those on the device",
    "same_as_previous": "selected blocks that the row one token earlier selects too",
    "same_as_draft": "the same of the row that the step before had at this position, for a drafted token",
}
"""Of a step's first row, for which the step before could look ahead; summed over local KV heads. Mass is a share of the
row's attention, averaged over a KV head's query heads."""


@dataclass(slots=True)
class Step:
    """One step of a request. `tokens`: the committed one, drafts, probes, a row each; `position` is the first's."""

    position: int
    tokens: tuple[int, ...]
    figures: dict[str, torch.Tensor]  # each of FIGURES: [layer] float64
    choices: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By row position: per layer [head, budget] int64, the blocks that the row selects. Kept for two steps."""
    before: "Step | None" = None

    @property
    def draft(self) -> int | None:
        """The token that the step before drafted for the first row's position; None if it drafted none."""
        if self.before is None:
            return None
        offset = self.position - self.before.position
        return self.before.tokens[offset] if offset < len(self.before.tokens) else None

    @property
    def selects(self) -> bool:
        return bool(self.figures["selected"].any())

    @property
    def follows(self) -> bool:
        """The step before is known, and both select: lookahead had something to do."""
        return self.before is not None and self.selects and self.before.selects


class Watch:
    """Notes the steps of requests that run alone, one after the other. Steps are slower while it looks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.cache: KvCache = runner.cache
        self.steps: list[Step] = []
        self._run, self._decode = runner.run, runner.cache.decode

    @contextmanager
    def on(self) -> Iterator["Watch"]:
        """No step is replayed meanwhile: what is watched must be called."""
        with (
            patch.object(self.runner, "run", self._watched_run),
            patch.object(self.cache, "decode", self._watch),
            patch.object(self.runner, "graphs", None),
        ):
            yield self

    def _watched_run(self, plan: StepPlan, scheduler: Scheduler) -> Sampled:
        assert len(plan.decode) <= 1, "requests are watched one at a time"
        for request, drafts, probes in zip(plan.decode, plan.drafts, plan.probes, strict=True):
            before = self.steps[-1] if self.steps else None
            # A request's first step follows none.
            if before is not None and request.num_computed == request.num_prompt_tokens:
                before = None
            figures = {name: torch.zeros(self.cache.layout.num_layers, dtype=torch.float64) for name in FIGURES}
            tokens = (request.output_ids[-1], *drafts, *probes)
            self.steps.append(Step(request.num_computed, tokens, figures, before=before))
            if before is not None and before.before is not None:
                before.before.choices.clear()
        return self._run(plan, scheduler)

    def _watch(self, layer: int, batch: DecodeBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first = batch.rows[0]
        here = self._on_device(layer, first)
        out = self._decode(layer, batch, q, k, v)
        step = self.steps[-1]
        for index, row in enumerate(batch.rows):
            if row.selects:
                step.choices.setdefault(row.position, []).append(self._choice(layer, batch, index, q[index]))
        if first.selects:
            self._note(layer, step, first, here, q[0])
        return out

    def _on_device(self, layer: int, row: DecodeRow) -> torch.Tensor:
        """Which of the request's blocks are on the device, [head, blocks] bool; those in flight are not."""
        if row.state.resident:
            return torch.ones(self.cache.layout.num_kv_heads, row.block + 1, dtype=torch.bool)
        assert self.cache.transfers is not None
        slots = self.cache.residency.slot_of_block[layer, row.state.row].long()
        fetched = self.cache.residency.fetched[layer, row.state.row].gather(1, slots.clamp(min=0))
        return (slots >= 0) & (fetched != self.cache.transfers.in_flight(layer))

    def _choice(self, layer: int, batch: DecodeBatch, index: int, q: torch.Tensor) -> torch.Tensor:
        """Blocks [head, budget] that a row selects in the layer just run."""
        row = batch.rows[index]
        state, (first, last) = row.state, row.candidates
        assert state.sketch is not None and state.selection.budget is not None
        heads = self.cache.layout.num_kv_heads
        if isinstance(batch.step, CpuStep):
            estimate = batch.step.estimate[index, :, : self.cache.group * (last - first)]
            scores = Sketch.group_scores(estimate.view(heads, self.cache.group, last - first))
            return first + top_blocks(scores, state.selection.budget)
        grouped = q.view(heads, -1, self.cache.layout.head_dim)
        return (
            first
            + select_blocks(state.sketch, layer, state.host_blocks[first:last], grouped, state.selection.budget).chosen
        )

    def _note(self, layer: int, step: Step, row: DecodeRow, here: torch.Tensor, q: torch.Tensor) -> None:
        chosen = step.choices[row.position][layer]
        resident = here.gather(1, chosen)
        mass = self._mass(layer, row, chosen, q)
        figures = step.figures
        figures["selected"][layer] = chosen.numel()
        figures["resident"][layer] = resident.sum()
        figures["mass"][layer] = mass.sum()
        figures["resident_mass"][layer] = mass[resident].sum()
        if step.before is not None:
            for name, position in (("same_as_previous", row.position - 1), ("same_as_draft", row.position)):
                if position in step.before.choices:
                    figures[name][layer] = num_shared(chosen, step.before.choices[position][layer])

    def _mass(self, layer: int, row: DecodeRow, chosen: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Share of the row's exact attention that goes to each of its selected blocks: [head, budget]."""
        cache, state = self.cache, row.state
        grouped = q.view(cache.layout.num_kv_heads, -1, cache.layout.head_dim)
        first, last = row.candidates
        pinned = torch.tensor([*range(first), *range(last, row.block + 1)], device=q.device)
        pinned = pinned.expand(cache.layout.num_kv_heads, -1)
        slots = pinned if state.resident else cache.residency.lookup(layer, state.row, pinned)
        keys, _ = cache.pool.gather(layer, state.pages[slots])
        left_out = (pinned.shape[1] + chosen.shape[1]) * cache.layout.block_size - row.num_attended_tokens
        keys = keys[:, : keys.shape[1] - left_out]
        heads = torch.arange(chosen.shape[0])[:, None]
        assert cache.transfers is not None
        home = cache.transfers.host.kv[layer, heads, state.host_blocks_cpu[chosen.cpu()], 0].to(keys.device)
        of_chosen = torch.einsum("hgd,hbtd->hgbt", grouped, home)
        of_pinned = grouped @ keys.mT
        logits = torch.cat([of_chosen.flatten(2), of_pinned], dim=2) * cache.layout.head_dim**-0.5
        shares = logits.softmax(-1)[..., : of_chosen[0, 0].numel()]
        return shares.unflatten(-1, of_chosen.shape[2:]).sum(-1).mean(1)


def num_shared(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many blocks [head, n] are in both, each of a head's own."""
    return int((ours[:, :, None] == theirs[:, None, :]).sum())


def share(steps: Sequence[Step], part: str, whole: str) -> float | None:
    """One figure of the steps over another: per layer over all steps, then the mean over layers; None of nothing."""
    values = by_layer(steps, part, whole)
    return None if values is None else float(values.mean())


def by_layer(steps: Sequence[Step], part: str, whole: str) -> torch.Tensor | None:
    """The same before the mean over layers, [layer]."""
    if not steps:
        return None
    parts, wholes = (torch.stack([step.figures[name] for step in steps]).sum(0) for name in (part, whole))
    return torch.where(wholes > 0, parts / wholes, 1.0)
