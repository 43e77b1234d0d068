"""What the retrieval report counts: paired differences, flips, pooled tasks, promises, figures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.bench import retrieval_report as report
from oasis_tp.bench.answers import Answer, Mode

DENSE = Mode(mode="dense")
AT_512 = Mode(mode="resolve", sketch="2bit", budget=512, tail=True)
AT_256 = Mode(mode="resolve", sketch="2bit", budget=256, tail=True)


def answers_of(task: str, length: int, scores: dict[Mode, list[float | None]], **figures: Any) -> list[Answer]:
    """One answer per mode and sample; None: it failed."""
    return [
        Answer(
            digest=f"{task}{length}{index}",
            task=task,
            index=index,
            max_length=length,
            depth=index / 3 if task == "needle" else None,
            mode=mode,
            pred="",
            outputs=("x",),
            score=value or 0.0,
            error="bad" if value is None else None,
            **(figures if mode != DENSE else {}),
        )
        for mode, values in scores.items()
        for index, value in enumerate(values)
    ]


def row_of(rows: list[dict[str, Any]], task: str, mode: Mode) -> dict[str, Any]:
    (row,) = [r for r in rows if (r["task"], r["mode"], r["budget"]) == (task, mode.mode, mode.budget)]
    return row


def test_differences_are_paired_and_flips_named_both_ways() -> None:
    answers = answers_of(
        "needle", 1000, {DENSE: [1, 0, 1, None], AT_512: [0.5, 1, 1, 1], AT_256: [1, 0, None, 0]}, missed_mass=0.25
    )
    rows = report.summarise(answers)
    dense, at_512, at_256 = (row_of(rows, "needle", mode) for mode in (DENSE, AT_512, AT_256))
    assert (dense["n"], dense["errors"], dense["score"], dense["diff_to_dense"]) == (3, 1, 66.667, None)
    # The pairs are samples 0 to 2: differences −50, +100 and 0.
    assert (at_512["n"], at_512["score"], at_512["diff_to_dense"]) == (4, 87.5, 16.667)
    assert at_512["se"] == pytest.approx(math.sqrt((66.667**2 + 83.333**2 + 16.667**2) / 2 / 3), abs=1e-3)
    assert at_512["flips_down"] == [{"task": "needle", "length": 1000, "index": 0, "depth": 0.0}]
    assert [flip["index"] for flip in at_512["flips_up"]] == [1]
    assert (at_256["diff_to_dense"], at_256["se"], at_256["missed_mass"], at_256["hit_rate"]) == (0.0, 0.0, 0.25, None)
    wanted = ["task", "mode", "sketch", "budget", "length", "n", "score", "diff_to_dense", "se"]
    assert set(wanted) | {"flips_down", "flips_up"} <= set(at_512)
    json.dumps(rows, allow_nan=False)


def test_tasks_that_dense_cannot_do_are_not_pooled() -> None:
    answers = answers_of("needle", 1000, {DENSE: [1, 1], AT_512: [1, 0]})
    answers += answers_of("needle", 2000, {DENSE: [0, 0], AT_512: [0, 0]})
    answers += answers_of("cwe", 1000, {DENSE: [0.1, 0.2], AT_512: [1, 1]})
    rows = report.summarise(answers)
    assert report.pooled_tasks(answers) == ["needle"]
    pooled = row_of(rows, report.POOLED, AT_512)
    assert (pooled["n"], pooled["diff_to_dense"], pooled["length"]) == (4, -25.0, None)
    text = report.format_report(rows, {"model": "tiny"})
    assert "scores them under 20: cwe." in text
    assert "- down: needle 1000, 2bit 512 + tail: 1 (depth 0.33)" in text
    assert "- up: cwe 1000, 2bit 512 + tail: 0, 1" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if "| dense |" in line] == [
        "all", "needle", "needle", "cwe",
    ]  # fmt: skip


def test_without_dense_there_is_nothing_to_compare_and_nothing_left_out() -> None:
    rows = report.summarise(answers_of("vt", 1000, {Mode(mode="endpoint"): [0, 0.5]}))
    assert [(row["task"], row["score"], row["diff_to_dense"]) for row in rows] == [
        ("vt", 25.0, None),
        ("all", 25.0, None),
    ]
    assert report.promises(rows) == []


@pytest.mark.parametrize(
    ("lost_of_200", "mode", "held"),
    [(0, AT_512, True), (2, AT_512, True), (10, AT_512, False), (10, AT_256, True), (14, AT_256, False)],
)
def test_a_promise_is_held_or_not(lost_of_200: int, mode: Mode, held: bool) -> None:
    scores: list[float | None] = [0.0] * lost_of_200 + [1.0] * (200 - lost_of_200)
    rows = report.summarise(answers_of("vt", 1000, {DENSE: [1.0] * 200, mode: scores}))
    ((said, text),) = report.promises(rows)
    mean = lost_of_200 / 2
    se = math.sqrt(mean * (100 - mean) / 199)
    assert said == held == (-mean + 2 * se >= -report.PROMISES[mode.budget or 0])
    assert ("NOT HELD" in text) != held and text in report.format_report(rows, {})


def test_few_samples_show_nothing() -> None:
    rows = report.summarise(answers_of("vt", 1000, {DENSE: [1.0] * 199, AT_512: [0.0] + [1.0] * 198}))
    ((held, text),) = report.promises(rows)
    assert not held and text.endswith("NOT SHOWN, 199 samples of the 200 that it takes")


def test_depth_map() -> None:
    answers = answers_of("needle", 1000, {DENSE: [1, 0, 0.5, 1]}) + answers_of("vt", 1000, {DENSE: [1]})
    cells = report.depth_map(answers, [1000, 2000])
    assert [row[0] for row in cells][::9] == [100.0, 100.0]
    assert (cells[3][0], cells[6][0]) == (0.0, 50.0)
    assert math.isnan(cells[1][0]) and all(math.isnan(row[1]) for row in cells)


def test_figures_are_drawn_where_there_is_something_to_show(tmp_path: Path) -> None:
    answers = answers_of("needle", 1000, {DENSE: [1, 0, 1], AT_512: [1, 0, 0], AT_256: [1, 0, 0]})
    rows = report.summarise(answers)
    figures = report.draw_figures(answers, rows, tmp_path)
    assert [path.name for path in figures] == ["depth.png", "budget.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    assert "![depth](depth.png)" in report.format_report(rows, {}, figures)
    plain = answers_of("vt", 1000, {DENSE: [1]})
    assert report.draw_figures(plain, report.summarise(plain), tmp_path) == []
