"""Start-up: ranks joined, model loaded, memory planned and agreed on, capacity printed. Collective throughout."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import NUM_PROBES, Config, SketchKind, SparsityConfig
from oasis_tp.draft.drafter import Drafter
from oasis_tp.engine.cuda_graphs import CudaRecorder, DecodeGraphs
from oasis_tp.engine.drafting import make_drafter
from oasis_tp.engine.kv_cache import CacheShape, KvCache
from oasis_tp.engine.memory import GIB, kv_memory, workspace_bytes
from oasis_tp.engine.model_runner import ModelRunner
from oasis_tp.engine.rank_table import rank_table
from oasis_tp.engine.sampler import Sampler
from oasis_tp.engine.scheduler import SchedulerLimits
from oasis_tp.kv.blocks import runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, Capacity, KvLayout, SelectionLayout, plan_capacity
from oasis_tp.kv.residency import Residency
from oasis_tp.models.hub import cache_dir, resolve_model
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.registry import ModelArch, load_arch
from oasis_tp.models.weights import fill_weights, load_weights, weight_bytes
from oasis_tp.nn.ops import CpuOps, Ops, Place, TritonOps
from oasis_tp.sparse.cpu_decode import load_library
from oasis_tp.sparse.sketch_size import sketch_bytes_per_block

T = TypeVar("T")

GRAPH_BYTES = 2**30
"""Set aside on a GPU for recorded steps: their launches, their outputs, and what libraries keep for each."""


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine is made of."""

    runner: ModelRunner
    drafter: Drafter | None
    limits: SchedulerLimits
    model_dir: Path


def start(config: Config, extra_sketches: tuple[SketchKind, ...]) -> Started:
    """Everything before the first step.

    `extra_sketches` are kept beside --sketch, so that requests may choose between them (benchmarks).

    Raises:
        ValueError: a setting, model or machine that cannot work; raised on every rank.
    """
    tp = TpGroup.connect(config.parallel)
    table = rank_table(tp)
    if tp.rank == 0 and tp.size > 1:
        print("\n".join(table), flush=True)
    model_dir, arch, max_model_len = _on_every_rank(tp, lambda: _find_model(config))
    dtype = _choose_dtype(config.model.dtype, arch, tp.device)

    def load() -> LlamaModel:
        model = LlamaModel(arch, tp, Place(dtype, tp.device, backend.ops()), max_model_len=max_model_len)
        if config.model.load_format == "dummy":
            fill_weights(model, config.model.seed)
        else:
            load_weights(model, model_dir)
        return model

    backend = _on_every_rank(tp, lambda: _choose_backend(config.model.attention_backend, tp, dtype, arch.head_dim))
    with torch.inference_mode():
        model = _on_every_rank(tp, load)
        # Before memory is planned: what it takes is no longer there.
        drafter = _on_every_rank(tp, lambda: [make_drafter(config, model, model_dir, max_model_len)])[0]
        shape = _on_every_rank(tp, lambda: _plan_memory(config, model, max_model_len, extra_sketches, backend))
        num_ahead = config.speculation.num_drafts + _num_probes(config, tp)
        shape = _agree(tp, shape, config.sparsity, num_ahead)
        cache = _on_every_rank(tp, lambda: backend.make_cache(shape, dtype, tp.device))
    limits = SchedulerLimits(
        num_pages=shape.capacity.num_pages,
        num_host_blocks=shape.capacity.num_host_blocks,
        host_tier=shape.host_tier,
        hot_factor=shape.capacity.hot_factor,
        block_size=shape.layout.block_size,
        max_model_len=max_model_len,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=config.batching.max_num_batched_tokens,
        max_slots=shape.max_slots,
        eos_token_ids=frozenset(arch.eos_token_ids),
        speculation=config.speculation,
        num_probes=_num_probes(config, tp),
        on_cuda=tp.device.type == "cuda",
        sparsity=config.sparsity,
    )
    _print_capacity(config.sparsity, num_ahead, model, cache, shape, drafter)
    runner = ModelRunner(model, cache, tp, Sampler(config.model.seed), _graphs(config, tp, backend))
    runner.feature_layers = drafter.feature_layers if drafter else ()
    return Started(runner, drafter, limits, model_dir)


def _num_probes(config: Config, tp: TpGroup) -> int:
    """Drafted tokens of a step that only look ahead; 0 where nobody drafts or nothing is brought in ahead."""
    looks_ahead = config.sparsity.looks_ahead(tp.device.type == "cuda")
    return NUM_PROBES if looks_ahead and config.speculation.num_drafts else 0


