"""What the lookahead benchmark says of its runs: figures, tables, a plot by layer, and what is promised."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from oasis_tp.bench.lookahead_watch import Step, by_layer, share

Workload = Literal["needle", "copy", "free"]
COPY_HOT_FACTOR = 4.0
"""Where the JSON line has `copy` from."""
ALL = "all"
"""The context of a row over all of them."""
RIGHT_HITS, RIGHT_MASS = 0.985, 0.995
COPY_ACCEPTED, COPY_SPEEDUP, FREE_SPEEDUP = 1.5, 1.5, 0.95
REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Timed:
    """One timed run: its steps after the fork's start, the tokens they brought."""

    num_steps: int
    num_tokens: int
    seconds: float
    num_bytes: int
    """From the host tier to the device."""
    wait_s: float
    """What the compute spent on copies: its own, and waiting for those in the background."""


@dataclass(kw_only=True, slots=True)
class Measured:
    """The runs of one prompt with one drafter. `lru`: the steps without prefetching; [] where they were not watched."""

    workload: Workload
    context: int
    mode: str
    budget: int
    hot_factor: float
    drafts: str
    text: list[int]
    steps: list[Step]
    lru: list[Step]
    num_accepted: int
    texts_differ: bool = False
    found: bool | None = None
    timed: dict[str, list[Timed]] = field(default_factory=dict)
    """By `on`, `off` (prefetching), `no drafts`."""
    default: Literal["on", "off"] = "off"
    """What --prefetch auto means on this machine."""


