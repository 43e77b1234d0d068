"""Time of a decode step at a context and batch: this engine's modes and other engines on the same weights, in turns.

One prompt is held per context; a batch is that many forks of it, each sampling its own way on. Forks share the
prompt's host KV and sketches and own their pages. In every round each engine and mode in turn decodes the same number
of steps from the same context, with the same threads, so whatever else the machine does falls on all alike.

Up to --prefill-tokens of a prompt are technical prose, prefilled; beyond them, and beyond the model's window, their
keys and values come again at later positions, which times a step and says nothing about answers. Peers run alone on
one rank, with keys and values that are made up.

Ceiling: the bytes a step must read (weights once; per request its pinned and selected KV, and the sketch of every
candidate) over the memory bandwidth measured in the same run.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from oasis_tp.bench.arguments import check_least, names, numbers
from oasis_tp.bench.ceiling import bytes_per_second, read_weight_bytes, step_bytes
from oasis_tp.bench.contest import Contestant, Rivals, dtype_name
from oasis_tp.bench.decode_report import draw, format_ceilings, format_parts, format_rows
from oasis_tp.bench.forks import WARM_STEPS, Forks
from oasis_tp.bench.haystack import prose
from oasis_tp.bench.long_prompt import RepeatingRunner, stretched
from oasis_tp.bench.peers import PEERS, PeerError
from oasis_tp.bench.step_parts import PartTimer
from oasis_tp.config import AttentionMode, MemoryConfig, SketchKind, SparsityConfig
from oasis_tp.engine.engine import Engine
from oasis_tp.engine.memory import GIB
from oasis_tp.engine.startup import start
from oasis_tp.kv.blocks import runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, KvLayout, SelectionLayout, ceil_div
from oasis_tp.llm import make_config
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.registry import ModelArch, load_arch
from oasis_tp.models.tokenizer import load_tokenizer
from oasis_tp.ranks import discover_ranks
from oasis_tp.request import RequestSpec

CHUNK_TOKENS = 1024


def start_engine(
    args: argparse.Namespace, model_dir: Path, sparsities: Sequence[SparsityConfig], window: int
) -> Engine:
    """An engine that computes prompts up to `window` tokens, on a CPU with the memory that its largest batch takes.

    Collective.

    Raises:
        ValueError: the machine has too little, or an option's value is out of range.
    """
    longest, widest, block = max(args.contexts), max(args.batches), MemoryConfig().block_size
    chunk = min(CHUNK_TOKENS, window // block * block)
    memory = {}
    if not torch.cuda.is_available():
        memory = _kv_gib(load_arch(model_dir, None), sparsities, longest, widest)
    config = make_config(
        model=str(model_dir),
        max_model_len=longest,
        max_num_seqs=widest + 1,  # room for the held prompt in the host tier
        max_num_batched_tokens=chunk,
        budget_tokens=args.budget_tokens,
        hot_factor=args.hot_factor,
        sketch=args.sketch,
        **memory,
    )
    started = start(config, tuple({x.sketch: None for x in sparsities if x.attention != "dense"}))
    return Engine(config, replace(started, runner=RepeatingRunner(started.runner, window // chunk * chunk)))


def _kv_gib(arch: ModelArch, sparsities: Sequence[SparsityConfig], longest: int, widest: int) -> dict[str, float]:
    """GiB per rank of pages for the widest batch, and of host tier for its prompt and every fork's own end."""
    layout = KvLayout(
        num_layers=arch.num_layers,
        num_kv_heads=ceil_div(arch.num_kv_heads, discover_ranks().size),
        head_dim=arch.head_dim,
        block_size=MemoryConfig().block_size,
        dtype_bytes=torch.float32.itemsize,
    )
    full = layout.num_blocks(longest)
    selections = [SelectionLayout.from_config(x, layout.block_size, float(x.hot_factor)) for x in sparsities]
    num_pages = widest * max(selection.num_pages(full, host_tier=True) for selection in selections)
    num_host = (runs_for(full) + widest * runs_for(CHUNK_TOKENS // layout.block_size)) * RUN_BLOCKS
    # One more: sizes are rounded on their way through GiB.
    return {
        "device_kv_gb": (num_pages + 1) * layout.page_bytes / GIB,
        "host_kv_gb": (num_host + 1) * layout.page_bytes / GIB,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="as for oasis_tp.serve (default: smollm2)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--contexts", type=numbers, default=[8192], help="tokens of prompt and output, with commas (default: 8192)"
    )
    parser.add_argument("--batches", type=numbers, default=[4], help="requests in a step, with commas (default: 4)")
    modes = get_args(AttentionMode)
    parser.add_argument(
        "--modes",
        type=names(modes),
        default=["dense", "resolve"],
        help=f"of {','.join(modes)} (default: dense,resolve)",
    )
    parser.add_argument(
        "--peers",
        type=names(PEERS),
        default=[],
        help=f"other engines beside it, of {','.join(PEERS)}; `make bench-peers` installs them (default: none)",
    )
    parser.add_argument(
        "--peers-dir", type=Path, default=Path(".peers"), help="their environments, one a folder (default: .peers)"
    )
    parser.add_argument("--budget-tokens", type=int, default=512, help="tokens selected per row (default: 512)")
    parser.add_argument(
        "--hot-factor", type=float, default=2.0, help="budgets' worth of blocks kept on the device (default: 2)"
    )
    parser.add_argument("--sketch", choices=get_args(SketchKind), default="2bit", help="(default: 2bit)")
    parser.add_argument(
        "--prefill-tokens", type=int, default=8192, help="most tokens of a prompt that are computed (default: 8192)"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps timed in each round (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every engine and mode (default: 3)")
    parser.add_argument("--no-profile", action="store_true", help="do not take the turn that times a step's parts")
    parser.add_argument("--plot", type=Path, default=None, metavar="PNG", help="draw time against context to a file")


def _check(args: argparse.Namespace) -> None:
    check_least(args, contexts=1, batches=1, steps=1, rounds=1)
    num_new = 1 + WARM_STEPS + args.steps
    if min(args.contexts) <= num_new:
        raise ValueError(f"--contexts {min(args.contexts)}: more than the {num_new} tokens that are generated")
    if not args.modes:
        raise ValueError(f"--modes: at least one of {', '.join(get_args(AttentionMode))}")
    block = MemoryConfig().block_size
    if args.prefill_tokens < max(block, max(args.batches) + 1):
        raise ValueError(f"--prefill-tokens {args.prefill_tokens}: at least a block ({block}), and above --batches")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--plot {args.plot}: matplotlib is not installed; pip install 'oasis-tp[bench]'")
    if args.plot is not None and not args.plot.parent.is_dir():
        raise ValueError(f"--plot {args.plot}: there is no directory {args.plot.parent}")
    size = discover_ranks().size
    if args.peers and size > 1:
        raise ValueError(f"--peers {','.join(args.peers)}: peers run alone, and this job has {size} ranks")


def main(args: argparse.Namespace) -> int:
    """Print the tables, then one JSON line {"rows": [...], ...} (rank 0).

    Raises:
        ValueError: an option's value that cannot be measured here.
    """
    _check(args)
    plain_dir = resolve_model(args.model, args.revision)
    window = min(args.prefill_tokens, load_arch(plain_dir, None).max_position_embeddings)
    sparse = SparsityConfig(budget_tokens=args.budget_tokens, hot_factor=args.hot_factor, sketch=args.sketch)
    modes = {mode: replace(sparse, attention=mode) for mode in args.modes}
    with stretched(plain_dir, max(args.contexts)) as model_dir, ExitStack() as stack:
        engine = start_engine(args, model_dir, list(modes.values()), window)
        stack.callback(engine.close)
        rivals = Rivals(args.peers, args.peers_dir, engine, args.steps)
        stack.callback(rivals.close)
        forks = Forks(engine, load_tokenizer(model_dir).encode(prose(), add_special_tokens=False))
        bandwidth = bytes_per_second(engine.tp)
        contestants = []
        for context in args.contexts:
            held = forks.hold(context - 1 - WARM_STEPS - args.steps)
            for batch in args.batches:
                here = measure(args, forks, held, modes, rivals, context, batch)
                if engine.tp.rank == 0:
                    _print_times(here, bandwidth)
                contestants += here
            forks.release(held)
        # What slowed the first look at the memory may be gone by now.
        bandwidth = max(bandwidth, bytes_per_second(engine.tp))
        if engine.tp.rank == 0:
            _print(args, engine, bandwidth, [one.row(bandwidth) for one in contestants], rivals.not_measured)
    return 0


def measure(
    args: argparse.Namespace,
    forks: Forks,
    held: RequestSpec,
    modes: dict[AttentionMode, SparsityConfig],
    rivals: Rivals,
    context: int,
    batch: int,
) -> list[Contestant]:
    """Turns of every engine and mode at one context and batch."""
    engine = forks.engine
    model = engine.runner.model
    layout = replace(engine.runner.cache.layout, num_kv_heads=model.arch.num_kv_heads)
    weights = read_weight_bytes(model)
    ceilings = {mode: step_bytes(weights, layout, sparsity, context, batch) for mode, sparsity in modes.items()}
    own = [
        Contestant(
            engine="oasis_tp",
            mode=mode,
            dtype=dtype_name(model.dtype),
            context=context,
            batch=batch,
            ceiling=ceilings[mode],
            decode=partial(forks.decode, [held], sparsity, batch, args.steps),
        )
        for mode, sparsity in modes.items()
    ]
    for one in own:
        one.decode()  # does not count; it touches the memory by which room for the peers is judged
    dense = step_bytes(weights, layout, SparsityConfig(attention="dense"), context, batch)
    with rivals.at(context, batch, dense) as theirs:
        _take_turns(rivals, theirs, context, batch)
        for peer in theirs:
            peer.turns.clear()  # nor do the peers' first
        for _ in range(args.rounds):
            for one in own:
                one.turns.append(one.decode())
            _take_turns(rivals, theirs, context, batch)
    for one, sparsity in zip(own, modes.values(), strict=True) if not args.no_profile else ():
        timer = PartTimer(engine.tp.device)
        forks.decode([held], sparsity, batch, args.steps, timer)
        one.parts_ms = {part: seconds * 1e3 for part, seconds in timer.median_step().items()}
    return own + theirs


def _take_turns(rivals: Rivals, theirs: list[Contestant], context: int, batch: int) -> None:
    """A turn of every peer; one that fails is reported and leaves the list."""
    for peer in list(theirs):
        try:
            peer.turns.append(peer.decode())
        except PeerError as error:
            rivals.report(peer.engine, error, context=context, batch=batch)
            theirs.remove(peer)


def _print_times(contestants: list[Contestant], bandwidth: float) -> None:
    """A line each as soon as they are known: what follows may take long, or fail."""
    for row in (one.row(bandwidth) for one in contestants):
        where = f"context {row['context']}, batch {row['batch']}"
        print(f"{row['engine']} {row['mode']}, {where}: {row['ms_per_step']:.1f} ms per step", flush=True)


def _print(
    args: argparse.Namespace,
    engine: Engine,
    bandwidth: float,
    rows: list[dict[str, Any]],
    not_measured: list[dict[str, Any]],
) -> None:
    settings = {
        "model": args.model,
        "device": engine.tp.device.type,
        "dtype": dtype_name(engine.runner.model.dtype),
        "tp": engine.tp.size,
        "threads_per_rank": torch.get_num_threads(),
        "gb_per_s": round(bandwidth / 1e9, 2),
        "budget_tokens": args.budget_tokens,
        "hot_factor": args.hot_factor,
        "sketch": args.sketch,
        "tail_estimate": True,
        "rounds": args.rounds,
        "steps": args.steps,
    }
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(format_rows(rows))
    print("\nWhat the ceilings are made of, in ms:\n" + format_ceilings(rows))
    if not args.no_profile:
        print("\nWhere a step's time goes, in ms, with timers on:\n" + format_parts(rows))
    if args.plot is not None:
        draw(rows, args.plot)
    print(json.dumps({"settings": settings, "rows": rows, "not_measured": not_measured}), flush=True)
