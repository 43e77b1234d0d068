"""Lookahead: how much of what the next row selects is on the device when its query is known, and what drafts bring.

For every context and workload one prompt is prefilled (dense, the same for all) and held; each run decodes a fork of
it. `needle`: a needle in technical prose and the question for it (see bench/haystack.py), greedy. `copy`: the prose,
a part of it quoted twice and begun a third time, greedy: the model goes on quoting. `free`: the prose goes on,
sampled.

Watched runs read the tables of the first row of each step before it selects. Counted are selected blocks, pinned ones
aside; mass is exact attention; figures are means over layers. A draft is *right* when the token that the step before
looked ahead with is the one that came. `LRU` is the same run without prefetching, over the same rows; `previous
query` is what the row one token earlier selected. `replay` stands for a drafter that is always right: its drafts are
the text that an earlier run gave. Timed runs are not watched; they take turns. The wait is what the compute spends on
copies in a step: those it makes itself and those it waits for.

`copy` runs at hot factor 4 too, where three drafts are verified in a step, and the JSON line has it from there.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import torch
from tqdm import tqdm

from oasis_tp.bench.haystack import prose, prose_needle
from oasis_tp.bench.lookahead_report import (
    COPY_HOT_FACTOR,
    Measured,
    Timed,
    Workload,
    broken_promises,
    format_small_table,
    format_tables,
    json_workloads,
    summarise,
    write_files,
)
from oasis_tp.bench.lookahead_watch import Step, Watch
from oasis_tp.config import SparsityConfig
from oasis_tp.draft.drafter import Drafter
from oasis_tp.llm import LLM, Completion, HeldPrompt
from oasis_tp.models.tokenizer import Tokenizer
from oasis_tp.request import Request, SamplingParams

SPEC_METHODS = ("ngram", "draft_model")
"""Not eagle3: its head learns from every step, and steps without drafts stand between."""
TABLE_BUDGETS, TABLE_HOT_FACTORS = (256, 512, 1024), (1.0, 2.0, 4.0)
SPEC_TOKENS = 4
BEGUN_TOKENS = 48
"""How much of the part the prompt of `copy` gives away."""
LEAST_PROMPT = 320
"""Tokens of context besides those that `copy` quotes and generates."""
AGAIN = "\n\nHere is a part of the text above again, word for word:\n\n"


def make_prompt(
    workload: Workload, tokenizer: Tokenizer, text: Sequence[int], num_tokens: int, num_new: int
) -> tuple[list[int], str | None]:
    """A prompt of at most `num_tokens` tokens that `num_new` follow, and the needle that is asked for, if any.

    `text` is the prose in tokens.
    """
    if workload == "needle":
        needle = prose_needle(tokenizer, num_tokens, depth=0.4, seed=42, window=2)
        return tokenizer.encode(needle.prompt), needle.answer
    if workload == "free":
        return list(text[:num_tokens]), None
    again = tokenizer.encode(AGAIN, add_special_tokens=False)
    num_quoted = BEGUN_TOKENS + num_new
    num_prose = num_tokens - 3 * len(again) - 2 * num_quoted - BEGUN_TOKENS
    quoted = text[num_prose // 2 :][:num_quoted]
    return [*text[:num_prose], *again, *quoted, *again, *quoted, *again, *quoted[:BEGUN_TOKENS]], None


def sampling_of(workload: Workload, max_tokens: int) -> SamplingParams:
    if workload == "free":
        return SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=42, ignore_eos=True)
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Replay(Drafter):
    """Proposes what a text holds: drafts that are always right where the text comes again."""

    needs_broadcast = False
    device_bytes = 0

    def __init__(self, text: Sequence[int]) -> None:
        self.text = tuple(text)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        starts = [len(request.output_ids) for request in requests]
        return [self.text[start : start + count] for start, count in zip(starts, counts, strict=True)]

    def release(self, row: int) -> None:
        pass


class Bench:
    """Decodes forks of held prompts, watched or timed. Every rank makes the same calls."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.drafter = llm.engine.drafter
        self.on_cuda = llm.engine.tp.device.type == "cuda"

    def watch(
        self, held: HeldPrompt, sampling: SamplingParams, sparsity: SparsityConfig, drafter: Drafter | None
    ) -> tuple[Completion, list[Step]]:
        self._idle()
        with Watch(self.llm.engine.runner).on() as watch:
            answer = self._decode(held, sampling, sparsity, drafter)
        return answer, watch.steps

    def time(
        self, held: HeldPrompt, sampling: SamplingParams, sparsity: SparsityConfig, drafter: Drafter | None
    ) -> tuple[Timed, list[int]]:
        """Times of the steps after the one that starts the fork, and the text."""
        self._idle()
        engine = self.llm.engine
        transfers = engine.runner.cache.transfers
        assert transfers is not None
        step, run = engine.step, transfers.engine.run
        inline_ns = 0
        # Seconds, bytes to the device and waits [ns] up to the end of each step.
        marks: list[tuple[float, int, int]] = []

        def timed_step() -> bool:
            result = step()
            marks.append((time.perf_counter(), transfers.host_to_device_bytes, transfers.exposed_wait_ns + inline_ns))
            return result

        def timed_run(copy: Callable[[], None]) -> None:
            nonlocal inline_ns
            start = time.perf_counter_ns()
            run(copy)
            inline_ns += time.perf_counter_ns() - start

        with patch.object(engine, "step", timed_step), patch.object(transfers.engine, "run", timed_run):
            answer = self._decode(held, sampling, sparsity, drafter)
        (start, bytes_before, wait_before), (end, bytes_after, wait_after) = marks[0], marks[-1]
        timed = Timed(
            num_steps=len(marks) - 1,
            num_tokens=len(answer.token_ids) - 1,
            seconds=end - start,
            num_bytes=bytes_after - bytes_before,
            wait_s=(wait_after - wait_before) * 1e-9,
        )
        return timed, answer.token_ids

    def _decode(
        self, held: HeldPrompt, sampling: SamplingParams, sparsity: SparsityConfig, drafter: Drafter | None
    ) -> Completion:
        self.llm.engine.drafter = drafter
        answer = self.llm.generate_from(held, sampling, sparsity=sparsity).outputs[0]
        if answer.error is not None or answer.kv is None:
            raise RuntimeError(f"{sparsity}: {answer.error}")
        return answer

    def _idle(self) -> None:
        """Let the drafter of the last run hear that its row is free."""
        while self.llm.engine.has_work:
            self.llm.engine.step()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One held prompt and how its forks are decoded; `needle` is in the text of who finds it."""

    workload: Workload
    context: int
    held: HeldPrompt
    sampling: SamplingParams
    needle: str | None

    def watch(self, bench: Bench, sparsity: SparsityConfig, name: str, drafter: Drafter | None) -> Measured:
        """Watched with prefetching and without, over the same drafts."""
        answer, steps = bench.watch(self.held, self.sampling, replace(sparsity, prefetch="on"), drafter)
        lru: list[Step] = []
        other = None
        if sparsity.attention == "resolve":
            other, lru = bench.watch(self.held, self.sampling, replace(sparsity, prefetch="off"), drafter)
        assert answer.kv is not None
        return Measured(
            workload=self.workload,
            context=self.context,
            mode=sparsity.attention,
            budget=sparsity.budget_tokens,
            hot_factor=float(sparsity.hot_factor),
            drafts=name,
            text=answer.token_ids,
            steps=steps,
            lru=lru,
            num_accepted=answer.kv.accepted_tokens,
            texts_differ=other is not None and other.token_ids != answer.token_ids,
            found=None if self.needle is None else self.needle in bench.llm.tokenizer.decode(answer.token_ids),
        )

    def time(self, bench: Bench, sparsity: SparsityConfig, rounds: int, measured: Measured) -> None:
        """Prefetching on, off, and off without drafts in turn (on a GPU: on without drafts)."""
        on, off = (replace(sparsity, prefetch=prefetch) for prefetch in ("on", "off"))
        measured.default = "on" if bench.on_cuda else "off"
        turns = {
            "on": (on, bench.drafter),
            "off": (off, bench.drafter),
            "no drafts": (on if bench.on_cuda else off, None),
        }
        for _, (name, (setting, drafter)) in product(range(rounds), turns.items()):
            timed, text = bench.time(self.held, self.sampling, setting, drafter)
            measured.timed.setdefault(name, []).append(timed)
            measured.texts_differ |= text != measured.text


def measure(bench: Bench, case: Case, args: argparse.Namespace) -> list[Measured]:
    """All runs over one prompt."""
    sparsity = SparsityConfig(budget_tokens=args.budget_tokens, hot_factor=args.hot_factor)
    factors = [args.hot_factor]
    if case.workload == "copy" and args.hot_factor != COPY_HOT_FACTOR:
        factors.append(COPY_HOT_FACTOR)
    runs = []
    for factor in factors:
        own = replace(sparsity, hot_factor=factor)
        drafted = case.watch(bench, own, args.spec_method, bench.drafter)
        case.time(bench, own, args.rounds, drafted)
        runs += [drafted, case.watch(bench, own, "replay", Replay(drafted.text))]
    paper = SparsityConfig(attention="paper", budget_tokens=args.budget_tokens, hot_factor=args.hot_factor)
    runs.append(case.watch(bench, paper, args.spec_method, bench.drafter))
    return runs


def measure_table(bench: Bench, case: Case, args: argparse.Namespace) -> list[Measured]:
    """The same at every hot factor and budget of the small table, watched only."""
    return [
        case.watch(bench, SparsityConfig(budget_tokens=budget, hot_factor=factor), args.spec_method, bench.drafter)
        for budget, factor in product(TABLE_BUDGETS, TABLE_HOT_FACTORS)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="as for oasis_tp.serve (default: smollm2)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[4096, 8192],
        help="prompt and output, in tokens (default: 4096 8192)",
    )
    workloads = get_args(Workload)
    parser.add_argument(
        "--workloads", nargs="+", choices=workloads, default=list(workloads), help="default: needle copy free"
    )
    parser.add_argument("--budget-tokens", type=int, default=512, help="tokens selected per row (default: 512)")
    parser.add_argument(
        "--hot-factor", type=float, default=2.0, help="budgets' worth of blocks kept on the device (default: 2)"
    )
    parser.add_argument("--spec-method", choices=SPEC_METHODS, default="ngram", help="who drafts (default: ngram)")
    parser.add_argument("--spec-model", default="", help="draft_model: the model that drafts (default: none)")
    parser.add_argument("--max-tokens", type=int, default=64, help="generated by each run (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every timed run (default: 3)")
    parser.add_argument(
        "--table", action="store_true", help="instead: hit rates at hot factors 1, 2, 4 and budgets 256, 512, 1024"
    )
    parser.add_argument("--out", default=None, help="directory for lookahead.png and lookahead.json (default: none)")
    parser.add_argument("--check", action="store_true", help="exit 1 if lookahead achieves less than it promises")


def main(args: argparse.Namespace) -> int:
    """Print the tables, then one JSON line {"workloads": {...}} (with --table {"rows": [...]}) at rank 0.

    Raises:
        ValueError: an option's value that cannot be measured.
    """
    for option, least in (("max_tokens", 2), ("rounds", 1)):
        if getattr(args, option) < least:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(args, option)}: at least {least}")
    least = LEAST_PROMPT + 3 * args.max_tokens
    if min(args.contexts) < least:
        raise ValueError(f"--contexts {min(args.contexts)}: at least {least} for --max-tokens {args.max_tokens}")
    llm = LLM(
        args.model,
        extra_sketches=["minmax"],
        revision=args.revision,
        max_model_len=max(args.contexts),
        budget_tokens=max(TABLE_BUDGETS) if args.table else args.budget_tokens,
        hot_factor=max(args.hot_factor, COPY_HOT_FACTOR),
        spec_method=args.spec_method,
        spec_model=args.spec_model,
        spec_tokens=SPEC_TOKENS,
        prefetch="on",
        max_num_seqs=2,  # the held prompt's blocks and those of one fork
    )
    bench = Bench(llm)
    runs: list[Measured] = []
    is_first = llm.engine.tp.rank == 0
    text = llm.tokenizer.encode(prose(), add_special_tokens=False)
    cases = list(product(args.contexts, args.workloads))
    for context, workload in tqdm(cases, desc="lookahead", unit="prompt", disable=not is_first):
        prompt, needle = make_prompt(workload, llm.tokenizer, text, context - args.max_tokens, args.max_tokens)
        with llm.hold(prompt) as held:
            case = Case(
                workload=workload,
                context=context,
                held=held,
                sampling=sampling_of(workload, args.max_tokens),
                needle=needle,
            )
            runs += (measure_table if args.table else measure)(bench, case, args)
    rows = summarise(runs)
    broken = broken_promises(rows)
    if is_first:
        tp, model = llm.engine.tp, llm.engine.runner.model
        print(
            f"{args.model} on {tp.device.type}, {str(model.dtype).removeprefix('torch.')}, TP {tp.size}, "
            f"{torch.get_num_threads()} thread(s) per rank; 2bit, tail estimate on; {args.max_tokens} tokens each"
        )
        print(format_small_table(rows) if args.table else format_tables(rows))
        for promise in broken:
            print(f"not held: {promise}")
        if args.out is not None:
            for path in write_files(runs, rows, Path(args.out)):
                print(f"written: {path}")
        print(json.dumps({"rows": rows} if args.table else {"workloads": json_workloads(rows)}), flush=True)
    llm.close()
    return 1 if args.check and broken else 0
