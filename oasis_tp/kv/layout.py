"""KvLayout and SelectionLayout: the sizes of everything KV, derived once. Pure Python, the same on every rank."""

import math
from dataclasses import dataclass

from oasis_tp.config import SparsityConfig


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """One rank's KV geometry: `num_layers` x `num_kv_heads` (local) heads, blocks of `block_size` tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype_bytes: int

    @property
    def page_bytes(self) -> int:
        """K and V of one block, all layers and local heads; a host block is as large."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype_bytes

    def num_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionLayout:
    """Which blocks a row attends by position, by choice, or not at all (all counts in blocks).

    A row at position p stands in block o = p // block_size. Pinned: blocks 0 .. sink-1 and o-recent .. o. Candidates:
    the blocks between. With `budget` None everything is attended (mode dense). A step may have `num_drafts` rows beyond
    the committed token's, probes among them.
    """

    block_size: int
    sink: int
    recent: int
    budget: int | None
    hot_factor: float
    num_drafts: int = 0

    @classmethod
    def from_config(
        cls, config: SparsityConfig, block_size: int, hot_factor: float, num_drafts: int = 0
    ) -> "SelectionLayout":
        dense = config.attention == "dense"
        return cls(
            block_size=block_size,
            sink=config.sink_blocks,
            recent=ceil_div(config.recent_tokens, block_size),
            budget=None if dense else ceil_div(config.budget_tokens, block_size),
            hot_factor=hot_factor,
            num_drafts=num_drafts,
        )

    def candidates(self, position: int) -> tuple[int, int]:
        """Candidate blocks [first, last) of a row at `position`; empty when everything below it is pinned."""
        block = position // self.block_size
        first = min(self.sink, block)
        return first, max(first, block - self.recent)

    @property
    def pinned(self) -> int:
        """Blocks attended by position alone, the open blocks of a step's rows among them."""
        return self.sink + self.recent + self.num_open

    @property
    def num_open(self) -> int:
        """Blocks that the rows of one step may stand in."""
        return 1 + ceil_div(self.num_drafts, self.block_size)

    def num_pages(self, total_blocks: int, *, host_tier: bool) -> int:
        """Pages a request of `total_blocks` owns for life: R of engine terms, or everything if nothing may leave."""
        if self.budget is None or not host_tier:
            return total_blocks
        hot = math.ceil(round(self.hot_factor * self.budget, 6))  # 70 times 1.1 is 77, not a hair more
        return min(total_blocks, hot + self.pinned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """How many pages and host blocks every rank has: the minimum over ranks."""

    num_pages: int
    num_host_blocks: int
    hot_factor: float


def plan_capacity(
    *,
    layout: KvLayout,
    sparsity: SparsityConfig,
    sketch_block_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    device_bytes: int,
    host_bytes: int,
    num_drafts: int = 0,
    sketch_from_device_bytes: bool,
) -> Capacity:
    """Turn memory into pages and host blocks for one rank.

    `device_bytes` is what pages may take (with `sketch_from_device_bytes`, the sketches of all host blocks come out of
    it too), `host_bytes` what the host tier may take; 0 means no host tier. `sketch_block_bytes` is for all layers and
    local heads. Neither pool grows past what `max_num_seqs` full-length requests can use. Host blocks come in whole
    runs (see kv/blocks.py), and without a host tier they only number the sketches.

    Raises:
        ValueError: not even one full-length request fits; the message names the flags.
    """
    full = layout.num_blocks(max_model_len)
    full_runs = ceil_div(full, RUN_BLOCKS) * RUN_BLOCKS
    page_bytes = max(1, layout.page_bytes)
    useful = max_num_seqs * full_runs
    num_host = min(useful, host_bytes // page_bytes // RUN_BLOCKS * RUN_BLOCKS) if host_bytes else useful
    if host_bytes and num_host < full_runs:
        raise ValueError(
            f"the host tier holds {num_host * layout.block_size} tokens per rank in {_gib(host_bytes)}, but one "
            f"request may need {max_model_len} tokens ({_gib(full_runs * page_bytes)}): raise --host-kv-gb or lower "
            "--max-model-len"
        )
    if sketch_from_device_bytes:
        device_bytes -= num_host * sketch_block_bytes
    num_pages = min(max_num_seqs * full, max(0, device_bytes) // page_bytes)
    least = SelectionLayout.from_config(sparsity, layout.block_size, 1.0, num_drafts)
    if sparsity.hot_factor == "auto":
        per_request = min(full, num_pages // max_num_seqs)
        hot_factor = 1.0 if least.budget is None else max(1.0, (per_request - least.pinned) / least.budget)
    else:
        hot_factor = float(sparsity.hot_factor)
    own = SelectionLayout.from_config(sparsity, layout.block_size, hot_factor, num_drafts)
    need = own.num_pages(full, host_tier=host_bytes > 0)
    if num_pages < need:
        raise ValueError(
            f"device KV holds {num_pages} pages per rank in {_gib(max(0, device_bytes))}, but one request of "
            f"{max_model_len} tokens needs {need} ({_gib(need * page_bytes)}): raise --device-kv-gb, or lower "
            "--max-model-len" + ("" if own.budget is None else ", --budget-tokens or --hot-factor")
        )
    return Capacity(num_pages=num_pages, num_host_blocks=num_host, hot_factor=hot_factor)


RUN_BLOCKS = 16
"""Host space is reserved in runs of this many blocks, so that bulk reads are large and contiguous."""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
