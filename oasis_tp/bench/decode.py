"""Time of a decode step at a context and batch: this engine's modes and other engines on the same weights, interleaved.

One prompt of technical prose is prefilled per context and held; a batch is that many forks of it, each sampling its
own way on. Forks share the prompt's host KV and sketches and own their pages. In every round each engine and mode in
turn decodes the same number of steps from the same context, so whatever else the machine does falls on all alike.

Ceiling: the bytes a step must read (weights once; per request its pinned and selected KV, and the sketch of every
candidate) over the memory bandwidth measured here. Peers run alone on one rank, with synthetic keys and values.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean, median
from typing import Any, get_args

import torch

from oasis_tp.bench.haystack import prose
from oasis_tp.comm import TpGroup
from oasis_tp.config import AttentionMode, SketchKind, SparsityConfig
from oasis_tp.engine.engine import Engine
from oasis_tp.kv.layout import KvLayout, SelectionLayout, ceil_div
from oasis_tp.llm import make_config
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.tokenizer import load_tokenizer
from oasis_tp.models.weights import weight_bytes
from oasis_tp.request import KvStats, RequestSpec, SamplingParams, TokenOutput
from oasis_tp.sparse.sketch_size import sketch_bytes_per_block

WARM_STEPS = 2
PEERS = ("transformers",)


@dataclass(kw_only=True)
class Contestant:
    """One engine and mode at one context and batch. `decode(steps)` returns seconds per step and the device KV's
    figures: bytes of the batch, hit rate."""

    engine: str
    mode: str
    context: int
    batch: int
    ceiling_bytes: int
    decode: Callable[[int], tuple[list[float], int, float | None]]
    step_s: list[float] = field(default_factory=list)
    hot_kv_bytes: int = 0
    hit_rates: list[float] = field(default_factory=list)

    def run(self, num_steps: int) -> None:
        step_s, self.hot_kv_bytes, hit_rate = self.decode(num_steps)
        self.step_s += step_s
        self.hit_rates += [] if hit_rate is None else [hit_rate]

    def row(self, bytes_per_s: float) -> dict[str, Any]:
        ranked = sorted(self.step_s)
        return {
            "engine": self.engine,
            "mode": self.mode,
            "context": self.context,
            "batch": self.batch,
            "ms_per_step": round(median(ranked) * 1e3, 2),
            "p99_ms": round(ranked[ceil_div(99 * len(ranked), 100) - 1] * 1e3, 2),
            "ceiling_ms": round(self.ceiling_bytes / bytes_per_s * 1e3, 2),
            "hot_kv_bytes": self.hot_kv_bytes,
            "hit_rate": round(fmean(self.hit_rates), 4) if self.hit_rates else None,
        }


def step_bytes(weights: int, layout: KvLayout, sparsity: SparsityConfig, context: int, batch: int) -> int:
    """Bytes that one decode step must read. `layout` is the whole model's, `weights` what a step reads of them."""
    selection = SelectionLayout.from_config(sparsity, layout.block_size, 1.0)
    first, last = selection.candidates(context - 1)
    attended, scanned = layout.num_blocks(context), 0
    if selection.budget is not None and last - first > selection.budget:
        attended, scanned = selection.pinned + selection.budget, last - first
    sketch = layout.num_layers * layout.num_kv_heads
    sketch *= sketch_bytes_per_block(sparsity.sketch, layout.head_dim, layout.block_size)
    return weights + batch * (attended * layout.page_bytes + scanned * sketch)


def bytes_per_second(tp: TpGroup) -> float:
    """Memory read bandwidth of all ranks reading at once: the best of eight sums over 512 MiB each."""
    data = torch.ones(2**27, dtype=torch.float32, device=tp.device)
    nanoseconds = []
    for _ in range(8):
        tp.barrier()
        nanoseconds.append(int(_timed(data.sum, tp.device) * 1e9))
    return tp.size * data.nbytes * 1e9 / min(tp.max_over_ranks(nanoseconds))


