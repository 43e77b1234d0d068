"""What a finished request's tiers did, and the engine's counters."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from oasis_tp.engine.decode_batch import RowStats
from oasis_tp.engine.model_runner import ModelRunner
from oasis_tp.request import KvStats, Request
from oasis_tp.sharding import head_shards
from oasis_tp.sparse.sketch_size import sketch_bytes_per_block


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot after a step. Counters only grow; block and draft counters are summed over ranks as requests end."""

    num_running: int = 0
    num_waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    """Runs of tokens that a drafter proposed."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    selected_blocks: int = 0
    missed_blocks: int = 0
    corrupted_requests: int = 0
    """Requests that ended because their numbers were not finite."""
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    exposed_wait_ns: int = 0
    """What this rank's compute waited for background copies (on a CPU; on CUDA a stream waits)."""
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    steps: int = 0
    last_step_time: float = field(default_factory=time.monotonic)
    dead: str | None = None


SUMMED = (
    *("draft_tokens", "accepted_tokens", "selected_blocks", "missed_blocks"),
    *("prefetch_used", "prefetch_late", "prefetch_wasted"),
)
"""Counters that requests leave when they end."""


def add_ended(stats: EngineStats, ended: Sequence[KvStats]) -> EngineStats:
    """The counters with those of requests that ended."""
    return replace(stats, **{name: getattr(stats, name) + sum(getattr(kv, name) for kv in ended) for name in SUMMED})


def kv_stats(runner: ModelRunner, ended: list[Request]) -> list[KvStats]:
    """Tier statistics of the requests that ended in this step, summed over ranks.

    Collective when there are any: every rank knows alike who ended.
    """
    if not ended:
        return []
    local = [runner.stats(request) for request in ended]
    totals = torch.tensor(
        [[float(s.missed_mass), s.missed_mass_count, s.selected_blocks, *s.counts.tolist()] for s in local],
        dtype=torch.float64,
    )
    runner.tp.sum_over_ranks(totals)
    return [_kv_stats(runner, *item) for item in zip(ended, local, totals.tolist(), strict=True)]


def _kv_stats(runner: ModelRunner, request: Request, stats: RowStats, totals: list[float]) -> KvStats:
    missed_mass, mass_count, selected, missed, ordered, used, late = totals
    layout, arch = runner.cache.layout, runner.model.arch
    # Ranks that share a KV head each hold it, and it counts for each.
    num_heads = sum(shard.num_kv_heads for shard in head_shards(arch.num_heads, arch.num_kv_heads, runner.tp.size))
    page_bytes = replace(layout, num_kv_heads=num_heads).page_bytes
    num_blocks = layout.num_blocks(request.num_tokens)
    sketch_bytes = 0
    if request.sparsity.attention != "dense":
        per_head = sketch_bytes_per_block(request.sparsity.sketch, layout.head_dim, layout.block_size)
        sketch_bytes = num_blocks * layout.num_layers * num_heads * per_head
    return KvStats(
        mode=request.sparsity.attention,
        budget_tokens=request.sparsity.budget_tokens,
        context_tokens=request.num_tokens,
        hot_kv_bytes=len(request.pages) * page_bytes,
        sketch_bytes=sketch_bytes,
        host_kv_bytes=num_blocks * page_bytes if runner.cache.transfers else 0,
        dense_kv_bytes=num_blocks * page_bytes,
        selected_blocks=int(selected),
        missed_blocks=int(missed),
        prefetch_used=int(used),
        prefetch_late=int(late),
        prefetch_wasted=int(ordered - used - late),
        hit_rate=1.0 - missed / selected if selected else None,
        missed_mass=missed_mass / mass_count if mass_count else None,
        draft_tokens=request.num_draft_tokens,
        accepted_tokens=request.num_accepted_tokens,
        attended_share=stats.attended_tokens / stats.context_tokens if stats.context_tokens else 1.0,
    )
