"""What retrieval answers say: scores beside dense on the same samples, tables, and figures."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from oasis_tp.bench.answers import Answer, Mode

MIN_DENSE_SCORE = 20.0
"""A task that dense attention itself scores below shows nothing of what sparse attention loses: it is not pooled."""
POOLED = "all"
"""The name of the row over all pooled tasks and lengths."""
PROMISES = {512: 1.0, 256: 2.0}
"""Budget -> points that resolve with 2-bit sketches and tail estimate may lose to dense, with two standard errors."""
MIN_SAMPLES = 200
"""With fewer pooled samples the standard error is so large that any loss would pass: nothing is shown."""
DEPTH_BINS = 10


def summarise(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """One row per task, length and mode, then one per mode over all tasks that dense scores MIN_DENSE_SCORE or more.

    Scores are 0 to 100. `diff_to_dense` is the mean paired difference over the samples that both modes answered, `se`
    its standard error (None for fewer than two pairs); flips are samples that scored lower or higher than in dense.
    """
    dense = {answer.digest: answer for answer in answers if answer.mode.mode == "dense" and answer.error is None}
    groups: defaultdict[tuple[str, int, Mode], list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.task, answer.max_length, answer.mode].append(answer)
    order = list(dict.fromkeys(answer.mode for answer in answers))
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    ranked = sorted(groups.items(), key=lambda item: (tasks.index(item[0][0]), item[0][1], order.index(item[0][2])))
    rows = [_row(task, length, mode, members, dense) for (task, length, mode), members in ranked]
    pooled = set(pooled_tasks(answers))
    for mode in order:
        if members := [answer for answer in answers if answer.mode == mode and answer.task in pooled]:
            rows.append(_row(POOLED, None, mode, members, dense))
    return rows


def pooled_tasks(answers: Iterable[Answer]) -> list[str]:
    """Tasks that dense answers well enough, over all lengths; all tasks where nothing was answered densely."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    answers = list(answers)
    for answer in answers:
        if answer.mode.mode == "dense" and answer.error is None:
            scores[answer.task].append(answer.score)
    if not scores:
        return list(dict.fromkeys(answer.task for answer in answers))
    return [task for task, values in scores.items() if 100 * fmean(values) >= MIN_DENSE_SCORE]


