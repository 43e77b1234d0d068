"""The decode benchmark: its ceiling by hand, what it times, and its report on a tiny random model."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from oasis_tp.bench import decode as bench
from oasis_tp.bench import peers as peers_module
from oasis_tp.bench.ceiling import StepBytes, bytes_per_second, read_weight_bytes, step_bytes
from oasis_tp.bench.contest import Contestant
from oasis_tp.bench.decode_report import curves, draw, format_ceilings, format_parts, format_rows
from oasis_tp.bench.forks import WARM_STEPS, Decoded, Forks
from oasis_tp.bench.step_parts import PARTS, REST, PartTimer
from oasis_tp.config import SparsityConfig
from oasis_tp.engine.engine import Engine
from oasis_tp.kv.layout import KvLayout
from oasis_tp.llm import make_config
from tests.tiny import make_tiny

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype_bytes=4)
SPARSE = SparsityConfig(budget_tokens=32, recent_tokens=32, hot_factor=2.0)
DENSE = replace(SPARSE, attention="dense")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def forks(tiny: Path) -> Iterator[Forks]:
    engine = Engine.create(
        make_config(model=str(tiny), budget_tokens=32, recent_tokens=32, hot_factor=2.0, max_num_seqs=4)
    )
    yield Forks(engine, list(range(3, 300)))
    engine.tp.close()


def test_ceiling_of_a_dense_step_is_weights_and_every_block() -> None:
    assert step_bytes(1000, LAYOUT, DENSE, 8192, 4) == StepBytes(
        weights=1000, kv=4 * 8192 * 2 * 30 * 3 * 64 * 4, sketch=0
    )


def test_ceiling_of_a_sparse_step_is_weights_pinned_selected_and_the_sketch_of_every_candidate() -> None:
    sparsity = SparsityConfig(budget_tokens=512, recent_tokens=128, sink_blocks=1)
    # The row at 8,191 stands in block 511: candidates 1 to 502; attended 32 + 1 + 8 + 1 blocks.
    kv, sketch = 42 * 16 * 2 * 30 * 3 * 64 * 4, 502 * 30 * 3 * (6 * 64 + 36)
    assert step_bytes(1000, LAYOUT, sparsity, 8192, 4) == StepBytes(weights=1000, kv=4 * kv, sketch=4 * sketch)


def test_ceiling_of_a_step_whose_budget_covers_the_context_is_that_of_dense() -> None:
    wide = SparsityConfig(budget_tokens=1024)
    assert step_bytes(7, LAYOUT, wide, 1024, 2) == step_bytes(7, LAYOUT, DENSE, 1024, 2)


def test_weights_read_are_all_but_an_embedding_that_is_no_head(forks: Forks) -> None:
    hidden, vocab, mlp, layers, heads = 144, 311, 203, 3, 15
    per_layer = hidden * 16 * heads + 9 * 16 * hidden + 3 * hidden * mlp + 2 * hidden
    assert read_weight_bytes(forks.engine.runner.model) == 4 * (layers * per_layer + hidden + vocab * hidden)


def test_row_holds_the_median_the_slowest_of_few_and_the_share_of_the_ceiling() -> None:
    contestant = Contestant(
        engine="e",
        mode="m",
        dtype="float32",
        context=9,
        batch=2,
        ceiling=StepBytes(weights=5_000_000, kv=3_000_000, sketch=2_000_000),
        decode=lambda: Decoded(step_s=[], hot_kv_bytes=0),
    )
    contestant.turns = [
        Decoded(step_s=[0.1, 0.1], hot_kv_bytes=6, hit_rate=0.5, loaded_bytes=1),
        Decoded(step_s=[0.2, 0.2, 0.2], hot_kv_bytes=7, hit_rate=0.7, loaded_bytes=2),
    ]
    assert contestant.row(1e9) == {
        "engine": "e", "mode": "m", "dtype": "float32", "context": 9, "batch": 2, "ms_per_step": 200.0,
        "p99_ms": 200.0, "ceiling_ms": 10.0, "ceiling_parts_ms": {"weights": 5.0, "kv": 3.0, "sketch": 2.0},
        "ceiling_share": 0.05, "hot_kv_bytes": 7, "hit_rate": 0.6, "loaded_bytes_per_step": 2, "parts_ms": {},
    }  # fmt: skip


def test_forks_decode_together_from_one_prefill_and_leave_nothing(forks: Forks) -> None:
    engine = forks.engine
    held = forks.hold(400)
    assert held.prompt_ids[:297] == tuple(range(3, 300)) and held.prompt_ids[297:] == tuple(range(3, 106))
    before = engine.stats()
    assert before.prompt_tokens == 400
    decoded = forks.decode([held], SPARSE, 3, 5)
    after = engine.stats()
    assert after.prompt_tokens == 400, "the forks are not prefilled again"
    assert after.generation_tokens - before.generation_tokens == 3 * (1 + WARM_STEPS + 5)
    assert len(decoded.step_s) == 5 and min(decoded.step_s) > 0
    assert decoded.hot_kv_bytes == 3 * (2 * 2 + 4) * engine.runner.cache.layout.page_bytes
    assert decoded.hit_rate is not None and 0 < decoded.hit_rate < 1
    assert decoded.loaded_bytes > 0
    dense = forks.decode([held], DENSE, 3, 5)
    assert dense.hot_kv_bytes == 3 * 26 * engine.runner.cache.layout.page_bytes  # 408 tokens
    assert dense.hit_rate is None and dense.loaded_bytes == 0
    forks.release(held)
    engine.check_integrity()
    assert engine.stats().host_blocks_used == engine.stats().kv_pages_used == 0


def test_a_batch_that_does_not_fit_is_refused_by_its_option(forks: Forks) -> None:
    held = forks.hold(400)
    with pytest.raises(ValueError, match="--batches 5 in mode resolve: 4 requests of 400 prompt tokens fit"):
        forks.decode([held], SPARSE, 5, 2)
    while forks.engine.has_work:
        forks.engine.step()
    forks.release(held)


def test_every_timed_function_exists_and_is_itself_again_afterwards(forks: Forks) -> None:
    timer = PartTimer(torch.device("cpu"))
    plain = Engine.step, type(forks.engine.runner.model).forward
    with timer.installed():
        assert type(forks.engine.runner.model).forward is not plain[1]
    assert (Engine.step, type(forks.engine.runner.model).forward) == plain


def test_a_part_is_its_own_time_without_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock: outer begins at 1, inner lasts from 2 to 5, outer ends at 9, and so does the step that began at 0."""
    times = iter([0.0, 1.0, 2.0, 5.0, 9.0, 10.0])
    monkeypatch.setattr("oasis_tp.bench.step_parts.time.perf_counter", lambda: next(times))
    things = ModuleType("things")
    things.inner = lambda: None  # type: ignore[attr-defined]
    things.outer = lambda: things.inner()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "things", things)
    timer = PartTimer(torch.device("cpu"), {"inner": ("things:inner",), "outer": ("things:outer",)})
    timer.run(lambda: things.outer())
    assert timer.median_step() == {"inner": 3.0, "outer": 5.0, REST: 2.0}


