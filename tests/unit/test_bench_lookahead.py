"""The lookahead benchmark: what it watches, by a second way; how it counts; its report on a tiny random model."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.bench import lookahead as bench
from oasis_tp.bench import lookahead_report as report
from oasis_tp.bench.lookahead_watch import FIGURES, Step, Watch, num_shared, share
from oasis_tp.config import SparsityConfig
from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams
from tests.tiny import make_tiny

OURS = SparsityConfig(budget_tokens=32, recent_tokens=32, hot_factor=2.0, prefetch="on")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    llm = LLM(
        str(tiny),
        budget_tokens=32,
        recent_tokens=32,
        hot_factor=4.0,
        max_num_seqs=2,
        prefetch="on",
        spec_method="ngram",
        extra_sketches=["minmax"],
    )
    yield llm
    llm.close()


def step(position: int, tokens: tuple[int, ...], before: Step | None = None, **figures: list[float]) -> Step:
    """Two layers; what is not given is 10 in each."""
    values = {name: torch.tensor(figures.get(name, [10.0, 10.0]), dtype=torch.float64) for name in FIGURES}
    return Step(position, tokens, values, before=before)


def measured(steps: list[Step], lru: list[Step], **more: Any) -> report.Measured:
    settings: dict[str, Any] = {
        "workload": "free", "context": 4096, "mode": "resolve", "budget": 512, "hot_factor": 2.0, "drafts": "ngram",
        "text": [], "steps": steps, "lru": lru, "num_accepted": 3,
    }  # fmt: skip
    return report.Measured(**(settings | more))


def test_a_draft_is_right_when_the_token_at_the_first_rows_position_came() -> None:
    first = step(100, (7, 8, 9))  # committed, verified, probe
    assert first.draft is None and not first.follows
    accepted = step(102, (9, 4), before=first)
    rejected = step(101, (5, 6), before=step(100, (7, 8, 9)))
    assert (accepted.draft, rejected.draft) == (9, 8)
    beyond = step(103, (1,), before=first)
    assert beyond.draft is None and beyond.follows


def test_a_share_is_the_mean_over_layers_of_what_all_steps_have() -> None:
    steps = [step(1, (1,), resident=[10, 0]), step(2, (1,), selected=[30, 10], resident=[10, 5])]
    assert share(steps, "resident", "selected") == pytest.approx((20 / 40 + 5 / 20) / 2)
    assert share([], "resident", "selected") is None


def test_blocks_are_shared_head_by_head() -> None:
    ours, theirs = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[3, 4, 1], [4, 5, 6]])
    assert num_shared(ours, theirs) == 2


def test_rows_are_split_by_their_drafts_and_compared_with_the_same_rows_without_prefetching() -> None:
    first = step(100, (7, 8))
    right = step(101, (8, 3), first, resident=[10, 9])
    wrong = step(102, (4,), right, resident=[8, 8], same_as_draft=[4, 6])
    absent = step(103, (5,), wrong, resident=[6, 6])
    before = step(100, (7,))
    lru = [before] + [step(p, (0,), before, resident=[n, n]) for p, n in ((101, 1), (102, 2), (103, 4), (104, 10))]
    row = report.summarise([measured([first, right, wrong, absent], lru)])[0]
    assert (row["steps"], row["steps_draft_right"], row["steps_draft_wrong"]) == (3, 1, 1)
    assert row["hit_rate_draft_right"] == 0.95 and row["lru_hit_rate_draft_right"] == 0.1
    assert row["hit_rate_draft_wrong"] == 0.7 and row["lru_hit_rate_draft_wrong"] == 0.3
    assert row["lru_hit_rate"] == pytest.approx(7 / 30, abs=1e-4)
    assert row["draft_query_agreement"] == 0.75 and row["draft_query_agreement_draft_right"] == 1.0
    assert row["accepted_per_step"] == 0.75


def timed(tokens_per_s: float, num_bytes: int = 0, wait_s: float = 0.0) -> list[report.Timed]:
    return [report.Timed(10, 20, 20 / tokens_per_s, num_bytes, wait_s)]


def timed_run(drafts: float, none: float, **more: Any) -> report.Measured:
    times = {"on": timed(1.0, 1000, 0.02), "off": timed(drafts, 500, 0.05), "no drafts": timed(none)}
    return measured([step(1, (1,))], [], timed=times, **more)


def test_speed_is_that_of_the_default_prefetch_and_bytes_those_with_it_on() -> None:
    row = report.summarise([timed_run(30.0, 20.0)])[0]
    assert (row["tokens_per_s"], row["tokens_per_s_prefetch"], row["tokens_per_s_no_drafts"]) == (30.0, 1.0, 20.0)
    assert (row["bytes_moved"], row["bytes_per_step"], row["bytes_per_step_no_prefetch"]) == (1000, 100, 50)
    assert (row["exposed_wait_ms"], row["exposed_wait_ms_no_prefetch"]) == (2.0, 5.0)
    assert report.summarise([timed_run(30.0, 20.0, default="on")])[0]["tokens_per_s"] == 1.0


def test_several_contexts_have_a_row_for_all_and_the_json_line_is_that() -> None:
    runs = [timed_run(30.0, 20.0, context=4096), timed_run(60.0, 20.0, context=8192)]
    rows = report.summarise(runs)
    assert [row["context"] for row in rows] == [4096, 8192, "all"]
    assert report.json_workloads(rows)["free"]["tokens_per_s"] == 40.0


def test_copy_is_reported_from_hot_factor_4() -> None:
    runs = [timed_run(speed, 1.0, workload="copy", hot_factor=factor) for factor, speed in ((2.0, 5.0), (4.0, 7.0))]
    assert report.json_workloads(report.summarise(runs))["copy"]["tokens_per_s"] == 7.0


@pytest.mark.parametrize(
    ("run", "broken"),
    [
        (timed_run(19.0, 20.0), []),
        (timed_run(18.9, 20.0), ["tokens_per_s 18.9, at least 19"]),
        (timed_run(30.0, 20.0, workload="copy", hot_factor=4.0, num_accepted=2), []),
        (timed_run(30.0, 20.0, workload="copy", hot_factor=4.0, num_accepted=1), ["accepted_per_step 1, at least 1.5"]),
        (timed_run(29.0, 20.0, workload="copy", hot_factor=4.0, num_accepted=2), ["tokens_per_s 29, at least 30"]),
        (timed_run(20.0, 20.0, texts_differ=True), ["changed the text"]),
    ],
)
def test_broken_promises_about_drafts_are_named(run: report.Measured, broken: list[str]) -> None:
    said = report.broken_promises(report.summarise([run]))
    assert len(said) == len(broken) and all(part in line for part, line in zip(broken, said, strict=True))


@pytest.mark.parametrize(
    ("right", "elsewhere", "broken"),
    [
        ([[9.9, 9.8], [9.95, 9.95]], [4, 4], []),
        ([[9.8, 9.8], [9.95, 9.95]], [4, 4], ["hit_rate_draft_right 0.98, at least 0.985"]),
        ([[9.9, 9.9], [9.94, 9.94]], [4, 4], ["mass_hit_rate_draft_right 0.994, at least 0.995"]),
        ([[9.9, 9.9], [9.95, 9.95]], [3, 4], ["hit_rate_draft_wrong 0.35, at least 0.4"]),
    ],
)
def test_broken_promises_about_hits_are_named(
    right: list[list[float]], elsewhere: list[float], broken: list[str]
) -> None:
    before = step(1, (5, 6))
    steps = [
        before,
        step(2, (6,), before, resident=right[0], resident_mass=right[1]),
        step(3, (7,), before, resident=elsewhere),
    ]
    lru = [step(position, (1,), before, resident=[4, 4]) for position in (2, 3)]
    rows = report.summarise([measured(steps, lru)])
    said = report.broken_promises(rows)
    assert len(said) == len(broken) and all(part in line for part, line in zip(broken, said, strict=True))


def watched(llm: LLM, sparsity: SparsityConfig, text: list[int] | None = None) -> tuple[list[Step], Any]:
    own = bench.Bench(llm)
    with llm.hold([(7 * i * i + 3 * i) % 300 + 3 for i in range(420)]) as held:
        answer, steps = own.watch(held, GREEDY, sparsity, own.drafter if text is None else bench.Replay(text))
    llm.engine.check_integrity()
    llm.engine.drafter = own.drafter
    return steps, answer


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_what_is_watched_adds_up_to_what_the_engine_counts(llm: LLM, compiled: bool) -> None:
    cache = llm.engine.runner.cache
    path, cache.cpu = cache.cpu, cache.cpu if compiled else None
    try:
        # Without drafts and prefetching every row is a first row, and nothing is in flight.
        bench_without = SparsityConfig(budget_tokens=32, recent_tokens=32, hot_factor=2.0, prefetch="off")
        drafter, llm.engine.drafter = llm.engine.drafter, None
        steps, answer = watched(llm, bench_without, text=[])
        llm.engine.drafter = drafter
    finally:
        cache.cpu = path
    assert len(steps) == 23 and len(set(answer.token_ids)) > 10
    selected = sum(int(s.figures["selected"].sum()) for s in steps)
    resident = sum(int(s.figures["resident"].sum()) for s in steps)
    assert selected == answer.kv.selected_blocks
    assert 0 < selected - resident == answer.kv.missed_blocks


def test_replayed_drafts_are_right_and_bring_blocks(llm: LLM) -> None:
    _, answer = watched(llm, OURS)
    steps, again = watched(llm, OURS, text=answer.token_ids)
    assert again.token_ids == answer.token_ids
    following = [s for s in steps if s.follows]
    assert following and all(s.draft == s.tokens[0] for s in following)
    assert again.kv.accepted_tokens == again.kv.draft_tokens > 0
    hits, by_draft, by_previous = (
        share(following, name, "selected") for name in ("resident", "same_as_draft", "same_as_previous")
    )
    assert hits is not None and by_draft is not None and by_previous is not None
    assert min(hits, by_draft) > by_previous + 0.2


def test_mass_is_a_share_of_exact_attention(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weights over all of the row's keys, block by block, in the one order of the attended list."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    mass = Watch._mass

    def spied(self: Watch, layer: int, row: Any, chosen: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        cache, state = self.cache, row.state
        found = mass(self, layer, row, chosen, q)
        first, last = row.candidates
        sink, recent = (torch.arange(*ends).expand(chosen.shape[0], -1) for ends in ((first,), (last, row.block + 1)))
        blocks = torch.cat([sink, chosen, recent], dim=1)
        slots = cache.residency.lookup(layer, state.row, blocks)
        keys, _ = cache.pool.gather(layer, state.pages[slots])
        grouped = q.view(blocks.shape[0], -1, keys.shape[2])
        weights = (grouped @ keys[:, : row.num_attended_tokens].mT / keys.shape[2] ** 0.5).softmax(-1)
        weights = torch.nn.functional.pad(weights, (0, blocks.shape[1] * 16 - weights.shape[2]))
        by_block = weights.unflatten(-1, (-1, 16)).sum(-1).mean(1)
        num_sink = first
        seen.append((found, by_block[:, num_sink : num_sink + chosen.shape[1]]))
        return found

    monkeypatch.setattr(Watch, "_mass", spied)
    watched(llm, OURS)
    assert len(seen) > 30
    for found, expected in seen:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_watch_leaves_the_engine_as_it_was(llm: LLM) -> None:
    runner = llm.engine.runner
    with Watch(runner).on():
        assert "run" in vars(runner) and "decode" in vars(runner.cache)
    assert "run" not in vars(runner) and "decode" not in vars(runner.cache)


class Characters:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_prompts_are_as_long_as_asked_and_copy_quotes_a_part_of_the_prose_three_times() -> None:
    text = "".join(f"sentence number {i}. " for i in range(400))
    ids = Characters().encode(text)

    def prompt(workload: report.Workload) -> tuple[str, str | None]:
        found, answer = bench.make_prompt(workload, Characters(), ids, 900, 40)  # type: ignore[arg-type]
        assert len(found) <= 900
        return "".join(map(chr, found)), answer

    before, first, second, begun = prompt("copy")[0].split(bench.AGAIN)
    assert first == second and first in before and len(first) == bench.BEGUN_TOKENS + 40
    assert begun == first[: bench.BEGUN_TOKENS]
    needle, answer = prompt("needle")
    assert answer is not None and answer in needle
    assert prompt("free") == (text[:900], None)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


FLAGS = "--contexts 400 --budget-tokens 32 --max-tokens 12 --rounds 1"


def test_report_on_a_tiny_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(parse("--model", str(tiny), *FLAGS.split(), "--out", str(tmp_path / "o"))) == 0
    lines = capsys.readouterr().out.splitlines()
    workloads = json.loads(lines[-1])["workloads"]
    assert list(workloads) == ["needle", "copy", "free"]
    for figures in workloads.values():
        assert tuple(figures) == report.JSON_KEYS
        assert 0 < figures["lru_hit_rate"] < 1 and 0 < figures["hit_rate"] < 1
        assert figures["tokens_per_s"] > 0 and figures["bytes_moved"] > 0
    assert any("| copy | 400 | 4 | replay |" in line for line in lines)
    rows = json.loads((tmp_path / "o" / "lookahead.json").read_text())["rows"]
    assert not any(row["texts_differ"] for row in rows)
    assert {(row["workload"], row["mode"]) for row in rows} == {
        (workload, mode) for workload in workloads for mode in ("resolve", "paper")
    }
    assert (tmp_path / "o" / "lookahead.png").read_bytes()[1:4] == b"PNG"


def test_small_table(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TABLE_BUDGETS", (32, 64))
    assert bench.main(parse("--model", str(tiny), *FLAGS.split(), "--workloads", "free", "--table")) == 0
    out = capsys.readouterr().out
    assert out.count("| free |") == 2
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [(row["budget"], row["hot_factor"]) for row in rows] == [(b, f) for b in (32, 64) for f in (1, 2, 4)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", "1"], "--max-tokens 1: at least 2"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--contexts", "300"], "--contexts 300: at least 512 for --max-tokens 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench.main(parse(*arguments))
