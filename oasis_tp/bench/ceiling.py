"""The floor under a decode step's time: the bytes it must read, over the memory bandwidth measured here."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import SparsityConfig
from oasis_tp.kv.layout import KvLayout, SelectionLayout
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.weights import weight_bytes
from oasis_tp.sparse.sketch_size import sketch_bytes_per_block


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """What one decode step must read, over all ranks."""

    weights: int
    kv: int
    sketch: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.sketch


def step_bytes(weights: int, layout: KvLayout, sparsity: SparsityConfig, context: int, batch: int) -> StepBytes:
    """Weights once; per request its pinned and selected KV, and the sketch of every candidate.

    `layout` is the whole model's, `weights` what a step reads of them.
    """
    selection = SelectionLayout.from_config(sparsity, layout.block_size, 1.0)
    first, last = selection.candidates(context - 1)
    attended, scanned = layout.num_blocks(context), 0
    if selection.budget is not None and last - first > selection.budget:
        attended, scanned = selection.pinned + selection.budget, last - first
    sketch = layout.num_layers * layout.num_kv_heads
    sketch *= sketch_bytes_per_block(sparsity.sketch, layout.head_dim, layout.block_size)
    return StepBytes(weights=weights, kv=batch * attended * layout.page_bytes, sketch=batch * scanned * sketch)


def read_weight_bytes(model: LlamaModel) -> int:
    """Bytes of all ranks' weights that a decode step reads: an embedding that is not the head is only looked up in."""
    local = weight_bytes(model) - (0 if model.head is model.embedding else model.embedding.weight.nbytes)
    return int(model.tp.sum_over_ranks(torch.tensor([local], dtype=torch.float64)))


def bytes_per_second(tp: TpGroup) -> float:
    """Memory read bandwidth of all ranks reading at once: the best of eight sums over 512 MiB each."""
    data = torch.ones(2**27, dtype=torch.float32, device=tp.device)
    nanoseconds = []
    for _ in range(8):
        tp.barrier()
        nanoseconds.append(int(timed(data.sum, tp.device) * 1e9))
    return tp.size * data.nbytes * 1e9 / min(tp.max_over_ranks(nanoseconds))


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds that `action` takes with everything it launched."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def seconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median time of `run` on a GPU, with what it launched done."""
    for _ in range(3):
        run()
    return median(timed(run, torch.device("cuda")) for _ in range(rounds))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
