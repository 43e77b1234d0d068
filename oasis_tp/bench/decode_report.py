"""What the decode benchmark shows: its tables, and time against context as a figure."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    *("engine", "mode", "context", "batch", "ms per step", "p99 ms", "tokens/s", "ceiling ms", "of it reached"),
    *("hot KV MiB", "hit rate"),
)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """One line per engine, mode, context and batch; "of it reached" is the ceiling's share of the step's time."""
    lines = []
    for row in rows:
        hit_rate = "–" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}"
        engine = row["engine"] + ("" if row["dtype"] == rows[0]["dtype"] else f" ({row['dtype']})")
        lines.append(
            [
                *(engine, row["mode"], row["context"], row["batch"]),
                *(f"{row['ms_per_step']:.1f}", f"{row['p99_ms']:.1f}"),
                f"{row['batch'] / row['ms_per_step'] * 1e3:.1f}",
                *(f"{row['ceiling_ms']:.2f}", f"{100 * row['ceiling_share']:.0f} %"),
                *(f"{row['hot_kv_bytes'] / 2**20:.1f}", hit_rate),
            ]
        )
    return table(COLUMNS, lines)


def format_ceilings(rows: Sequence[dict[str, Any]]) -> str:
    """What the ceilings are made of, in ms."""
    lines = [
        [row["engine"], row["mode"], row["context"], row["batch"]]
        + [f"{row['ceiling_parts_ms'][part]:.2f}" for part in ("weights", "kv", "sketch")]
        for row in rows
    ]
    return table(("engine", "mode", "context", "batch", "weights", "KV", "sketch"), lines)


def format_parts(rows: Sequence[dict[str, Any]]) -> str:
    """Where a step's time goes, in ms: rows with a profile only."""
    rows = [row for row in rows if row["parts_ms"]]
    parts = list(rows[0]["parts_ms"]) if rows else []
    lines = [
        [row["mode"], row["context"], row["batch"]] + [f"{row['parts_ms'][part]:.2f}" for part in parts] for row in rows
    ]
    return table(("mode", "context", "batch", *parts), lines)


def table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (columns, ["---"] * len(columns), *lines))


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Engine, mode and batch -> (context, ms per step) in ascending context."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["context"]):
        found[f"{row['engine']} {row['mode']}, batch {row['batch']}"].append((row["context"], row["ms_per_step"]))
    return dict(found)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write decode time against context, a panel per batch, to a PNG.

    Raises:
        ValueError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(5.0 * len(batches), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, batch in zip(figure.subplots(1, len(batches), squeeze=False).flat, batches, strict=True):
        for name, points in curves([row for row in rows if row["batch"] == batch]).items():
            contexts, times = zip(*points, strict=True)
            axis.plot(contexts, times, marker="o", label=name.rpartition(",")[0])
        every_context = sorted({row["context"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(every_context, map(str, every_context))
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(f"batch {batch}")
        axis.set_xlabel("context [tokens]")
        axis.set_ylabel("decode step [ms]")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
