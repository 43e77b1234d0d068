"""Needles found with each sketch and budget, beside dense attention in the same engine.

For each kind of prompt, length and depth one prompt is prefilled (dense, the same for all) and held; every mode answers
a fork of it, greedily. The prompt ends with the answer prefix, and a needle is found when its number is in the answer.
The first token is dense by construction; the number's other tokens are not. `noise` is niah_single_1, `prose`
niah_single_2 over technical prose (see bench/haystack.py). Also under torchrun.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from tqdm import tqdm

from oasis_tp.bench.haystack import PROSE_WINDOWS, Needle, Tokenizer, noise_needle, prose_needle
from oasis_tp.config import SketchKind, SparsityConfig
from oasis_tp.llm import LLM
from oasis_tp.request import KvStats, SamplingParams

Kind = Literal["noise", "prose"]
NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt. `length` in tokens, at most; `depth` 0 (first) to 1 (last); `seed` chooses key, number and prose."""

    prompt: Kind
    length: int
    depth: float
    seed: int

    def needle(self, tokenizer: Tokenizer) -> Needle:
        if self.prompt == "noise":
            return noise_needle(tokenizer, self.length, self.depth, self.seed)
        return prose_needle(tokenizer, self.length, self.depth, self.seed, self.seed % PROSE_WINDOWS)


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer."""

    case: Case
    sparsity: SparsityConfig
    found: bool
    kv: KvStats


def make_cases(kinds: list[Kind], lengths: list[int], num_depths: int, seed: int) -> list[Case]:
    """Depths from first to last, evenly; each has a seed of its own, the same at every length and kind."""
    return [
        Case(kind, length, round(index / max(1, num_depths - 1), 4), seed + index)
        for kind in kinds
        for length in lengths
        for index in range(num_depths)
    ]


def make_modes(
    sketches: list[SketchKind], budgets: list[int], hot_factor: float, *, paper: bool = False
) -> list[SparsityConfig]:
    """Dense, then every sketch at every budget, then the paper's mode."""
    settings: list[dict[str, Any]] = [{"sketch": sketch} for sketch in sketches]
    settings += [{"attention": "paper"}] if paper else []
    return [SparsityConfig(attention="dense")] + [
        SparsityConfig(budget_tokens=budget, hot_factor=hot_factor, **setting)
        for setting in settings
        for budget in budgets
    ]


def sweep(llm: LLM, cases: Iterable[Case], modes: list[SparsityConfig]) -> list[Trial]:
    """Every case in every mode; one prefill per case. An answer ends where the number is complete."""
    trials = []
    for case in cases:
        needle = case.needle(llm.tokenizer)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, stop=(needle.answer,))
        with llm.hold(needle.prompt) as held:
            for sparsity in modes:
                answer = llm.generate_from(held, sampling, sparsity=sparsity).outputs[0]
                if answer.error is not None or answer.kv is None:
                    raise RuntimeError(f"{case} with {sparsity}: {answer.error}")
                # A stop string is cut from the text, not from the tokens.
                found = needle.answer in llm.tokenizer.decode(answer.token_ids)
                trials.append(Trial(case, sparsity, found, answer.kv))
    return trials


def summarise(trials: list[Trial]) -> list[dict[str, Any]]:
    """One row per kind of prompt, length and mode. Flips are against dense on the same prompt: down lost, up gained."""
    dense = {trial.case: trial.found for trial in trials if trial.sparsity.attention == "dense"}
    groups: defaultdict[tuple[str, int, SparsityConfig], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.case.prompt, trial.case.length, trial.sparsity].append(trial)
    rows = []
    for (prompt, length, sparsity), members in groups.items():
        sparse = sparsity.attention != "dense"

        def flips(members: list[Trial], *, now_found: bool) -> list[dict[str, Any]]:
            changed = [t.case for t in members if t.found == now_found and dense[t.case] != now_found]
            return [{"depth": case.depth, "seed": case.seed} for case in changed]

        rows.append(
            {
                "prompt": prompt,
                "length": length,
                "mode": sparsity.attention,
                "sketch": sparsity.sketch if sparse else None,
                "budget": sparsity.budget_tokens if sparse else None,
                "n": len(members),
                "found": sum(trial.found for trial in members),
                "flips_down": flips(members, now_found=False),
                "flips_up": flips(members, now_found=True),
                "missed_mass": _mean([trial.kv.missed_mass for trial in members]) if sparse else None,
                "hit_rate": _mean([trial.kv.hit_rate for trial in members]) if sparse else None,
            }
        )
    return rows


