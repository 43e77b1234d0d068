"""The needle sweep: which prompts it asks, what it counts, and its report on a tiny random model."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oasis_tp.bench import needles as bench
from oasis_tp.config import SparsityConfig
from oasis_tp.request import KvStats, SamplingParams
from tests.tiny import make_tiny

DENSE = SparsityConfig(attention="dense")


def kv(missed_mass: float | None = None, hit_rate: float | None = None) -> KvStats:
    return KvStats(
        mode="resolve",
        budget_tokens=0,
        context_tokens=0,
        hot_kv_bytes=0,
        sketch_bytes=0,
        host_kv_bytes=0,
        dense_kv_bytes=0,
        selected_blocks=0,
        missed_blocks=0,
        hit_rate=hit_rate,
        missed_mass=missed_mass,
        attended_share=1.0,
    )


def trials_of(found: dict[SparsityConfig, list[bool]], prompt: bench.Kind = "noise") -> list[bench.Trial]:
    """One trial per mode and depth, case by case as the sweep makes them."""
    cases = bench.make_cases([prompt], [4000], 3, seed=7)
    return [
        bench.Trial(case, mode, found[mode][index], kv(missed_mass=index / 10, hit_rate=None if index else 0.5))
        for index, case in enumerate(cases)
        for mode in found
    ]


def test_cases_cover_every_kind_length_and_depth() -> None:
    cases = bench.make_cases(["noise", "prose"], [4000, 7000], 8, seed=42)
    assert len(set(cases)) == 32
    first = [case for case in cases if (case.prompt, case.length) == ("noise", 4000)]
    assert [case.depth for case in first] == [0.0, 0.1429, 0.2857, 0.4286, 0.5714, 0.7143, 0.8571, 1.0]
    assert [case.seed for case in first] == list(range(42, 50))
    assert bench.make_cases(["noise"], [100], 1, seed=0) == [bench.Case("noise", 100, 0.0, 0)]


def test_modes_are_dense_and_every_sketch_at_every_budget() -> None:
    dense, *sparse = bench.make_modes(["2bit", "minmax"], [512, 256], 3.0)
    assert dense.attention == "dense"
    assert [(mode.sketch, mode.budget_tokens) for mode in sparse] == [
        ("2bit", 512), ("2bit", 256), ("minmax", 512), ("minmax", 256),
    ]  # fmt: skip
    assert all(mode.attention == "resolve" and mode.hot_factor == 3.0 and mode.tail_estimate for mode in sparse)


class Characters:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_prose_changes_with_the_seed_and_noise_does_not() -> None:
    texts = {
        (kind, seed): bench.Case(kind, 3000, 1.0, seed).needle(Characters()).prompt[150:2000]
        for kind in ("noise", "prose")
        for seed in (1, 2)
    }
    assert texts["noise", 1] == texts["noise", 2]
    assert "The grass is green." in texts["noise", 1]
    assert len({texts["prose", 1], texts["prose", 2], texts["noise", 1]}) == 3


class FakeLLM:
    """Knows the number in `modes_that_find` only, and counts its prefills."""

    tokenizer = Characters()

    def __init__(self, modes_that_find: list[SparsityConfig]) -> None:
        self.modes_that_find = modes_that_find
        self.num_prefills = 0
        self.holding: str | None = None

    @contextmanager
    def hold(self, prompt: str) -> Iterator[str]:
        self.num_prefills += 1
        self.holding = prompt
        yield prompt
        self.holding = None

    def generate_from(self, held: str, sampling: SamplingParams, *, sparsity: SparsityConfig) -> Any:
        assert held == self.holding
        assert (sampling.temperature, sampling.max_tokens) == (0.0, bench.NEW_TOKENS)
        number = held.split(" is: ")[1].split(".")[0]
        assert sampling.stop == (number,)
        found = sparsity in self.modes_that_find
        ids = Characters().encode(f" {number}" if found else f" {number[:-1]}. And so on")
        text = "" if found else "".join(map(chr, ids))
        return SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=ids, error=None, kv=kv(0.1, 0.9))])


def test_sweep_answers_each_prompt_in_every_mode_from_one_prefill() -> None:
    modes = bench.make_modes(["2bit"], [512, 256], 2.0)
    llm = FakeLLM(modes[:2])
    cases = bench.make_cases(["noise", "prose"], [2000], 3, seed=1)
    trials = bench.sweep(llm, cases, modes)  # type: ignore[arg-type]
    assert llm.num_prefills == len(cases) == 6
    assert [(trial.case, trial.sparsity) for trial in trials] == [(case, mode) for case in cases for mode in modes]
    assert [trial.found for trial in trials] == [True, True, False] * 6


def test_summary_counts_and_names_flips_in_both_directions() -> None:
    sparse = SparsityConfig(budget_tokens=256, sketch="1bit")
    rows = bench.summarise(trials_of({DENSE: [True, True, False], sparse: [True, False, True]}))
    dense_row, row = rows
    assert dense_row == {
        "prompt": "noise", "length": 4000, "mode": "dense", "sketch": None, "budget": None, "n": 3, "found": 2,
        "flips_down": [], "flips_up": [], "missed_mass": None, "hit_rate": None,
    }  # fmt: skip
    assert row == {
        "prompt": "noise", "length": 4000, "mode": "resolve", "sketch": "1bit", "budget": 256, "n": 3, "found": 2,
        "flips_down": [{"depth": 0.5, "seed": 8}], "flips_up": [{"depth": 1.0, "seed": 9}],
        "missed_mass": 0.1, "hit_rate": 0.5,
    }  # fmt: skip
    table = bench.format_table(rows).splitlines()
    assert table[0] == "| prompt | length | needles | dense | 1bit 256 |"
    assert table[2] == "| noise | 4000 | 3 | 2 | 2 |"
    assert table[-2:] == [
        "lost: noise 4000, 1bit 256: depth 0.50 (seed 8)",
        "gained: noise 4000, 1bit 256: depth 1.00 (seed 9)",
    ]


def test_a_mode_that_finds_what_dense_finds_breaks_no_promise_and_one_that_loses_does() -> None:
    def broken(dense: list[bool], ours: list[bool], prompt: bench.Kind = "noise", **options: Any) -> list[str]:
        sparse = SparsityConfig(**{"budget_tokens": 256, **options})
        return bench.broken_promises(bench.summarise(trials_of({DENSE: dense, sparse: ours}, prompt)))

    assert broken([True, True, False], [True, True, True]) == []
    assert broken([True, True, False], [True, False, True]) == [
        "noise at 4000 tokens: 2bit at budget 256 loses depth 0.50 (seed 8)"
    ]
    assert broken([True, True, False], [True, False, True], "prose") == []
    assert broken([True, True, False], [True, False, True], sketch="1bit") == []
    assert broken([False] * 3, [True] * 3) == ["noise at 4000 tokens: dense finds no needle, so there is none to lose"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_report_on_a_model_that_finds_nothing_ends_with_json_and_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_tiny("llama", tmp_path, max_position_embeddings=1024))
    args = parse("--model", model, "--lengths", "700", "--depths", "2", "--budgets", "64", "32", "--hot-factor", "1.5")
    assert bench.main(args) == 0
    out = capsys.readouterr().out.splitlines()
    rows = json.loads(out[-1])["rows"]
    assert len(rows) == 2 * (1 + 3 * 2)
    for row in rows:
        assert (row["n"], row["found"], row["flips_down"]) == (2, 0, [])
        if row["mode"] == "resolve":
            assert 0 < row["hit_rate"] < 1, "the hot set must be smaller than the context"
            assert (row["missed_mass"] is None) == (row["sketch"] == "minmax")
    args.check = True
    assert bench.main(args) == 1
    assert "not held: noise at 700 tokens: dense finds no needle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depths", "0"], "--depths 0"),
        (["--check", "--prompts", "prose"], "--check looks at 2bit in noise"),
        (["--check", "--sketches", "1bit"], "--check looks at 2bit in noise"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench.main(parse(*arguments))
