"""Prompts longer than what is computed of them, or than the model's window: their first keys and values come again.

Only for timing a decode step. Each repetition's keys are turned to their own positions, so scores are as peaked as a
real text's; what the model makes of such a prompt means nothing.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from oasis_tp.engine.model_runner import ModelRunner, Segment
from oasis_tp.engine.plan import PrefillChunk, StepPlan
from oasis_tp.models.registry import load_arch
from oasis_tp.nn.rotary import apply_rotary

CERTAIN = 100.0
"""A logit beside which zeros have no chance."""


@contextmanager
def stretched(model_dir: Path, num_tokens: int) -> Iterator[Path]:
    """A directory with the same model whose window is at least that many tokens; the model's own if that is enough."""
    if load_arch(model_dir, None).max_position_embeddings >= num_tokens:
        yield model_dir
        return
    with TemporaryDirectory(prefix="oasis_tp-") as name:
        target = Path(name)
        for path in model_dir.iterdir():
            (target / path.name).symlink_to(path.resolve())
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_tokens}))
        yield target


class RepeatingRunner(ModelRunner):
    """Computes a prompt's first `period` tokens, and fills every chunk after them with what those tokens left."""

    def __init__(self, plain: ModelRunner, period: int) -> None:
        """`period`: tokens; prompt chunks must begin there."""
        super().__init__(plain.model, plain.cache, plain.tp, plain.sampler, plain.graphs)
        self.period = period
        arch, shard = self.model.arch, self.model.shard
        self._last_query = torch.zeros(
            arch.num_layers, shard.num_heads, arch.head_dim, dtype=self.model.dtype, device=self.model.device
        )

    def _forward(self, plan: StepPlan) -> torch.Tensor | None:
        repeated = [chunk.start >= self.period for chunk in plan.prefill]
        if not any(repeated):
            return super()._forward(plan)
        assert all(repeated) and not plan.decode, "a repeated prompt is filled in by itself"
        segments = []
        for chunk in plan.prefill:
            self._repeat(chunk)
            segment = self._segment(chunk, 0)
            if segment.end is not None:
                shift = torch.tensor([chunk.stop - self.period], device=self.model.device)
                segment.end.last_query.copy_(self._turned(self._last_query, shift))
            segments.append(segment)
        logits = None
        if self.tp.rank == 0:  # the first token is the one that the repetition has there
            ends = [chunk for chunk in plan.prefill if chunk.is_last]
            logits = torch.zeros(len(ends), self.model.arch.vocab_size, device=self.model.device)
            for row, chunk in zip(logits, ends, strict=True):
                row[chunk.request.spec.prompt_ids[chunk.stop % self.period]] = CERTAIN
        self._finish_prompts(plan, segments, logits)
        return logits

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[Segment]
    ) -> torch.Tensor:
        for segment in segments:
            if segment.chunk.stop == self.period:
                self._last_query[layer] = q[segment.last - 1]
        return super()._attend(layer, q, k, v, segments)

    def _repeat(self, chunk: PrefillChunk) -> None:
        """Give a chunk the keys, turned on, and the values of the tokens whole periods before it."""
        state, cache = self.states[chunk.request.row], self.cache
        assert cache.transfers is not None
        block, heads, dim = cache.layout.block_size, cache.layout.num_kv_heads, cache.layout.head_dim
        first, last, full = chunk.start // block, cache.layout.num_blocks(chunk.stop), chunk.stop // block
        blocks = torch.arange(first, last)
        source = state.host_blocks_cpu[blocks % (self.period // block)]
        k, v = torch.empty(2, heads, (last - first) * block, dim, dtype=self.model.dtype, device=self.model.device)
        shift = (blocks // (self.period // block) * self.period).repeat_interleave(block).to(self.model.device)
        for layer in range(cache.layout.num_layers):
            cache.transfers.read(layer, source, k, v).wait()
            turned = self._turned(k.transpose(0, 1), shift).transpose(0, 1)
            keys, values = (x.reshape(heads, last - first, block, dim) for x in (turned, v))
            cache.transfers.store_computed(layer, state.host_blocks_cpu[first:last], keys, values).wait()
            for sketch in cache.sketches.values():
                ids = state.host_blocks[first:full]
                sketch.seal(layer, ids, *(x[:, : full - first].transpose(0, 1) for x in (keys, values)))

    def _turned(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Roped x [T, head, D] as it would be `shift` [T or 1] positions later; a table's scale is in x already."""
        cos, sin = self.model.rotary.at(shift)
        scale = self.model.rotary.cos[0, 0]  # the cosine of position 0
        return apply_rotary(x, cos / scale, sin / scale)