def _row(task: str, length: int | None, mode: Mode, members: list[Answer], dense: dict[str, Answer]) -> dict[str, Any]:
    answered = [answer for answer in members if answer.error is None]
    pairs = [(answer, dense[answer.digest]) for answer in answered if answer.digest in dense]
    differences = [100 * (answer.score - other.score) for answer, other in pairs]
    is_compared = bool(pairs) and mode.mode != "dense"

    def flips(sign: int) -> list[dict[str, Any]]:
        changed = [answer for answer, other in pairs if sign * (answer.score - other.score) > 0]
        return [
            {"task": answer.task, "length": answer.max_length, "index": answer.index, "depth": answer.depth}
            for answer in changed
        ]

    return {
        "task": task,
        "mode": mode.mode,
        "sketch": mode.sketch,
        "budget": mode.budget,
        "tail": mode.tail,
        "length": length,
        "n": len(answered),
        "score": _rounded(100 * fmean(a.score for a in answered)) if answered else None,
        "diff_to_dense": _rounded(fmean(differences)) if is_compared else None,
        "se": _rounded(stdev(differences) / math.sqrt(len(pairs))) if is_compared and len(pairs) > 1 else None,
        "flips_down": flips(-1),
        "flips_up": flips(1),
        "missed_mass": _mean(answer.missed_mass for answer in answered),
        "hit_rate": _mean(answer.hit_rate for answer in answered),
        "attended_share": _mean(answer.attended_share for answer in answered),
        "errors": len(members) - len(answered),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def _rounded(value: float) -> float:
    return round(value, 3) + 0.0  # no minus zero


def promises(rows: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """For each promise that the pooled rows speak of: whether it is held, and the figures in words."""
    found = []
    for row in rows:
        allowed = PROMISES.get(row["budget"])
        if row["task"] != POOLED or row["sketch"] != "2bit" or not row["tail"] or allowed is None or row["se"] is None:
            continue
        bound = row["diff_to_dense"] + 2 * row["se"]
        held = bound >= -allowed and row["n"] >= MIN_SAMPLES
        verdict = "held" if held else "NOT HELD"
        if row["n"] < MIN_SAMPLES:
            verdict = f"NOT SHOWN, {row['n']} samples of the {MIN_SAMPLES} that it takes"
        found.append(
            (
                held,
                f"2bit + tail at budget {row['budget']}: d = {row['diff_to_dense']:+.2f}, se = {row['se']:.2f}, "
                f"d + 2 se = {bound:+.2f}, promised ≥ {-allowed:.1f}: {verdict}",
            )
        )
    return found


def _label(row: dict[str, Any]) -> str:
    return Mode(**{name: row[name] for name in ("mode", "sketch", "budget", "tail")}).label


def format_report(rows: list[dict[str, Any]], made_with: dict[str, Any], figures: Sequence[Path] = ()) -> str:
    """The report as markdown."""
    pooled = [row for row in rows if row["task"] == POOLED]
    lines = ["# Retrieval", "", *(f"- {name}: {value}" for name, value in made_with.items()), ""]
    lines += ["## All tasks", ""]
    lines += _table(pooled) if pooled else [f"No task that dense attention scores {MIN_DENSE_SCORE:g} or more."]
    lines += ["", *(text for _, text in promises(rows)), ""]
    weak = _weak_tasks(rows)
    if weak:
        lines += [f"Not in it, because dense attention scores them under {MIN_DENSE_SCORE:g}: {', '.join(weak)}.", ""]
    lines += ["## By task and length", "", *_table([row for row in rows if row["task"] != POOLED]), ""]
    lines += ["## Samples that flipped", ""]
    flipped = [
        f"- {word}: {row['task']} {row['length']}, {_label(row)}: {_places(row[f'flips_{word}'])}"
        for row in rows
        if row["task"] != POOLED
        for word in ("down", "up")
        if row[f"flips_{word}"]
    ]
    lines += flipped or ["None."]
    lines += ["", *(f"![{path.stem}]({path.name})" for path in figures)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _weak_tasks(rows: list[dict[str, Any]]) -> list[str]:
    scores: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for row in rows:
        if row["mode"] == "dense" and row["task"] != POOLED and row["score"] is not None:
            scores[row["task"]].append((row["score"], row["n"]))
    return [
        task
        for task, parts in scores.items()
        if sum(score * n for score, n in parts) / sum(n for _, n in parts) < MIN_DENSE_SCORE
    ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| task | length | mode | n | score | to dense | se | down | up | missed mass | hit rate | attended |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            row["task"],
            row["length"] or "",
            _label(row),
            row["n"] if not row["errors"] else f"{row['n']} (+{row['errors']} failed)",
            _shown(row["score"], ".1f"),
            _shown(row["diff_to_dense"], "+.2f"),
            _shown(row["se"], ".2f"),
            len(row["flips_down"]),
            len(row["flips_up"]),
            _shown(row["missed_mass"], ".4f"),
            _shown(row["hit_rate"], ".3f"),
            _shown(row["attended_share"], ".3f"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _places(flips: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{flip['index']}" + ("" if flip["depth"] is None else f" (depth {flip['depth']:.2f})") for flip in flips
    )


def draw_figures(answers: Sequence[Answer], rows: list[dict[str, Any]], directory: Path) -> list[Path]:
    """Write `depth.png` (score by depth and length, a panel per mode) and `budget.png` (pooled score by budget).

    A figure with nothing to show is left out.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("no figures without matplotlib; pip install 'oasis-tp[bench]'") from error

    def write(name: str, draw: Callable[[Any], bool], width: float, height: float) -> list[Path]:
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        if not draw(figure):
            return []
        figure.savefig(directory / name, dpi=120)
        return [directory / name]

    num_modes = len({answer.mode for answer in answers})
    num_rows = math.ceil(num_modes / 4)
    written = write(
        "depth.png", lambda figure: _draw_depths(figure, answers), 3.5 * min(4, num_modes) + 1, 2.6 * num_rows + 0.4
    )
    return written + write("budget.png", lambda figure: _draw_budgets(figure, rows), 6, 4)


def depth_map(answers: Iterable[Answer], lengths: Sequence[int]) -> list[list[float]]:
    """Mean score (0 to 100) by depth bin and length; NaN where there is no answer. [DEPTH_BINS][lengths]"""
    cells: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for answer in answers:
        if answer.depth is not None and answer.error is None:
            place = min(DEPTH_BINS - 1, int(answer.depth * DEPTH_BINS))
            cells[place, lengths.index(answer.max_length)].append(100 * answer.score)
    return [
        [fmean(cells[place, column]) if (place, column) in cells else math.nan for column in range(len(lengths))]
        for place in range(DEPTH_BINS)
    ]


def _draw_depths(figure: Any, answers: Sequence[Answer]) -> bool:
    with_depth = [answer for answer in answers if answer.depth is not None and answer.error is None]
    if not with_depth:
        return False
    modes = list(dict.fromkeys(answer.mode for answer in with_depth))
    lengths = sorted({answer.max_length for answer in with_depth})
    num_columns = min(4, len(modes))
    axes = list(figure.subplots(math.ceil(len(modes) / num_columns), num_columns, squeeze=False).flat)
    image = None
    for axis, mode in zip(axes, modes, strict=False):
        image = axis.imshow(
            depth_map((answer for answer in with_depth if answer.mode == mode), lengths),
            vmin=0,
            vmax=100,
            cmap="RdYlGn",
            aspect="auto",
        )
        axis.set_title(mode.label, fontsize=9)
        axis.set_xticks(range(len(lengths)), map(str, lengths), fontsize=7)
        axis.set_yticks([-0.5, DEPTH_BINS / 2 - 0.5, DEPTH_BINS - 0.5], ["0", "0.5", "1"], fontsize=7)
        axis.set_xlabel("length [tokens]", fontsize=7)
        axis.set_ylabel("depth", fontsize=7)
    for axis in axes[len(modes) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=figure.axes, label="score")
    return True


def _draw_budgets(figure: Any, rows: list[dict[str, Any]]) -> bool:
    pooled = [row for row in rows if row["task"] == POOLED and row["score"] is not None]
    curves: defaultdict[tuple[str, bool], list[tuple[int, float, float]]] = defaultdict(list)
    for row in pooled:
        if row["mode"] in ("resolve", "paper"):
            name = row["mode"] if row["mode"] == "paper" else row["sketch"]
            curves[name, row["tail"]].append((row["budget"], row["score"], row["se"] or 0.0))
    if not curves:
        return False
    axis = figure.subplots()
    for (name, tail), points in curves.items():
        x, y, errors = zip(*sorted(points), strict=True)
        axis.errorbar(x, y, yerr=errors, marker="o", capsize=3, label=name + (" + tail" if tail else ""))
    for row in pooled:
        if row["mode"] == "dense":
            axis.axhline(row["score"], color="black", linestyle="--", label="dense")
    axis.set_xscale("log", base=2)
    budgets = sorted({point[0] for points in curves.values() for point in points})
    axis.set_xticks(budgets, map(str, budgets))
    axis.minorticks_off()
    axis.set_xlabel("budget [tokens]")
    axis.set_ylabel("score (bars: se of the difference to dense)")
    axis.legend(fontsize=8)
    return True
