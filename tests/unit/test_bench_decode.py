"""The decode benchmark: its ceiling by hand, what it times, and its report on a tiny random model."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oasis_tp.bench import decode as bench
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
def forks(tiny: Path) -> Iterator[bench.Forks]:
    engine = Engine.create(
        make_config(model=str(tiny), budget_tokens=32, recent_tokens=32, hot_factor=2.0, max_num_seqs=4)
    )
    yield bench.Forks(engine, list(range(3, 300)))
    engine.tp.close()


def test_ceiling_of_a_dense_step_is_weights_and_every_block() -> None:
    assert bench.step_bytes(1000, LAYOUT, DENSE, 8192, 4) == 1000 + 4 * 8192 * 2 * 30 * 3 * 64 * 4


def test_ceiling_of_a_sparse_step_is_weights_pinned_selected_and_the_sketch_of_every_candidate() -> None:
    sparsity = SparsityConfig(budget_tokens=512, recent_tokens=128, sink_blocks=1)
    # The row at 8,191 stands in block 511: candidates 1 to 502; attended 32 + 1 + 8 + 1 blocks.
    kv, sketch = 42 * 16 * 2 * 30 * 3 * 64 * 4, 502 * 30 * 3 * (6 * 64 + 36)
    assert bench.step_bytes(1000, LAYOUT, sparsity, 8192, 4) == 1000 + 4 * (kv + sketch)


def test_ceiling_of_a_step_whose_budget_covers_the_context_is_that_of_dense() -> None:
    wide = SparsityConfig(budget_tokens=1024)
    assert bench.step_bytes(7, LAYOUT, wide, 1024, 2) == bench.step_bytes(7, LAYOUT, DENSE, 1024, 2)


def test_weights_read_are_all_but_an_embedding_that_is_no_head(forks: bench.Forks) -> None:
    hidden, vocab, mlp, layers, heads = 144, 311, 203, 3, 15
    per_layer = hidden * 16 * heads + 9 * 16 * hidden + 3 * hidden * mlp + 2 * hidden
    assert bench.read_weight_bytes(forks.engine.runner.model) == 4 * (layers * per_layer + hidden + vocab * hidden)


def test_row_holds_the_median_and_the_slowest_of_few() -> None:
    contestant = bench.Contestant(
        engine="e", mode="m", context=9, batch=2, ceiling_bytes=5_000_000, decode=lambda steps: ([0.1] * steps, 7, 0.5)
    )
    contestant.run(2)
    contestant.decode = lambda steps: ([0.2] * steps, 7, 0.7)
    contestant.run(3)
    assert contestant.row(1e9) == {
        "engine": "e", "mode": "m", "context": 9, "batch": 2, "ms_per_step": 200.0, "p99_ms": 200.0,
        "ceiling_ms": 5.0, "hot_kv_bytes": 7, "hit_rate": 0.6,
    }  # fmt: skip


def test_forks_decode_together_from_one_prefill_and_leave_nothing(forks: bench.Forks) -> None:
    engine = forks.engine
    held = forks.hold(400)
    assert held.prompt_ids[:297] == tuple(range(3, 300)) and held.prompt_ids[297:] == tuple(range(3, 106))
    before = engine.stats()
    assert before.prompt_tokens == 400
    step_s, hot_bytes, hit_rate = forks.decode(held, SPARSE, 3, 5)
    after = engine.stats()
    assert after.prompt_tokens == 400, "the forks are not prefilled again"
    assert after.generation_tokens - before.generation_tokens == 3 * (1 + bench.WARM_STEPS + 5)
    assert len(step_s) == 5 and min(step_s) > 0
    assert hot_bytes == 3 * (2 * 2 + 4) * engine.runner.cache.layout.page_bytes
    assert hit_rate is not None and 0 < hit_rate < 1
    _, dense_bytes, nothing_selected = forks.decode(held, DENSE, 3, 5)
    assert dense_bytes == 3 * 26 * engine.runner.cache.layout.page_bytes  # 408 tokens
    assert nothing_selected is None
    forks.release(held)
    engine.check_integrity()
    assert engine.stats().host_blocks_used == engine.stats().kv_pages_used == 0


def test_a_batch_that_does_not_fit_is_refused_by_its_option(forks: bench.Forks) -> None:
    held = forks.hold(400)
    with pytest.raises(ValueError, match="--batches 5 in mode resolve: 4 requests of 400 prompt tokens fit"):
        forks.decode(held, SPARSE, 5, 2)
    while forks.engine.has_work:
        forks.engine.step()
    forks.release(held)


def test_the_peer_decodes_from_as_many_tokens_as_the_engine(forks: bench.Forks) -> None:
    peer = bench.TransformersPeer(forks.engine)
    step_s, kv_bytes, hit_rate = peer.decode(100, 2, 3)
    assert len(step_s) == 3
    assert kv_bytes == 2 * 2 * 3 * 3 * 16 * 4 * (100 + bench.WARM_STEPS + 3)
    assert hit_rate is None


def test_a_missing_peer_is_named(forks: bench.Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="--peers transformers: the package is not installed"):
        bench.TransformersPeer(forks.engine)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_report_holds_every_engine_mode_context_and_batch(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bytes_per_second", lambda tp: 1e9)
    flags = "--contexts 300 400 --batches 1 2 --modes dense,resolve --budget-tokens 32 --steps 2 --rounds 1"
    args = parse("--model", str(tiny), *flags.split(), "--peers", "transformers")
    assert bench.main(args) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["context"], row["batch"], row["engine"], row["mode"]) for row in rows] == [
        (context, batch, *who)
        for context in (300, 400)
        for batch in (1, 2)
        for who in (("oasis_tp", "dense"), ("oasis_tp", "resolve"), ("transformers", "dense"))
    ]
    for row in rows:
        assert row["ms_per_step"] > 0 and row["ceiling_ms"] > 0
        assert (row["hit_rate"] is None) == (row["mode"] == "dense")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "11"], "--contexts 11: more than the 11 tokens"),
        (["--batches", "2", "0"], "--batches"),
        (["--steps", "0"], "--steps 0: at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench.main(parse(*arguments))
    with pytest.raises(SystemExit):
        parse("--modes", "dense,lossless")


def test_bandwidth_is_measured(forks: bench.Forks) -> None:
    assert 1e8 < bench.bytes_per_second(forks.engine.tp) < 1e14
