"""`oasis_tp.bench BENCHMARK`: which benchmark runs, and what its exit code says."""

import argparse
import importlib

import pytest

from oasis_tp import cli
from oasis_tp.bench.__main__ import BENCHMARKS, main


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    module = importlib.import_module(f"oasis_tp.bench.{name}")
    assert module.__doc__ is not None and module.__doc__.strip() in text
    assert "--model" in text


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in BENCHMARKS)


@pytest.mark.parametrize("arguments", [[], ["needle"], ["needles", "--budget", "3"], ["--model", "m", "sketch"]])
def test_a_faulty_command_line_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "oasis_tp.bench" in capsys.readouterr().err


def test_exit_codes_are_the_benchmarks_own_and_2_for_the_user_to_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        if args.budgets == [1]:
            raise ValueError("--budgets 1: too few")
        return 1

    monkeypatch.setattr("oasis_tp.bench.needles.main", run)
    assert main(["needles"]) == 1
    assert cli.main(["bench", "needles", "--budgets", "1"]) == 2
    assert capsys.readouterr().err == "oasis_tp.bench needles: --budgets 1: too few\n"
