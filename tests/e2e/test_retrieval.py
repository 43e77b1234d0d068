"""The retrieval benchmark on a tiny random model: in process, resumed, over ranks, and through the server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.bench.__main__ import main
from oasis_tp.bench.answers import read_answers
from oasis_tp.llm import LLM
from tests.dist.ranks import run_on_ranks
from tests.tiny import make_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
WINDOW = 1536
MODES = ["--modes", "dense", "resolve", "--sketches", "2bit", "minmax", "--budgets", "64", "--tail", "on", "off"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=WINDOW))


@pytest.fixture(scope="module")
def samples(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two needles and two variable chains, written by the benchmark itself."""
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    tasks = ["--tasks", "niah_single_1", "passkey", "--lengths", "1000", "--num-samples", "2"]
    assert main(["retrieval", "--model", model, *tasks, "--write-samples", str(path)]) == 0
    assert len(path.read_text().splitlines()) == 4
    return path


@pytest.fixture(scope="module")
def answered(model: str, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a whole run in process."""
    out = tmp_path_factory.mktemp("whole")
    assert main(["retrieval", "--model", model, "--samples", str(samples), *MODES, "--out", str(out)]) == 0
    return out


def texts(out: Path, modes: tuple[str, ...] = ("dense", "resolve")) -> dict[Any, str]:
    answers = read_answers(out / "answers.jsonl")[1]
    assert all(answer.error is None for answer in answers)
    return {answer.key: answer.pred for answer in answers if answer.mode.mode in modes}


def test_every_sample_is_answered_in_every_mode(answered: Path) -> None:
    assert len(texts(answered)) == 4 * 4
    assert len(set(texts(answered).values())) > 4, "modes differ on a model whose attention is spread"
    report = (answered / "report.md").read_text()
    assert "| niah_single_1 | 1000 | 2bit 64 + tail | 2 |" in report
    assert (answered / "depth.png").is_file()
    for answer in read_answers(answered / "answers.jsonl")[1]:
        is_sparse = answer.mode.mode == "resolve"
        assert (answer.hit_rate is not None) == is_sparse
        assert (answer.missed_mass is None) == (answer.mode.sketch == "minmax")
        assert answer.missed_mass is None or (answer.missed_mass > 0) == is_sparse
        assert answer.attended_share is not None and (answer.attended_share < 0.5) == is_sparse


def test_a_report_again_needs_no_model(answered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieval", "--model", "/no/such", "--report-only", "--out", str(answered)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {(row["task"], row["n"]) for row in rows if row["mode"] == "dense"} == {("niah_single_1", 2), ("passkey", 2)}


def test_an_interrupted_run_goes_on_where_it_was(
    model: str, samples: Path, answered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["retrieval", "--model", model, "--samples", str(samples), *MODES, "--batch", "2", "--out", str(tmp_path)]
    asked: list[int] = []  # how many at once
    generate_from_each = LLM.generate_from_each

    def interrupted(self: LLM, held: Any, sampling: Any, sparsities: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        return counted(self, held, sampling, sparsities)

    def counted(self: LLM, held: Any, sampling: Any, sparsities: Any) -> Any:
        asked.append(len(sparsities))
        return generate_from_each(self, held, sampling, sparsities)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate_from_each", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(command)
    path = tmp_path / "answers.jsonl"
    assert len(read_answers(path)[1]) == 6
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote the sixth
    prefills: list[str] = []
    hold = LLM.hold

    def count_holds(self: LLM, prompt: Any) -> Any:
        prefills.append(prompt)
        return hold(self, prompt)

    monkeypatch.setattr(LLM, "hold", count_holds)
    monkeypatch.setattr(LLM, "generate_from_each", counted)
    assert main(command) == 0
    assert asked == [2, 2, 2, 2, 1, 2, 2, 2, 2], "five answers were whole"
    assert len(prefills) == 3, "the first sample was done"
    assert texts(tmp_path) == texts(answered)


def test_one_bad_sample_does_not_lose_the_others(
    model: str, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = samples.read_text().splitlines()[:2]
    long = json.loads(lines[0]) | {"input": "far too long " * WINDOW}
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join([lines[0], json.dumps(long), "{", lines[1]]))
    command = ["retrieval", "--model", model, "--samples", str(path), "--modes", "dense", "--out", str(tmp_path)]
    assert main(command) == 1
    said = capsys.readouterr()
    answers = read_answers(tmp_path / "answers.jsonl")[1]
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert f"{path}:2: the prompt (" in said.err and f"the model's window is {WINDOW}" in said.err
    assert f"{path}:3: not JSON" in said.err
    assert {row["errors"] for row in json.loads(said.out.splitlines()[-1])["rows"]} == {0, 1}
    path.write_text(json.dumps(long))
    assert main([*command[:-1], str(tmp_path / "other")]) == 2
    assert "no sample fits: the prompt (" in capsys.readouterr().err


def test_an_answer_ends_where_it_is_found(model: str, samples: Path, answered: Path, tmp_path: Path) -> None:
    """The reference is made to be what the model says after a few tokens."""
    first = read_answers(answered / "answers.jsonl")[1][0]
    found = re.search(r"(?<=.{6})[A-Za-z]{2,6}", first.pred, re.DOTALL)
    assert found
    wanted = found[0]
    record = json.loads(samples.read_text().splitlines()[0]) | {"outputs": [wanted]}
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(record))
    command = ["retrieval", "--model", model, "--samples", str(path), "--modes", "dense", "--stop-when-found"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    (answer,) = read_answers(tmp_path / "answers.jsonl")[1]
    assert answer.score == 1.0 and wanted in answer.pred
    assert first.pred.startswith(answer.pred) and len(answer.pred) < len(first.pred)


def on_rank(rank: int, command: list[str]) -> None:
    LLM.close = lambda self: None  # type: ignore[method-assign]  # the group is the test's
    assert main(command) == 0


def test_two_ranks_answer_as_one_does(model: str, samples: Path, answered: Path, tmp_path: Path) -> None:
    """Rank 0 alone has the answers of before, and says what is left to ask."""
    few, out = tmp_path / samples.name, tmp_path / "out"
    out.mkdir()
    head, *before = (answered / "answers.jsonl").read_text().splitlines()
    before = [line for line in before if '"passkey"' in line][:1]
    (out / "answers.jsonl").write_text("\n".join([head, *before, ""]))
    few.write_text("\n".join(line for line in samples.read_text().splitlines() if '"passkey"' in line))
    modes = ["--modes", "dense", "resolve", "--budgets", "64"]
    command = ["retrieval", "--model", model, "--samples", str(few), *modes, "--out", str(out)]
    run_on_ranks(2, tmp_path / "store", on_rank, command)
    assert len((out / "answers.jsonl").read_text().splitlines()) == 1 + len(texts(out)) == 1 + 2 * 2
    assert texts(out).items() <= texts(answered).items()


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "oasis_tp.serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := re.search(r"ready: (http://\S+)", line):
                    yield match[1]
                    return
            raise AssertionError("the server ended before it was ready")
        finally:
            process.terminate()


def test_the_server_answers_as_the_engine_in_process_does(
    model: str, samples: Path, answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["retrieval", "--model", "/no/such", "--samples", str(samples), "--concurrency", "3"]
    with serving(model, "--budget-tokens", "64", "--hot-factor", "2", "--served-model-name", "tiny") as url:
        out = tmp_path / "modes"
        modes = ["--modes", "dense", "resolve", "--budgets", "64", "--tail", "on", "off"]
        assert main([*asked, "--base-url", url, *modes, "--out", str(out)]) == 0
        through_server = texts(out)
        assert len(through_server) == 3 * 4
        assert through_server == {key: text for key, text in texts(answered).items() if key in through_server}
        assert read_answers(out / "answers.jsonl")[0]["model"] == "tiny"
        # As another engine: no field that OpenAI does not have, the server's own setting.
        out = tmp_path / "plain"
        assert main([*asked, "--base-url", f"{url}/v1/", "--out", str(out)]) == 0
        own = {digest: text for (digest, mode), text in texts(answered).items() if mode.label == "2bit 64 + tail"}
        assert {digest: text for (digest, _), text in texts(out, ("endpoint",)).items()} == own
        # What the server refuses is said, sample by sample.
        capsys.readouterr()
        bad = ["--modes", "resolve", "--sketches", "minmax", "--budgets", "64", "--out", str(tmp_path / "bad")]
        assert main([*asked, "--base-url", url, *bad]) == 1
        assert f"{samples}:1: 400: attention resolve with sketch minmax" in capsys.readouterr().err
    assert main([*asked, "--base-url", url, "--out", str(tmp_path / "gone"), "--served-model", "tiny"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-samples", "0"], "--num-samples 0: at least 1"),
        (["--budgets", "8"], "--budgets [8]: at least 16"),
        (["--base-url", "ftp://x"], "--base-url ftp://x: an address begins with"),
        (["--base-url", "http://x", "--stop-when-found"], "--stop-when-found works in process"),
        (["--tasks", "qa"], "task qa needs --qa-file"),
        (["--samples", "none.jsonl"], "none.jsonl: No such file"),
        (["--report-only"], "answers.jsonl: No such file"),
        (["--lengths", "70"], "--lengths 70, task passkey (16 to answer): at least"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["retrieval", "--model", model, "--tasks", "passkey", "--out", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


def test_options_come_from_a_file_and_later_ones_win(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, path = tmp_path / "preset.args", tmp_path / "samples.jsonl"
    preset.write_text(
        f"# a comment\n--model '{model}'\n--tasks passkey  # the shortest\n--lengths 700 --num-samples 9\n"
    )
    assert main(["retrieval", f"@{preset}", "--num-samples", "2", "--write-samples", str(path)]) == 0
    assert len(path.read_text().splitlines()) == 2
    with pytest.raises(SystemExit):
        main(["retrieval", "@/no/such.args"])
    assert "/no/such.args" in capsys.readouterr().err