def _mean(values: list[float | None]) -> float | None:
    """Of the values there are; None when there are none."""
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def broken_promises(rows: list[dict[str, Any]]) -> list[str]:
    """Where, in noise, 2bit loses a needle that dense finds; and where dense finds none, so that nothing is shown."""
    broken = []
    for row in rows:
        where = f"noise at {row['length']} tokens"
        if row["prompt"] == "noise" and row["mode"] == "dense" and row["found"] == 0:
            broken.append(f"{where}: dense finds no needle, so there is none to lose")
        if row["prompt"] == "noise" and row["sketch"] == "2bit" and row["flips_down"]:
            broken.append(f"{where}: 2bit at budget {row['budget']} loses {_places(row['flips_down'])}")
    return broken


def _places(flips: list[dict[str, Any]]) -> str:
    return ", ".join(f"depth {flip['depth']:.2f} (seed {flip['seed']})" for flip in flips)


def _mode_name(row: dict[str, Any]) -> str:
    if row["mode"] == "dense":
        return "dense"
    return f"{'paper' if row['mode'] == 'paper' else row['sketch']} {row['budget']}"


def format_table(rows: list[dict[str, Any]]) -> str:
    """Needles found, modes side by side, and every flip by name."""
    names = list(dict.fromkeys(_mode_name(row) for row in rows))
    lines = ["| prompt | length | needles | " + " | ".join(names) + " |", "|---|" + "---|" * (2 + len(names))]
    found = {(row["prompt"], row["length"], _mode_name(row)): row["found"] for row in rows}
    for prompt, length, count in dict.fromkeys((row["prompt"], row["length"], row["n"]) for row in rows):
        counts = " | ".join(str(found[prompt, length, name]) for name in names)
        lines.append(f"| {prompt} | {length} | {count} | {counts} |")
    lines.append("")
    for row in rows:
        for word in ("down", "up"):
            if flips := row[f"flips_{word}"]:
                lines.append(
                    f"{'lost' if word == 'down' else 'gained'}: {row['prompt']} {row['length']}, {_mode_name(row)}: "
                    f"{_places(flips)}"
                )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds, sketches = get_args(Kind), get_args(SketchKind)
    parser.add_argument("--model", default="smollm2", help="as for oasis_tp.serve (default: smollm2)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--prompts", nargs="+", choices=kinds, default=list(kinds), help="kinds of haystack (default: noise prose)"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4000, 7000], help="prompt tokens (default: 4000 7000)"
    )
    parser.add_argument("--depths", type=int, default=8, help="how many depths, first to last (default: 8)")
    parser.add_argument(
        "--sketches", nargs="+", choices=sketches, default=list(sketches), help="default: 2bit 1bit minmax"
    )
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[512, 256], help="tokens selected per row (default: 512 256)"
    )
    parser.add_argument(
        "--hot-factor", type=float, default=2.0, help="budgets' worth of blocks kept on the device (default: 2)"
    )
    parser.add_argument(
        "--paper", action="store_true", help="also ask in mode paper (see --attention of oasis_tp.serve)"
    )
    parser.add_argument("--seed", type=int, default=42, help="of the first depth; the others follow it (default: 42)")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 unless, in noise, 2bit finds every needle that dense finds"
    )


def main(args: argparse.Namespace) -> int:
    """Print the table, then one JSON line {"rows": [...]} (rank 0).

    Raises:
        ValueError: an option's value that cannot be measured.
    """
    if args.check and not ("noise" in args.prompts and "2bit" in args.sketches):
        raise ValueError("--check looks at 2bit in noise: leave noise in --prompts and 2bit in --sketches")
    if args.depths < 1:
        raise ValueError(f"--depths {args.depths}: at least 1")
    llm = LLM(
        args.model,
        extra_sketches=args.sketches + (["minmax"] if args.paper else []),
        revision=args.revision,
        max_model_len=max(args.lengths) + NEW_TOKENS,
        sketch=args.sketches[0],
        budget_tokens=max(args.budgets),
        hot_factor=args.hot_factor,
        max_num_seqs=2,  # the held prompt's blocks and those of one fork
    )
    is_first = llm.engine.tp.rank == 0
    cases = make_cases(args.prompts, args.lengths, args.depths, args.seed)
    trials = sweep(
        llm,
        tqdm(cases, desc="needles", unit="prompt", disable=not is_first),
        make_modes(args.sketches, args.budgets, args.hot_factor, paper=args.paper),
    )
    rows = summarise(trials)
    broken = broken_promises(rows) if args.check else []
    if is_first:
        tp, dtype = llm.engine.tp, str(llm.engine.runner.model.dtype).removeprefix("torch.")
        print(
            f"{args.model} on {tp.device.type}, {dtype}, TP {tp.size}; resolve with hot factor {args.hot_factor:g}, "
            f"tail estimate on; up to {NEW_TOKENS} tokens, greedy"
        )
        print(format_table(rows))
        for promise in broken:
            print(f"not held: {promise}")
        print(json.dumps({"rows": rows}), flush=True)
    llm.close()
    return 1 if broken else 0