def test_a_profile_names_every_part_of_a_step(forks: Forks) -> None:
    held = forks.hold(400)
    timer = PartTimer(torch.device("cpu"))
    forks.decode([held], SPARSE, 2, 16, timer)  # 16 steps end a block: one of them seals
    forks.release(held)
    assert len(timer.steps) == 16
    total = {part: sum(step[part] for step in timer.steps) for part in timer.steps[0]}
    assert list(total) == [*PARTS, REST]
    assert all(seconds > 0 for seconds in total.values()), total


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_report_holds_every_engine_mode_context_and_batch(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bytes_per_second", lambda tp: 1e9)
    monkeypatch.setattr(peers_module, "find_spec", lambda name: None)
    figure = tmp_path / "decode.png"
    # 600 is beyond the window of 512, and 400 beyond what is prefilled.
    flags = "--contexts 300,600 --batches 1,2 --modes dense,resolve,paper --budget-tokens 32 --steps 2 --rounds 1"
    flags += f" --prefill-tokens 320 --peers transformers,llama.cpp --peers-dir {tmp_path} --plot {figure}"
    args = parse("--model", str(tiny), *flags.split())
    assert bench.main(args) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [(row["context"], row["batch"], row["engine"], row["mode"]) for row in report["rows"]] == [
        (context, batch, "oasis_tp", mode)
        for context in (300, 600)
        for batch in (1, 2)
        for mode in ("dense", "resolve", "paper")
    ]
    for row in report["rows"]:
        assert row["ms_per_step"] > 0 and row["ceiling_ms"] > 0
        assert (row["hit_rate"] is None) == (row["mode"] == "dense")
        assert sum(row["parts_ms"].values()) > 0
    assert [left_out["engine"] for left_out in report["not_measured"]] == ["transformers", "llama.cpp"]
    assert f"llama.cpp: not measured: not installed in {tmp_path}; make bench-peers does it" in out
    assert "oasis_tp paper, context 600, batch 2: " in out
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "11"], "--contexts 11: more than the 11 tokens"),
        (["--batches", "2,0"], "--batches"),
        (["--prefill-tokens", "3"], "--prefill-tokens 3: at least a block"),
        (["--plot", "/no/such/place.png"], "--plot /no/such/place.png: there is no directory"),
        (["--steps", "0"], "--steps 0: at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench.main(parse(*arguments))
    with pytest.raises(SystemExit):
        parse("--modes", "dense,lossless")
    with pytest.raises(SystemExit):
        parse("--contexts", "8K")


def test_bandwidth_is_measured(forks: Forks) -> None:
    assert 1e8 < bytes_per_second(forks.engine.tp) < 1e14


def a_row(**changes: object) -> dict[str, object]:
    row = {
        "engine": "e", "mode": "dense", "dtype": "float32", "context": 8, "batch": 1, "ms_per_step": 4.0, "p99_ms": 5.0,
        "ceiling_ms": 1.0, "ceiling_share": 0.25, "ceiling_parts_ms": {"weights": 1.0, "kv": 0.0, "sketch": 0.0},
        "hot_kv_bytes": 2**20, "hit_rate": None, "parts_ms": {},
    }  # fmt: skip
    return row | changes


def test_tables_say_which_type_differs_and_where_the_time_went() -> None:
    rows = [a_row(parts_ms={"select": 1.5, "rest": 2.5}), a_row(engine="peer", dtype="bfloat16", hit_rate=0.5)]
    first, second = format_rows(rows).splitlines()[2:]
    assert first == "| e | dense | 8 | 1 | 4.0 | 5.0 | 250.0 | 1.00 | 25 % | 1.0 | – |"
    assert second.startswith("| peer (bfloat16) | dense | 8 |") and second.endswith("| 0.500 |")
    assert format_parts(rows).splitlines() == [
        "| mode | context | batch | select | rest |",
        "| --- | --- | --- | --- | --- |",
        "| dense | 8 | 1 | 1.50 | 2.50 |",
    ]
    assert format_ceilings(rows[:1]).splitlines()[-1] == "| e | dense | 8 | 1 | 1.00 | 0.00 | 0.00 |"


def test_the_figure_has_a_curve_for_each_engine_and_mode(tmp_path: Path) -> None:
    rows = [a_row(context=16, ms_per_step=8.0), a_row(), a_row(engine="peer"), a_row(mode="resolve", batch=4)]
    assert curves(rows) == {
        "e dense, batch 1": [(8, 4.0), (16, 8.0)],
        "peer dense, batch 1": [(8, 4.0)],
        "e resolve, batch 4": [(8, 4.0)],
    }
    draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
