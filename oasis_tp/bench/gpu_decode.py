"""Decode of a whole model with random weights, dense beside sparse, through the Triton kernels.

On a GPU a model of Llama-3.1-8B's shape; on a CPU a tiny one in triton's interpreter, whose times mean nothing.
Prompts are random tokens of which the first few thousand are computed; their KV comes again for the rest
(bench/long_prompt.py). A batch is so many forks of a few such prompts, each with pages of its own. The prompts are so
many that a layer's sketches of them are larger than the GPU's cache, as those of different requests would be. The
timed steps stay within one block, so none of them seals one.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from oasis_tp.bench.ceiling import bytes_per_second, read_weight_bytes, step_bytes
from oasis_tp.bench.decode_report import table
from oasis_tp.bench.forks import WARM_STEPS, Decoded, Forks
from oasis_tp.bench.long_prompt import RepeatingRunner
from oasis_tp.config import AttentionMode, SparsityConfig
from oasis_tp.engine.cuda_graphs import CudaRecorder, DecodeGraphs
from oasis_tp.engine.engine import Engine
from oasis_tp.engine.memory import GIB
from oasis_tp.engine.startup import start
from oasis_tp.kv.blocks import runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, KvLayout
from oasis_tp.llm import make_config
from oasis_tp.request import RequestSpec
from oasis_tp.sparse.sketch_size import sketch_bytes_per_block

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 311,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is timed on a kind of device."""

    model: dict[str, Any]
    sparsity: SparsityConfig
    rows: dict[int, tuple[tuple[AttentionMode, int], ...]]
    """Context in tokens -> mode and batch."""
    num_prompts: dict[int, int]
    """Context -> prompts that its batches are forks of."""
    prefill_tokens: int
    chunk_tokens: int
    steps: int


SHAPES = {
    "cuda": Shape(
        model=LLAMA_8B,
        sparsity=SparsityConfig(budget_tokens=1024, hot_factor=2.0),
        rows={
            16384: (
                *(("resolve", 1), ("resolve", 16), ("resolve", 64), ("paper", 16)),
                *(("dense", 1), ("dense", 16), ("dense", 64)),
            ),
            131072: (("resolve", 1), ("resolve", 4), ("dense", 1), ("dense", 4)),
        },
        num_prompts={16384: 8, 131072: 1},
        prefill_tokens=2048,
        chunk_tokens=1024,
        steps=10,
    ),
    "cpu": Shape(
        model=TINY,
        sparsity=SparsityConfig(budget_tokens=64, recent_tokens=32, hot_factor=2.0, prefetch="on"),
        rows={320: (("resolve", 1), ("paper", 1), ("dense", 2))},
        num_prompts={320: 2},
        prefill_tokens=128,
        chunk_tokens=64,
        steps=1,
    ),
}


def time_model(device: torch.device, ends: float = float("inf"), shape: Shape | None = None) -> dict[str, Any]:
    """{"gb_per_s": ..., "rows": [...], "not_measured": [...]}: a line is printed as soon as its row is known.

    `ends`: time.monotonic() after which no further row begins.

    Raises:
        ValueError: the machine has too little memory.
        RuntimeError: the model's output was not finite.
    """
    shape = shape or SHAPES[device.type]
    rows: list[dict[str, Any]] = []
    not_measured: list[str] = []
    with TemporaryDirectory(prefix="oasis_tp-") as name:
        (Path(name) / "config.json").write_text(json.dumps(shape.model))
        engine = _start(Path(name), shape, device)
    ids = torch.randint(3, engine.vocab_size, (shape.prefill_tokens,), generator=torch.Generator().manual_seed(0))
    forks = Forks(engine, ids.tolist(), temperature=0.0)  # a draw of every row's own would be timed as well
    bandwidth = bytes_per_second(engine.tp)
    for context, asked in shape.rows.items():
        num_new = 1 + WARM_STEPS + shape.steps
        num_held = 0 if time.monotonic() > ends else shape.num_prompts[context]
        held = [forks.hold(context - num_new) for _ in range(num_held)]
        for mode, batch in asked:
            if time.monotonic() > ends:
                not_measured.append(f"{mode}, context {context}, batch {batch}: out of time")
                continue
            rows.append(_row(forks, held, replace(shape.sparsity, attention=mode), context, batch, shape, bandwidth))
            print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        for prompt in held:
            forks.release(prompt)
    engine.check_integrity()
    engine.close()
    return {"gb_per_s": round(bandwidth / 1e9, 1), "rows": rows, "not_measured": not_measured}


