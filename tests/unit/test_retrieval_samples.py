"""The file of samples, scoring, and the file of answers."""

import argparse
import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.bench import retrieval
from oasis_tp.bench.answers import Answer, AnswerFile, Mode, make_modes, read_answers
from oasis_tp.bench.samples import Sample, read_samples, write_samples
from oasis_tp.bench.scoring import score

CONFIGS = Path(__file__).parents[2] / "configs"
DENSE = Mode(mode="dense")
SPARSE = Mode(mode="resolve", sketch="2bit", budget=256, tail=True)
RULER = {"index": 3, "input": "Find it.", "outputs": ["1234567"], "length": 200, "answer_prefix": " It is"}


def a_sample(**fields: Any) -> Sample:
    defaults: dict[str, Any] = {
        "task": "niah_single_1",
        "index": 0,
        "input": "Where is Ü?",
        "outputs": ("Alpha", "beta"),
        "length": 150,
        "max_length": 160,
        "tokens_to_generate": 128,
    }
    return Sample(**(defaults | fields))


@pytest.mark.parametrize(
    ("metric", "answer", "expected"),
    [
        ("all", "it is ALPHA and Beta.", 1.0),
        ("all", "alphabet", 0.5),
        ("all", "", 0.0),
        ("all", "gamma", 0.0),
        ("part", "only beta", 1.0),
        ("part", "neither", 0.0),
        ("all", "alp\x00ha bet\na", 0.0),
        ("all", "alpha\x07beta", 1.0),
    ],
)
def test_string_matches(metric: Any, answer: str, expected: float) -> None:
    assert score(a_sample(metric=metric), answer) == expected


def test_a_control_character_is_a_line_end() -> None:
    assert score(a_sample(outputs=("a\nb",)), "xa\x1fbx") == 1.0


def test_mrcr_needs_its_start() -> None:
    sample = a_sample(metric="mrcr", outputs=("C0DEhello world",), answer_start="C0DE")
    assert score(sample, "C0DEhello world") == score(sample, "  C0DEhello world") == 1.0
    assert score(sample, "hello world") == score(sample, "c0dehello world") == 0.0
    assert score(sample, "C0DEhello") == pytest.approx(2 * 5 / (5 + 11))


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    samples = [
        a_sample(index=index, depth=index / 2, answer_prefix=" It\nis", answer_start="x", metric="mrcr")
        for index in range(3)
    ]
    path = tmp_path / "new" / "samples.jsonl"
    assert write_samples(path, samples) == 3
    read, complaints = read_samples(path)
    assert (read, complaints) == (samples, [])
    assert [sample.source for sample in read] == [f"{path}:{number}" for number in (1, 2, 3)]
    assert [sample.digest for sample in read] == [sample.digest for sample in samples]
    assert set(RULER) | {"length_w_model_temp"} <= set(json.loads(path.read_text().splitlines()[0]))


@pytest.mark.parametrize("place", ["vt.jsonl", "vt/validation.jsonl"])
def test_a_file_that_ruler_made_is_read(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    longer = RULER | {"length": 250, "token_position_answer": 7}
    path.write_text(f"{json.dumps(RULER)}\n\n{json.dumps(longer)}\n")
    (first, second), complaints = read_samples(path)
    assert not complaints
    assert (first.task, first.prompt, first.outputs) == ("vt", "Find it. It is", ("1234567",))
    assert (first.tokens_to_generate, first.metric, first.length, first.max_length) == (30, "all", 200, 250)
    assert second.source == f"{path}:3"


def test_question_answering_of_ruler_is_one_task(tmp_path: Path) -> None:
    path = tmp_path / "qa_2.jsonl"
    path.write_text(json.dumps(RULER))
    ((sample,), _) = read_samples(path)
    assert (sample.task, sample.metric, sample.tokens_to_generate) == ("qa_2", "part", 32)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not"),
        (b"[1]", "a sample is a JSON object, this line is a list"),
        (b'{"input": "\xff"}', "not UTF-8 at byte 11 of the line"),
        ({"outputs": None, "length": None}, "missing field outputs, length; needed: index, input, outputs, length"),
        ({"outputs": []}, r"outputs is '\[\]'; allowed: a list of texts"),
        ({"outputs": "text"}, "outputs is 'text'; allowed"),
        ({"outputs": [""]}, "none of them empty"),
        ({"input": ""}, "input is ''; allowed: text that is not empty"),
        ({"index": "one"}, "index is 'one'; allowed: a whole number"),
        ({"length": 0}, "length is '0'; allowed: a whole number from 1"),
        ({"tokens_to_generate": True}, "tokens_to_generate is 'True'"),
        ({"metric": "none"}, "metric is 'none'; allowed: all, part, mrcr"),
        ({"depth": 2}, "depth is '2'; allowed: 0 to 1"),
        ({"task": "mystery"}, "task: 'mystery'; known: niah_single_1"),
        ({"task": 7}, "task: 7; known"),
        ({"input": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_faulty_line_is_named_and_the_others_are_kept(tmp_path: Path, line: Any, said: str) -> None:
    good = json.dumps(RULER | {"task": "vt"}).encode()
    if isinstance(line, dict):
        changed = {name: value for name, value in (RULER | {"task": "vt"} | line).items() if value is not None}
        line = json.dumps(changed).encode()
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join([good, line, good]))
    samples, (complaint,) = read_samples(path)
    assert [sample.source for sample in samples] == [f"{path}:1", f"{path}:3"]
    assert complaint.startswith(f"{path}:2: ")
    with pytest.raises(ValueError, match=said):
        raise ValueError(complaint)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"{\n{", "first of 2 faulty lines: .*x.jsonl:1: not JSON"),
        (json.dumps(RULER).encode(), "neither the file nor its directory is named after one"),
    ],
)
def test_a_file_without_samples_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said):
        read_samples(path)
    with pytest.raises(ValueError, match="No such file"):
        read_samples(tmp_path / "none.jsonl")