def _on_every_rank(tp: TpGroup, action: Callable[[], T]) -> T:
    """Run a step of the start; if the user's settings fail on any rank, every rank stops together."""
    result, error = None, None
    try:
        result = action()
    except ValueError as problem:
        error = problem
    failed = tp.max_over_ranks([0 if error is None else tp.size - tp.rank])[0]
    if error is not None:
        raise error
    if failed:
        raise ValueError(f"rank {tp.size - failed} could not start; its own message says why")
    assert result is not None
    return result


@dataclass(frozen=True, slots=True)
class Backend:
    """What decodes: compiled code for the CPU, Triton kernels, or neither of them."""

    library: ctypes.CDLL | None = None
    use_triton: bool = False

    def ops(self) -> Ops:
        if self.library is not None:
            return CpuOps(self.library)
        return TritonOps() if self.use_triton else Ops()

    def make_cache(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> KvCache:
        return KvCache(shape, dtype, device, self.library, use_triton=self.use_triton)


def _choose_backend(name: str, tp: TpGroup, dtype: torch.dtype, head_dim: int) -> Backend:
    """
    Raises:
        ValueError: the one that was asked for cannot work here.
    """
    on_cuda = tp.device.type == "cuda"
    fits = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    if name == "triton" and not fits:
        raise ValueError(f"--attention-backend triton: the model's head_dim is {head_dim}, no power of two from 16 on")
    if name == "triton" and not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--attention-backend triton runs on CUDA (on a CPU for tests only, with TRITON_INTERPRET=1)")
    if name == "triton" or (name == "auto" and on_cuda and fits):
        return Backend(use_triton=True)
    compiles = not on_cuda and dtype == torch.float32
    if name == "cpp" and not compiles:
        raise ValueError(f"--attention-backend cpp is for float32 on a CPU; this is {dtype} on {tp.device.type}")
    if name == "torch" or not compiles:
        return Backend()
    why = "no C++ compiler is found"
    try:
        library = load_library(cache_dir())
    except ValueError as error:
        library, why = None, str(error)
    if library is None and name == "cpp":
        raise ValueError(f"--attention-backend cpp: {why}")
    if library is None and tp.rank == 0:
        print(f"oasis_tp: {why}; decoding works, several times slower than with one", flush=True)
    return Backend(library)


def _graphs(config: Config, tp: TpGroup, backend: Backend) -> DecodeGraphs | None:
    """Where every launch of a step can be captured: collectives that pass the host cannot."""
    captures = backend.use_triton and tp.device.type == "cuda" and tp.collective in ("none", "nccl")
    return DecodeGraphs(CudaRecorder()) if captures and not config.model.enforce_eager else None


def _find_model(config: Config) -> tuple[Path, ModelArch, int]:
    model_dir = resolve_model(config.model.model, config.model.revision)
    arch = load_arch(model_dir, config.model.max_model_len)
    window = arch.max_position_embeddings
    wanted = config.model.max_model_len or window
    if wanted > window:
        raise ValueError(f"--max-model-len {wanted}: the model's window is {window} tokens; use at most that")
    return model_dir, arch, wanted


def _choose_dtype(name: str, arch: ModelArch, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = arch.torch_dtype if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _plan_memory(
    config: Config, model: LlamaModel, max_model_len: int, extra: tuple[SketchKind, ...], backend: Backend
) -> CacheShape:
    arch, tp, sparsity = model.arch, model.tp, config.sparsity
    batching = config.batching
    kinds = tuple(dict.fromkeys(((sparsity.sketch,) if sparsity.attention != "dense" else ()) + extra))
    if kinds and tp.size > arch.num_kv_heads:
        raise ValueError(
            f"--attention {sparsity.attention}: {tp.size} ranks share {arch.num_kv_heads} KV heads, and ranks that "
            f"share a head do not select together yet; use --attention dense or at most {arch.num_kv_heads} ranks"
        )
    layout = KvLayout(
        num_layers=arch.num_layers,
        num_kv_heads=model.shard.num_kv_heads,
        head_dim=arch.head_dim,
        block_size=config.memory.block_size,
        dtype_bytes=model.dtype.itemsize,
    )
    per_head = sum(sketch_bytes_per_block(kind, arch.head_dim, layout.block_size) for kind in kinds)
    full = layout.num_blocks(max_model_len)
    tables = Residency.num_bytes(
        num_layers=arch.num_layers,
        num_rows=batching.max_num_seqs,
        num_heads=layout.num_kv_heads,
        max_slots=full,
        max_blocks=full,
    )
    widest = max(arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim)
    activations = 8 * batching.max_num_batched_tokens * widest * model.dtype.itemsize
    prompt = full * layout.page_bytes // layout.num_layers
    num_ahead = config.speculation.num_drafts + _num_probes(config, tp)
    kernels = 0
    if backend.use_triton:
        group = model.shard.num_heads // model.shard.num_kv_heads
        kernels = workspace_bytes(batching.max_num_seqs * (1 + num_ahead), layout, group, full)
        kernels += GRAPH_BYTES if tp.device.type == "cuda" else 0
    device_bytes, host_bytes = kv_memory(config.memory, tp, tables + activations + prompt + kernels)
    on_cpu = tp.device.type == "cpu"
    capacity = plan_capacity(
        layout=layout,
        sparsity=sparsity,
        sketch_block_bytes=per_head * layout.num_layers * layout.num_kv_heads,
        max_model_len=max_model_len,
        max_num_seqs=batching.max_num_seqs,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        num_drafts=num_ahead,
        sketch_from_device_bytes=not on_cpu and config.memory.device_kv_gb is None,
    )
    return CacheShape(
        layout=layout,
        capacity=capacity,
        host_tier=host_bytes > 0,
        max_model_len=max_model_len,
        max_num_seqs=batching.max_num_seqs,
        max_slots=full,
        sketches=kinds,
        group=model.shard.num_heads // model.shard.num_kv_heads,
    )


def _agree(tp: TpGroup, shape: CacheShape, sparsity: SparsityConfig, num_drafts: int) -> CacheShape:
    """The least capacity of any rank becomes everybody's."""
    scale = 2**20
    mine = shape.capacity
    host = int(shape.host_tier)
    pages, blocks, factor, host = tp.min_over_ranks(
        [mine.num_pages, mine.num_host_blocks, int(mine.hot_factor * scale), host]
    )
    hot_factor = factor / scale if sparsity.hot_factor == "auto" else mine.hot_factor  # asked for: kept exactly
    capacity = Capacity(num_pages=pages, num_host_blocks=blocks, hot_factor=hot_factor)
    selection = SelectionLayout.from_config(sparsity, shape.layout.block_size, capacity.hot_factor, num_drafts)
    slots = selection.num_pages(shape.layout.num_blocks(shape.max_model_len), host_tier=bool(host))
    return replace(shape, capacity=capacity, host_tier=bool(host), max_slots=slots)


def _print_capacity(
    sparsity: SparsityConfig,
    num_drafts: int,
    model: LlamaModel,
    cache: KvCache,
    shape: CacheShape,
    drafter: Drafter | None,
) -> None:
    """One line per rank and what fits, printed by rank 0."""
    tp, capacity = model.tp, shape.capacity
    sketch = sum(tensor.nbytes for kind in cache.sketches.values() for tensor in kind.tensors())
    host = cache.transfers.host.kv.nbytes if cache.transfers else 0
    figures = torch.zeros(tp.size, 5, dtype=torch.float64)
    pages = capacity.num_pages * shape.layout.page_bytes
    drafting = drafter.device_bytes if drafter else 0
    figures[tp.rank] = torch.tensor([weight_bytes(model), pages, sketch, host, drafting], dtype=torch.float64) / GIB
    tp.sum_over_ranks(figures)
    if tp.rank != 0:
        return
    for rank, (weights, device_kv, sketches, host_kv, drafts) in enumerate(figures.tolist()):
        drafter_figure = f", drafter {drafts:.2f} GiB (weights and KV)" if drafting else ""
        print(
            f"oasis_tp rank {rank}: weights {weights:.2f} GiB, device KV {device_kv:.2f} GiB "
            f"({capacity.num_pages} pages), sketch {sketches:.3f} GiB, host KV {host_kv:.2f} GiB" + drafter_figure,
            flush=True,
        )
    full = shape.layout.num_blocks(shape.max_model_len)
    selection = SelectionLayout.from_config(sparsity, shape.layout.block_size, capacity.hot_factor, num_drafts)
    own = selection.num_pages(full, host_tier=shape.host_tier)
    fit = min(capacity.num_pages // own, capacity.num_host_blocks // (runs_for(full) * RUN_BLOCKS), shape.max_num_seqs)
    factor = "" if selection.budget is None else f", hot factor {selection.hot_factor:.3g}"
    print(
        f"oasis_tp: tp {tp.size} (all-reduce: {tp.collective}), {sparsity.attention}{factor}; {own} of {full} blocks "
        f"of a {shape.max_model_len}-token request stay on the device; {fit} such request(s) fit at once",
        flush=True,
    )