def summarise(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row per workload, context, mode, budget, hot factor and drafter; then, of several contexts, one over all."""
    groups: defaultdict[tuple[Any, ...], list[Measured]] = defaultdict(list)
    for run in runs:
        groups[run.workload, run.context, run.mode, run.budget, run.hot_factor, run.drafts].append(run)
    rows = [_row(members, members[0].context) for members in groups.values()]
    if len({run.context for run in runs}) > 1:
        pooled: defaultdict[tuple[Any, ...], list[Measured]] = defaultdict(list)
        for run in runs:
            pooled[run.workload, run.mode, run.budget, run.hot_factor, run.drafts].append(run)
        rows += [_row(members, ALL) for members in pooled.values()]
    return rows


def _row(runs: list[Measured], context: int | str) -> dict[str, Any]:
    first = runs[0]
    steps = [step for run in runs for step in run.steps if step.follows]
    lru = [step for run in runs for step in _same_rows(run)]
    right, other = _split(steps)
    right_lru = [step for run in runs for step in _same_rows(run, right=True)]
    other_lru = [step for run in runs for step in _same_rows(run, right=False)]
    drafted = [step for step in steps if step.draft is not None]
    row = {
        "workload": first.workload,
        "context": context,
        "mode": first.mode,
        "budget": first.budget,
        "hot_factor": first.hot_factor,
        "drafts": first.drafts,
        "steps": len(steps),
        "steps_draft_right": len(right),
        "steps_draft_wrong": len(drafted) - len(right),
        "found": [run.found for run in runs] if first.workload == "needle" else None,
        "texts_differ": any(run.texts_differ for run in runs),
        "hit_rate": _hits(steps),
        "mass_hit_rate": _mass(steps),
        "hit_rate_draft_right": _hits(right),
        "mass_hit_rate_draft_right": _mass(right),
        "hit_rate_draft_wrong": _hits(other),
        "mass_hit_rate_draft_wrong": _mass(other),
        "lru_hit_rate": _hits(lru),
        "lru_mass_hit_rate": _mass(lru),
        "lru_hit_rate_draft_right": _hits(right_lru),
        "lru_hit_rate_draft_wrong": _hits(other_lru),
        "lru_mass_hit_rate_draft_wrong": _mass(other_lru),
        "prev_query_agreement": share(steps, "same_as_previous", "selected"),
        "draft_query_agreement": share(drafted, "same_as_draft", "selected"),
        "draft_query_agreement_draft_right": share(right, "same_as_draft", "selected"),
        "accepted_per_step": sum(run.num_accepted for run in runs) / max(1, sum(len(run.steps) for run in runs)),
    }
    if first.timed:
        times = {name: [timed for run in runs for timed in run.timed[name]] for name in first.timed}
        num_steps = {name: sum(timed.num_steps for timed in of) for name, of in times.items()}
        rate = {name: sum(t.num_tokens for t in of) / sum(t.seconds for t in of) for name, of in times.items()}
        wait_ms = {name: 1e3 * sum(t.wait_s for t in of) / num_steps[name] for name, of in times.items()}
        moved = {name: sum(t.num_bytes for t in of) for name, of in times.items()}
        row |= {
            "bytes_moved": moved["on"],
            "bytes_per_step": moved["on"] / num_steps["on"],
            "bytes_per_step_no_prefetch": moved["off"] / num_steps["off"],
            "exposed_wait_ms": wait_ms["on"],
            "exposed_wait_ms_no_prefetch": wait_ms["off"],
            "tokens_per_s": rate[first.default],
            "tokens_per_s_prefetch": rate["on"],
            "tokens_per_s_no_prefetch": rate["off"],
            "tokens_per_s_no_drafts": rate["no drafts"],
        }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def _hits(steps: Sequence[Step]) -> float | None:
    return share(steps, "resident", "selected")


def _mass(steps: Sequence[Step]) -> float | None:
    return share(steps, "resident_mass", "mass")


def _split(steps: Iterable[Step]) -> tuple[list[Step], list[Step]]:
    """Those whose draft was right; those where it was wrong or absent."""
    right: list[Step] = []
    other: list[Step] = []
    for step in steps:
        (right if step.draft == step.tokens[0] else other).append(step)
    return right, other


def _same_rows(run: Measured, right: bool | None = None) -> list[Step]:
    """The steps without prefetching whose first row is that of a step with it: of all, or of one side of the split."""
    steps = [step for step in run.steps if step.follows]
    if right is not None:
        steps = _split(steps)[0 if right else 1]
    positions = {step.position for step in steps}
    return [step for step in run.lru if step.follows and step.position in positions]


def broken_promises(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where lookahead achieves less than it promises, over all contexts.

    At hot factor 2 and budget 512: where a draft was right, 98.5 % of the selected blocks and 99.5 % of their mass are
    there; elsewhere as many as least-recently-selected eviction keeps. At hot factor 4 copying has 1.5 drafts accepted
    per step and is 1.5 times as fast; free text is at most 5 % slower. Texts are the same in all runs.
    """
    broken = []

    def check(row: dict[str, Any], name: str, least: float | None) -> None:
        if least is not None and row.get(name) is not None and row[name] < least:
            broken.append(f"{_where(row)}: {name} {row[name]:.4g}, at least {least:.4g}")

    for row in _pooled(rows):
        if row["mode"] != "resolve":
            continue
        if row["texts_differ"]:
            broken.append(f"{_where(row)}: drafts or prefetching changed the text")
        if row["budget"] == 512 and row["hot_factor"] == 2.0:
            check(row, "hit_rate_draft_right", RIGHT_HITS)
            check(row, "mass_hit_rate_draft_right", RIGHT_MASS)
            check(row, "hit_rate_draft_wrong", row["lru_hit_rate_draft_wrong"])
        if "tokens_per_s" not in row:
            continue
        if row["workload"] == "copy" and row["hot_factor"] == COPY_HOT_FACTOR:
            check(row, "accepted_per_step", COPY_ACCEPTED)
            check(row, "tokens_per_s", COPY_SPEEDUP * row["tokens_per_s_no_drafts"])
        if row["workload"] == "free":
            check(row, "tokens_per_s", FREE_SPEEDUP * row["tokens_per_s_no_drafts"])
    return broken


def _pooled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows over all contexts; where there is one context, its own."""
    return [row for row in rows if row["context"] == ALL] or list(rows)


def _where(row: dict[str, Any]) -> str:
    return (
        f"{row['workload']} at {row['context']}, {row['mode']}, budget {row['budget']}, hot factor "
        f"{row['hot_factor']:g}, drafts {row['drafts']}"
    )


JSON_KEYS = (
    *("hit_rate", "mass_hit_rate", "hit_rate_draft_right", "mass_hit_rate_draft_right", "hit_rate_draft_wrong"),
    *("lru_hit_rate", "prev_query_agreement", "draft_query_agreement", "accepted_per_step"),
    *("bytes_moved", "exposed_wait_ms", "tokens_per_s", "tokens_per_s_no_drafts"),
)


def json_workloads(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per workload the figures of its timed runs over all contexts; `copy` at hot factor 4."""
    timed = [row for row in _pooled(rows) if "tokens_per_s" in row]
    # The last one of a workload: copy's at hot factor 4 comes after that at --hot-factor.
    return {row["workload"]: {key: row[key] for key in JSON_KEYS} for row in timed}


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """What is on the device when a row's query is known, then what drafts and prefetching bring."""
    hits = [
        "| workload | context | hot factor | drafts | steps: right, wrong, none | draft right: hits / mass | LRU there "
    ]
    hits[0] += "| wrong or none: hits / mass | LRU there | previous query | draft query | right ones |"
    hits.append("|---" * 12 + "|")
    speed = ["| workload | context | hot factor | accepted per step | MiB per step: prefetch, none "]
    speed[0] += "| wait ms per step: prefetch, none | tokens/s: prefetch, none | no drafts | ratio |"
    speed.append("|---" * 9 + "|")
    for row in rows:
        name = row["drafts"] if row["mode"] == "resolve" else f"{row['drafts']}, mode {row['mode']}"
        start = f"| {row['workload']} | {row['context']} | {row['hot_factor']:g} | "
        without = row["steps"] - row["steps_draft_right"] - row["steps_draft_wrong"]
        cells = [
            name,
            f"{row['steps_draft_right']}, {row['steps_draft_wrong']}, {without}",
            f"{_percent(row['hit_rate_draft_right'])} / {_percent(row['mass_hit_rate_draft_right'])}",
            _percent(row["lru_hit_rate_draft_right"]),
            f"{_percent(row['hit_rate_draft_wrong'])} / {_percent(row['mass_hit_rate_draft_wrong'])}",
            f"{_percent(row['lru_hit_rate_draft_wrong'])} / {_percent(row['lru_mass_hit_rate_draft_wrong'])}",
            _percent(row["prev_query_agreement"]),
            _percent(row["draft_query_agreement"]),
            _percent(row["draft_query_agreement_draft_right"]),
        ]
        hits.append(start + " | ".join(cells) + " |")
        if "tokens_per_s" in row:
            ratio = row["tokens_per_s"] / row["tokens_per_s_no_drafts"]
            speed.append(
                f"{start}{row['accepted_per_step']:.2f} | {row['bytes_per_step'] / 2**20:.2f}, "
                f"{row['bytes_per_step_no_prefetch'] / 2**20:.2f} | {row['exposed_wait_ms']:.2f}, "
                f"{row['exposed_wait_ms_no_prefetch']:.2f} | {row['tokens_per_s_prefetch']:.1f}, "
                f"{row['tokens_per_s_no_prefetch']:.1f} | {row['tokens_per_s_no_drafts']:.1f} | {ratio:.2f} |"
            )
    return "\n".join([*hits, "", *speed, *_needles(rows)])


def _needles(rows: Sequence[dict[str, Any]]) -> list[str]:
    asked = [row for row in rows if row["found"] is not None and row["context"] != ALL and row["drafts"] != REPLAY]
    if not asked:
        return []
    modes = dict.fromkeys(row["mode"] for row in asked)
    counts = {mode: [found for row in asked if row["mode"] == mode for found in row["found"]] for mode in modes}
    return ["", "needles found: " + ", ".join(f"{mode} {sum(of)} of {len(of)}" for mode, of in counts.items())]


def format_small_table(rows: Sequence[dict[str, Any]]) -> str:
    """Hit rates by hot factor and budget: with prefetching, and least recently selected alone."""
    pooled = _pooled(rows)
    budgets, factors = (sorted({row[name] for row in pooled}) for name in ("budget", "hot_factor"))
    cells = {(row["workload"], row["budget"], row["hot_factor"]): row for row in pooled}
    columns = " | ".join(f"hot factor {factor:g}: hits / mass (LRU)" for factor in factors)
    lines = [f"| workload | budget | {columns} |", "|---" * (2 + len(factors)) + "|"]
    for workload, budget in product(dict.fromkeys(row["workload"] for row in pooled), budgets):
        shown = [
            f"{_percent(row['hit_rate'])} / {_percent(row['mass_hit_rate'])} ({_percent(row['lru_hit_rate'])})"
            for row in (cells[workload, budget, factor] for factor in factors)
        ]
        lines.append(f"| {workload} | {budget} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def write_files(runs: Sequence[Measured], rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Write lookahead.json (all rows) and lookahead.png (by layer, a panel per workload).

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--out: no figure without matplotlib; pip install 'oasis-tp[bench]'") from error
    directory.mkdir(parents=True, exist_ok=True)
    table, picture = directory / "lookahead.json", directory / "lookahead.png"
    table.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    workloads = list(dict.fromkeys(run.workload for run in runs))
    figure = Figure(figsize=(4.5 * len(workloads), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        for label, curve in curves([run for run in runs if run.workload == workload]).items():
            axis.plot(range(len(curve)), curve, marker=".", label=label)
        axis.set(title=workload, xlabel="layer", ylabel="share of the next row's blocks", ylim=(0.4, 1.01))
        axis.legend(fontsize=7)
    figure.savefig(picture, dpi=120)
    return [table, picture]


def curves(runs: Sequence[Measured]) -> dict[str, list[float]]:
    """By layer, of the runs at the lowest hot factor in mode resolve, all contexts and drafters: who knows how much of
    what the next row selects."""
    resolved = [run for run in runs if run.mode == "resolve"]
    factor = min(run.hot_factor for run in resolved)
    chosen = [run for run in resolved if run.hot_factor == factor]
    steps = [step for run in chosen for step in run.steps if step.follows]
    right, other = _split(steps)
    lru = [step for run in chosen for step in _same_rows(run)]
    drawn: list[tuple[str, list[Step], str]] = [
        ("top-k of the previous query", steps, "same_as_previous"),
        ("top-k of the draft, right", right, "same_as_draft"),
        ("top-k of the draft, wrong", [step for step in other if step.draft is not None], "same_as_draft"),
        ("on the device: LRU", lru, "resident"),
        ("on the device: draft wrong or none", other, "resident"),
        ("on the device: draft right", right, "resident"),
    ]
    found = {label: by_layer(members, part, "selected") for label, members, part in drawn}
    return {label: curve.tolist() for label, curve in found.items() if curve is not None}