def test_modes_are_dense_first_and_minmax_has_no_tail() -> None:
    modes = make_modes(["resolve", "dense"], ["2bit", "minmax"], [512, 256], [True, False])
    assert [mode.label for mode in modes] == [
        "dense", "2bit 512 + tail", "2bit 512", "2bit 256 + tail", "2bit 256", "minmax 512", "minmax 256",
    ]  # fmt: skip
    sparsity = SPARSE.sparsity(3.0)
    assert (sparsity.attention, sparsity.budget_tokens, sparsity.hot_factor) == ("resolve", 256, 3.0)
    assert (sparsity.sketch, sparsity.tail_estimate) == ("2bit", True)
    assert DENSE.sparsity(3.0).attention == "dense"
    assert make_modes(["endpoint"], ["2bit"], [1], [True]) == [Mode(mode="endpoint")]


def answers_of(*scored: tuple[int, Mode, str]) -> list[Answer]:
    return [Answer.to(a_sample(index=i, input=f"{i}?"), mode, text, {"hit_rate": 0.5}) for i, mode, text in scored]


MADE = {"model": "tiny", "hot_factor": 2.0}


def test_answers_are_kept_and_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out" / "answers.jsonl"
    first, second = answers_of((0, DENSE, "alpha beta"), (0, SPARSE, "alpha \x00 ü"))
    failed = Answer.failed(a_sample(index=1, source="f:9"), DENSE, "too long")
    file = AnswerFile(path, MADE)
    for answer in (first, second, failed):
        file.append(answer)
        assert path.read_bytes().count(b"\n") == len(file.answers) + 1, "on the disk at once"
    file.close()
    again = AnswerFile(path, MADE)
    assert list(again.answers.values()) == [first, second, failed]
    assert again.done == {first.key, second.key}, "what failed is asked again"
    again.append(replace(failed, error=None, pred="alpha"))
    again.close()
    made_with, answers = read_answers(path)
    assert made_with == MADE and len(answers) == 3 and answers[2].error is None
    assert (first.score, second.score, first.hit_rate, failed.error) == (1.0, 0.5, 0.5, "f:9: too long")


def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path, MADE)
    answers = answers_of((0, DENSE, "alpha"), (1, DENSE, "beta"))
    for answer in answers:
        file.append(answer)
    file.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert read_answers(path)[1] == answers[:1]
    again = AnswerFile(path, MADE)
    assert again.done == {answers[0].key}
    again.append(answers[1])
    again.close()
    assert read_answers(path)[1] == answers
    path.write_bytes(b'{"made_with": ')  # interrupted in its very first line
    AnswerFile(path, MADE).close()
    assert read_answers(path) == (MADE, [])


def test_answers_made_otherwise_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, MADE).close()
    with pytest.raises(ValueError, match=r"made with hot_factor 2\.0, now 3\.0: give another --out"):
        AnswerFile(path, MADE | {"hot_factor": 3.0})
    path.write_bytes(path.read_bytes() + b'{"digest": 1}\n')
    with pytest.raises(ValueError, match=r"answers.jsonl:2: not a line of answers"):
        AnswerFile(path, MADE)
    with pytest.raises(ValueError, match="No such file"):
        read_answers(tmp_path / "none")
    with pytest.raises(ValueError, match="Is a directory"):
        AnswerFile(tmp_path, MADE)


@pytest.mark.parametrize("preset", sorted(CONFIGS.glob("retrieval-*.args")))
def test_presets_are_command_lines(preset: Path) -> None:
    parser = argparse.ArgumentParser()
    retrieval.add_arguments(parser)
    args = parser.parse_args([f"@{preset}", "--seed", "7"])
    assert args.seed == 7 and len(args.tasks) >= 6 and not args.samples
    num_samples = len(args.tasks) * len(args.lengths) * args.num_samples
    assert {"retrieval-quick": 24, "retrieval-smollm2": 288, "retrieval-8b": 22_000}[preset.stem] == num_samples


def test_lm_eval_sees_the_same_prompt_and_score() -> None:
    spec = importlib.util.spec_from_file_location("retrieval_task", CONFIGS / "lm_eval" / "retrieval_task.py")
    assert spec is not None and spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    doc = json.loads(json.dumps(asdict(a_sample(answer_prefix=" It is"))))
    assert task.prompt(doc) == "Where is Ü? It is"
    assert task.score(doc, ["alpha"]) == {"score": 50.0}