def _timed(action: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def read_weight_bytes(model: LlamaModel) -> int:
    """Bytes of all ranks' weights that a decode step reads: an embedding that is not the head is only looked up in."""
    local = weight_bytes(model) - (0 if model.head is model.embedding else model.embedding.weight.nbytes)
    return int(model.tp.sum_over_ranks(torch.tensor([local], dtype=torch.float64)))


class Forks:
    """Starts batches on one engine and times their steps. Every rank makes the same calls."""

    def __init__(self, engine: Engine, text: list[int]) -> None:
        """`text`: the token ids that prompts are cut from, repeated where they are too few."""
        self.engine = engine
        self.text = text
        self._ids = count()

    def hold(self, num_tokens: int) -> RequestSpec:
        """Prefill a prompt of that many tokens and keep it."""
        ids = tuple((self.text * ceil_div(num_tokens, len(self.text)))[:num_tokens])
        spec = RequestSpec(request_id=next(self._ids), prompt_ids=ids, sampling=SamplingParams(), hold=True)
        self.engine.submit(spec)
        self._step_until_idle()
        return spec

    def release(self, held: RequestSpec) -> None:
        self.engine.abort(held.request_id)
        self._step_until_idle()

    def decode(
        self, held: RequestSpec, sparsity: SparsityConfig, batch: int, num_steps: int
    ) -> tuple[list[float], int, float | None]:
        """Decode `num_steps` steps of `batch` forks, after WARM_STEPS more.

        Returns:
            Seconds of each step, the batch's bytes of device pages, its hit rate over all of its steps.

        Raises:
            ValueError: the batch does not fit the device.
            RuntimeError: the model's output was not finite.
        """
        ended: list[KvStats] = []

        def receive(outputs: list[TokenOutput]) -> None:
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.kv is not None:
                    ended.append(output.kv)

        self.engine.on_output = receive
        for index in range(batch):
            # The first token comes from the prefill; a seed of its own leads each fork another way.
            sampling = SamplingParams(max_tokens=1 + WARM_STEPS + num_steps, seed=index, ignore_eos=True)
            self.engine.submit(
                RequestSpec(
                    request_id=next(self._ids),
                    prompt_ids=held.prompt_ids,
                    sampling=sampling,
                    sparsity=sparsity,
                    fork_of=held.request_id,
                )
            )
        self.engine.step()
        num_running = self.engine.stats().num_running
        if num_running < batch:
            raise ValueError(
                f"--batches {batch} in mode {sparsity.attention}: {num_running} requests of {len(held.prompt_ids)} "
                "prompt tokens fit the device at once; lower --batches or --contexts"
            )
        step_s = [_timed(self.engine.step, self.engine.tp.device) for _ in range(WARM_STEPS + num_steps)]
        assert len(ended) == batch, (len(ended), batch)
        self._step_until_idle()
        selected, missed = (sum(getattr(kv, f"{name}_blocks") for kv in ended) for name in ("selected", "missed"))
        hit_rate = 1 - missed / selected if selected else None
        return step_s[WARM_STEPS:], sum(kv.hot_kv_bytes for kv in ended), hit_rate

    def _step_until_idle(self) -> None:
        self.engine.step()
        while self.engine.has_work:
            self.engine.step()


class TransformersPeer:
    """transformers with SDPA and its DynamicCache, on the engine's weights, device and dtype."""

    def __init__(self, engine: Engine) -> None:
        """Load the model a second time.

        Raises:
            ValueError: transformers is not installed.
        """
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ValueError(
                "--peers transformers: the package is not installed; pip install 'oasis-tp[bench]', or give --peers "
                "without a name"
            ) from error
        own = engine.runner.model
        self.arch = own.arch
        self.model = AutoModelForCausalLM.from_pretrained(
            engine.model_dir, dtype=own.dtype, attn_implementation="sdpa", local_files_only=True
        )
        self.model.to(own.device).eval()

    @torch.inference_mode()
    def decode(self, num_cached: int, batch: int, num_steps: int) -> tuple[list[float], int, float | None]:
        """As `Forks.decode`, from `num_cached` synthetic tokens: what they hold does not change the time of a step."""
        from transformers import DynamicCache

        device, dtype = self.model.device, self.model.dtype
        cache = DynamicCache()
        kv = torch.randn(batch, self.arch.num_kv_heads, num_cached, self.arch.head_dim, device=device, dtype=dtype)
        for layer in range(self.arch.num_layers):
            cache.update(kv, kv, layer)
        token_ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)

        def step() -> None:
            nonlocal token_ids
            out = self.model(input_ids=token_ids, past_key_values=cache, use_cache=True)
            token_ids = out.logits[:, -1:].argmax(-1)

        step_s = [_timed(step, device) for _ in range(WARM_STEPS + num_steps)]
        kv_bytes = 2 * self.arch.num_layers * (kv.nbytes // num_cached) * cache.get_seq_length()
        return step_s[WARM_STEPS:], kv_bytes, None


def format_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| engine | mode | context | batch | ms per step | p99 ms | tokens/s | ceiling ms | hot KV MiB | hit rate |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        hit_rate = "–" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}"
        lines.append(
            f"| {row['engine']} | {row['mode']} | {row['context']} | {row['batch']} | {row['ms_per_step']:.1f} "
            f"| {row['p99_ms']:.1f} | {row['batch'] / row['ms_per_step'] * 1e3:.1f} | {row['ceiling_ms']:.2f} "
            f"| {row['hot_kv_bytes'] / 2**20:.1f} | {hit_rate} |"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="as for oasis_tp.serve (default: smollm2)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[8192], help="prompt and output, in tokens (default: 8192)"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[4], help="requests in a step (default: 4)")
    modes = get_args(AttentionMode)
    parser.add_argument(
        "--modes", type=_names(modes), default=list(modes), help="separated by commas (default: dense,resolve)"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="other engines beside it (default: none)")
    parser.add_argument("--budget-tokens", type=int, default=512, help="tokens selected per row (default: 512)")
    parser.add_argument(
        "--hot-factor", type=float, default=2.0, help="budgets' worth of blocks kept on the device (default: 2)"
    )
    parser.add_argument("--sketch", choices=get_args(SketchKind), default="2bit", help="(default: 2bit)")
    parser.add_argument("--steps", type=int, default=8, help="steps timed in each round (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every engine and mode (default: 3)")


def _names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def convert(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return names

    return convert


def main(args: argparse.Namespace) -> int:
    """Print the table, then one JSON line {"rows": [...]} (rank 0).

    Raises:
        ValueError: an option's value that cannot be measured here.
    """
    for option in ("contexts", "batches", "steps", "rounds"):
        value = getattr(args, option)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{option} {value}: at least 1")
    num_new = 1 + WARM_STEPS + args.steps
    if min(args.contexts) <= num_new:
        raise ValueError(f"--contexts {min(args.contexts)}: more than the {num_new} tokens that are generated")
    sparse = SparsityConfig(budget_tokens=args.budget_tokens, hot_factor=args.hot_factor, sketch=args.sketch)
    engine = Engine.create(
        make_config(
            model=args.model,
            revision=args.revision,
            max_model_len=max(args.contexts),
            budget_tokens=args.budget_tokens,
            hot_factor=args.hot_factor,
            sketch=args.sketch,
            max_num_seqs=max(args.batches) + 1,  # room for the held prompt in the host tier
        )
    )
    tp, model = engine.tp, engine.runner.model
    if args.peers and tp.size > 1:
        raise ValueError(f"--peers {' '.join(args.peers)}: peers run alone, and this job has {tp.size} ranks")
    peers = {name: TransformersPeer(engine) for name in args.peers}
    forks = Forks(engine, load_tokenizer(engine.model_dir).encode(prose(), add_special_tokens=False))
    layout = replace(engine.runner.cache.layout, num_kv_heads=model.arch.num_kv_heads)
    weights, bandwidth = read_weight_bytes(model), bytes_per_second(tp)
    modes = {mode: replace(sparse, attention=mode) for mode in args.modes}
    dense = replace(sparse, attention="dense")
    rows = []
    for context in args.contexts:
        held = forks.hold(context - num_new)
        for batch in args.batches:
            here = {"context": context, "batch": batch}
            contestants = [
                Contestant(
                    engine="oasis_tp",
                    mode=mode,
                    **here,
                    ceiling_bytes=step_bytes(weights, layout, sparsity, context, batch),
                    decode=partial(forks.decode, held, sparsity, batch),
                )
                for mode, sparsity in modes.items()
            ] + [
                Contestant(
                    engine=name,
                    mode="dense",
                    **here,
                    ceiling_bytes=step_bytes(weights, layout, dense, context, batch),
                    # As many cached tokens as the forks have after their first token.
                    decode=partial(peer.decode, context - num_new, batch),
                )
                for name, peer in peers.items()
            ]
            for _ in range(args.rounds):
                for contestant in contestants:
                    contestant.run(args.steps)
            rows += [contestant.row(bandwidth) for contestant in contestants]
        forks.release(held)
    if tp.rank == 0:
        print(
            f"{args.model} on {tp.device.type}, {str(model.dtype).removeprefix('torch.')}, TP {tp.size}, "
            f"{torch.get_num_threads()} thread(s) per rank, reads {bandwidth / 1e9:.1f} GB/s; resolve: budget "
            f"{args.budget_tokens}, hot factor {args.hot_factor:g}, {args.sketch}, tail estimate on; median of "
            f"{args.rounds} x {args.steps} steps"
        )
        print(format_table(rows))
        print(json.dumps({"rows": rows}), flush=True)
    tp.close()
    return 0