def _start(model_dir: Path, shape: Shape, device: torch.device) -> Engine:
    longest, widest = max(shape.rows), max(batch for asked in shape.rows.values() for _, batch in asked)
    model = shape.model
    on_cuda = device.type == "cuda"
    layout = KvLayout(
        num_layers=model["num_hidden_layers"],
        num_kv_heads=model["num_key_value_heads"],
        head_dim=model["head_dim"],
        block_size=16,
        dtype_bytes=2 if on_cuda else 4,
    )
    # The prompts, and a run for every fork's own end; a run more for what rounding takes.
    prompts = max(count * runs_for(layout.num_blocks(context)) for context, count in shape.num_prompts.items())
    host_blocks = (prompts + 2 * widest + 1) * RUN_BLOCKS
    memory: dict[str, Any] = {"host_kv_gb": host_blocks * layout.page_bytes / GIB}
    if not on_cuda:
        memory["device_kv_gb"] = widest * (layout.num_blocks(longest) + 1) * layout.page_bytes / GIB
    config = make_config(
        model=str(model_dir),
        load_format="dummy",
        device=device.type,
        max_model_len=longest,
        max_num_seqs=widest + max(shape.num_prompts.values()),
        max_num_batched_tokens=max(shape.chunk_tokens, 16),
        budget_tokens=shape.sparsity.budget_tokens,
        recent_tokens=shape.sparsity.recent_tokens,
        hot_factor=shape.sparsity.hot_factor,
        prefetch=shape.sparsity.prefetch,
        attention_backend="triton",
        **memory,
    )
    started = start(config, ("2bit", "minmax"))
    return Engine(config, replace(started, runner=RepeatingRunner(started.runner, shape.prefill_tokens)))


def _row(
    forks: Forks,
    held: list[RequestSpec],
    sparsity: SparsityConfig,
    context: int,
    batch: int,
    shape: Shape,
    bandwidth: float,
) -> dict[str, Any]:
    """One mode at a context and batch, or at the largest batch that the device holds if that is less."""
    engine, runner = forks.engine, forks.engine.runner
    layout = runner.cache.layout
    blocks = layout.num_blocks(context)
    own = engine.scheduler.selection(sparsity).num_pages(blocks, host_tier=True)
    batch = min(batch, engine.scheduler.pages.num_pages // own)
    decoded = forks.decode(held, sparsity, batch, shape.steps)
    copies_ms = None
    if sparsity.attention != "dense":
        with copies_left_out(engine):
            copies_ms = _step_ms(decoded) - _step_ms(forks.decode(held, sparsity, batch, shape.steps))
    # As if each had a prompt of its own, in the memory that pages and sketches have together.
    kept = runner.cache.sketches.values()
    room = runner.cache.pool.kv.nbytes + sum(tensor.nbytes for sketch in kept for tensor in sketch.tensors())
    sketch_bytes = 0
    if sparsity.attention != "dense":
        per_head = sketch_bytes_per_block(sparsity.sketch, layout.head_dim, layout.block_size)
        sketch_bytes = blocks * layout.num_layers * layout.num_kv_heads * per_head
    step_ms = _step_ms(decoded)
    moved = step_bytes(read_weight_bytes(runner.model), layout, sparsity, context, batch).total
    ceiling_ms = moved / bandwidth * 1e3
    return {
        "mode": sparsity.attention,
        "context": context,
        "batch": batch,
        "ms_per_step": round(step_ms, 2),
        "tokens_per_s": round(batch / step_ms * 1e3, 1),
        "ceiling_ms": round(ceiling_ms, 2),
        "ceiling_share": round(ceiling_ms / step_ms, 4),
        "hit_rate": None if decoded.hit_rate is None else round(decoded.hit_rate, 4),
        "copies_ms": None if copies_ms is None else round(copies_ms, 2),
        "loaded_bytes": decoded.loaded_bytes,
        "kv_bytes_per_request": decoded.hot_kv_bytes // batch,
        "sketch_bytes_per_request": sketch_bytes,
        "largest_batch": room // (own * layout.page_bytes + sketch_bytes),
    }


def _step_ms(decoded: Decoded) -> float:
    return median(decoded.step_s) * 1e3


@contextmanager
def copies_left_out(engine: Engine) -> Iterator[None]:
    """Steps that order no copies from the host tier, in recordings of their own: they choose and attend as many blocks
    as before, of what was in the pages. What they take less is what the compute waits for copies, those beside it
    included. For timing alone: the answers mean nothing.
    """
    runner = engine.runner
    graphs, transfers = runner.graphs, runner.cache.transfers
    assert transfers is not None
    runner.graphs = None if graphs is None else DecodeGraphs(CudaRecorder())
    with (
        patch.object(transfers, "load_planned", lambda *_: None),
        patch.object(transfers, "prefetch_planned", lambda *_: None),
    ):
        yield
    runner.graphs = graphs


def format_model(rows: list[dict[str, Any]]) -> str:
    """One line per mode, context and batch. The largest batch is what the device holds; the host tier is not asked."""
    names = {
        "mode": "mode",
        "context": "context",
        "batch": "batch",
        "ms_per_step": "ms per step",
        "tokens_per_s": "tokens/s",
        "ceiling_ms": "ceiling ms",
        "ceiling_share": "of it reached",
        "hit_rate": "hit rate",
        "copies_ms": "waits for copies ms",
        "loaded_bytes": "loaded MiB a step",
        "kv_bytes_per_request": "pages MiB a request",
        "sketch_bytes_per_request": "sketch MiB a request",
        "largest_batch": "largest batch",
    }
    lines = [
        ["–" if row[key] is None else f"{row[key] / 2**20:.2f}" if "bytes" in key else row[key] for key in names]
        for row in rows
    ]
    return table(list(names.values()), lines)
