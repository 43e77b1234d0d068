"""Generated retrieval samples: lengths exact for three tokenizers, the same for a seed, and solvable by reading."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

from oasis_tp.bench.haystack import prose
from oasis_tp.bench.samples import TASK_SPECS, Sample
from oasis_tp.bench.scoring import score
from oasis_tp.bench.tasks import GENERATORS, generate, make_sample, read_haystack, read_questions
from oasis_tp.bench.tasks.draft import Question, sentences, unlike_words
from oasis_tp.bench.tasks.fit import largest_fit
from oasis_tp.bench.tasks.hide import DEPTHS, depth_of, hide
from oasis_tp.bench.tasks.words import FILLER
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import make_tiny

TASKS = list(TASK_SPECS)
PIECES = sentences(prose())
QUESTIONS = tuple(
    Question(f"What does paragraph {n} say?", f"Paragraph {n}. " + "".join(PIECES[5 * n : 5 * n + 3]), (f"answer {n}",))
    for n in range(400)
)


class Words:
    """A token for every word."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def unigram() -> Tokenizer:
    """Pieces of a unigram model over prose, and a token before every text."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([prose()[:60_000]], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, eos_token_ids=(), chat_template=None, template_tokens={})


@pytest.fixture(scope="module")
def tokenizers_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    tiny = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    return {
        "smollm2": load_tokenizer(resolve_model("smollm2")),
        "bytes": load_tokenizer(tiny),
        "unigram": unigram(),
    }


def sample_of(task: str, length: int = 3000, index: int = 0, seed: int = 42, tokenizer: Any = None) -> Sample:
    return make_sample(tokenizer or Words(), task, length, index, seed, PIECES, QUESTIONS)


def test_every_task_has_a_generator_and_the_others_none() -> None:
    assert set(GENERATORS) == set(TASK_SPECS)
    assert len([task for task in TASKS if task.startswith("niah_")]) == 8


@pytest.mark.parametrize("name", ["smollm2", "bytes", "unigram"])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_exact_and_the_largest_that_fit(
    tokenizers_by_name: dict[str, Tokenizer], name: str, task: str
) -> None:
    tokenizer = tokenizers_by_name[name]
    for length in (3500, 9000):
        sample = sample_of(task, length, index=1, tokenizer=tokenizer)
        assert sample.length == len(tokenizer.encode(sample.prompt)) + sample.tokens_to_generate <= length
        # No piece of a haystack is longer than a paragraph.
        longest_piece = 700 if name == "bytes" or task == "qa" else 250
        if not (task == "qa" and length == 9000):
            assert length - sample.length < longest_piece
        assert (sample.task, sample.index, sample.max_length) == (task, 1, length)


@given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=300), head=st.integers(1, 20), smallest=st.integers(0, 3)
)
def test_the_fit_is_the_largest(pieces: list[int], head: int, smallest: int) -> None:
    def words(size: int) -> str:
        return "x " * (head + sum(pieces[index % len(pieces)] for index in range(size)))

    least = len(words(smallest).split())
    for allowed in (least, least + 1, 3 * least + 17, 1000):
        size, count = largest_fit(Words(), allowed, words, smallest)
        assert count == len(words(size).split()) <= allowed < len(words(size + 1).split())
    with pytest.raises(ValueError, match=rf"at least {least} prompt tokens are needed, and {least - 1} are"):
        largest_fit(Words(), least - 1, words, smallest)


def test_a_seed_says_everything() -> None:
    few = list(generate(Words(), ["vt", "passkey"], [900], 2, 7))
    many = list(generate(Words(), [*TASKS[:-3], "passkey"], [900, 1200], 3, 7, questions=QUESTIONS))
    assert [(sample.task, sample.index) for sample in few] == [("vt", 0), ("passkey", 0), ("vt", 1), ("passkey", 1)]
    assert all(sample in many for sample in few)
    assert len({sample.digest for sample in many}) == len(many)
    for task in TASKS:
        texts = {sample_of(task, 2500, index, seed).prompt for index in (0, 1) for seed in (1, 2)}
        assert len(texts) == 4 and sample_of(task, 2500, 1, 2).prompt in texts


def test_depths_are_all_visited_and_the_first_few_lie_apart() -> None:
    assert {depth_of(index) for index in range(40)} == set(DEPTHS)
    assert (min(DEPTHS), max(DEPTHS)) == (0.0, 1.0)
    few = sorted(depth_of(index) for index in range(5))
    assert all(b - a > 0.1 for a, b in pairwise(few))
    assert 0.4 < few[2] < 0.6


def test_needles_stand_at_their_depth() -> None:
    assert hide(["a", "b"], [(0.0, "0"), (0.5, "5"), (1.0, "9")]) == "0a5b9"
    assert hide([], [(0.2, "2"), (0.1, "1")]) == "12"
    for index in range(5):
        sample = sample_of("niah_single_1", 5000, index)
        place = len(sample.input.split(sample.outputs[0])[0]) / len(sample.input)
        assert sample.depth == pytest.approx(place, abs=0.05)


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah_")])
def test_a_needle_task_is_solved_by_its_needles(task: str) -> None:
    sample = sample_of(task)
    found = re.findall(r"special magic (numbers|uuids) for (\S+) is: (\S+)\.", sample.input)
    asked = re.search(r"(?:numbers?|uuids?) for ([^?:]+) mentioned in the text\?", sample.input)
    assert asked
    keys = re.split(r", | and ", asked[1])
    assert sorted(value for _, key, value in found if key in keys) == sorted(sample.outputs)
    values, num_needles = {
        "niah_single_1": (1, 1),
        "niah_single_2": (1, 1),
        "niah_single_3": (1, 1),
        "niah_multikey_1": (1, 4),
        "niah_multikey_2": (1, None),
        "niah_multikey_3": (1, None),
        "niah_multivalue": (4, 4),
        "niah_multiquery": (4, 4),
    }[task]
    assert len(sample.outputs) == values
    assert len(found) == num_needles if num_needles else len(found) > 100
    assert len({key for _, key, _ in found}) == (1 if task == "niah_multivalue" else len(found))
    assert (sample.depth is None) == (values > 1)
    assert all(sample.prompt.count(value) == 1 for value in sample.outputs), "the answer prefix gives nothing away"
    is_uuid = task in ("niah_single_3", "niah_multikey_3")
    assert all(re.fullmatch(r"[0-9a-f-]{36}" if is_uuid else r"\d{7}", value) for value in sample.outputs)


def test_the_asked_key_stands_once_where_keys_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oasis_tp.bench.tasks.draft.vocabulary", lambda: ("amber", "anchor", "calm"))
    sample = sample_of("niah_multikey_2")
    key = re.findall(r"for (\S+) mentioned in the text", sample.input)[0]
    assert sample.input.count(f"for {key} is: ") == 1 and sample.input.count(" is: ") > 100


def test_a_variable_chain_is_solved_by_following_it() -> None:
    sample = sample_of("vt")
    text = sample.input.split("Variables are assigned")[2]
    value = re.search(r"the value (\d+),", text)
    assert value
    known = {value[1]}
    for name, side in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text):
        assert side in known, "assignments stand in their order"
        known.add(name)
    assert known - {value[1]} == set(sample.outputs) and len(sample.outputs) == 5
    example = sample.input.split("Variables are assigned")[1]
    assert not any(name in example for name in sample.outputs)


@pytest.mark.parametrize(("length", "common", "others"), [(3000, 6, 1), (6000, 30, 3)])
def test_common_words_are_solved_by_counting(length: int, common: int, others: int) -> None:
    sample = sample_of("cwe", length)
    example, listed = re.findall(r"most often\.\n(1\. .*)\nQuestion", sample.input)
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert {word for word, count in counts.items() if count == common} == set(sample.outputs)
    assert set(counts.values()) == {common, others} and len(sample.outputs) == 10
    assert re.findall(r"(\d+)\. ", listed) == [str(number + 1) for number in range(counts.total())]
    ten = Counter(re.findall(r"\d+\. (\S+)", example)).most_common(10)
    solution = re.search(r"are: (1\. .*)", sample.input)
    assert solution and set(re.findall(r"\d+\. (\S+)", solution[1])) == {word for word, _ in ten}
    assert len({count for _, count in ten}) == 1 and not set(sample.outputs) & {word for word, _ in ten}


def test_coded_words_are_solved_by_counting() -> None:
    for index, length in enumerate((*range(150, 250), *range(700, 800, 13))):
        sample = sample_of("fwe", length, index)
        counts = Counter(sample.input.split("\n")[1].split()).most_common()
        assert counts[0][0] == FILLER
        assert [word for word, _ in counts[1:4]] == list(sample.outputs)
        assert not counts[4:] or counts[3][1] > counts[4][1], "the third must stand alone"


def test_look_ups_are_solved_by_reading() -> None:
    sample = sample_of("kv_retrieval")
    pairs = json.loads(re.findall(r"\{[^}]*\}", sample.input)[0])
    key = re.search(r'Key: "(.*)"', sample.input)
    assert key and sample.outputs == (pairs[key[1]],) and len(pairs) > 100
    place = list(pairs).index(key[1]) / (len(pairs) - 1)
    assert sample.depth == pytest.approx(place, abs=0.02)
    sample = sample_of("passkey", index=1)
    assert re.findall(r"pass key is (\d+)\.", sample.input) == list(sample.outputs)


def test_mrcr_is_solved_by_finding_the_request() -> None:
    sample = sample_of("mrcr", 6000)
    question = re.search(r"Write (\w+), and .* the (\w+) (\w+) about (\w+) that", sample.input)
    assert question
    code, nth, form, topic = question.groups()
    passages = re.findall(rf"User: Write a {form} about {topic}\.\nAssistant: (.*)\n", sample.input)
    assert len(passages) == 4
    answer = code + passages[("first", "second", "third", "fourth").index(nth)]
    assert sample.outputs == (answer,) and sample.answer_start == code
    assert score(sample, f" {answer}") == 1.0
    wrong = code + passages[("second", "third", "fourth", "first").index(nth)]
    assert 0 < score(sample, wrong) < 0.9


def test_questions_stand_among_other_paragraphs() -> None:
    for length, all_of_them in ((3000, False), (60_000, True)):
        sample = sample_of("qa", length, index=3)
        assert sample.input.count(QUESTIONS[3].paragraph) == 1
        assert sample.outputs == ("answer 3",) and QUESTIONS[3].question in sample.input
        assert (sample.input.count("Document ") >= len(QUESTIONS)) == all_of_them
        assert sample.length == len(sample.prompt.split()) + 32
    with pytest.raises(ValueError, match="task qa needs --qa-file"):
        make_sample(Words(), "qa", 3000, 0, 0, PIECES)


def test_words_do_not_run_out() -> None:
    import random

    words = unlike_words(random.Random(0), 5000)
    assert len(set(words)) == len(words) == 5000


def test_the_prose_may_be_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael. " * 50 + "x" * 3000 + " end")
    text = read_haystack(path)
    assert "".join(sentences(text)) == text and max(map(len, sentences(text))) <= 400
    assert "".join(PIECES) == prose()
    (sample,) = generate(Words(), ["niah_single_2"], [600], 1, 0, haystack=text)
    assert sample.input.count("Ishmael") > 20 and sample.length > 590
    with pytest.raises(ValueError, match="--haystack: mrcr needs 8 passages"):
        list(generate(Words(), ["mrcr"], [600], 1, 0, haystack="Call me Ishmael. " * 50))


@pytest.mark.parametrize(
    ("data", "said"), [(b"good\n\xff\xfe", "f.txt:2: not UTF-8 at byte 5"), (b" \n", "f.txt: the file is empty")]
)
def test_a_faulty_haystack_is_named(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said):
        read_haystack(path)
    with pytest.raises(ValueError, match=r"--haystack .*: No such file"):
        read_haystack(tmp_path / "none")


GOOD = b'{"question": "q", "paragraph": "p", "answers": ["a"]}\n'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (GOOD + b'\n{"question": "q", "paragraph": "p"}', "q.jsonl:3: a question is"),
        (GOOD + b'{"question": "q", "paragraph": "p", "answers": [""]}', "q.jsonl:2: .* none of them empty"),
        (GOOD + b'"\xff"', "q.jsonl:2: not UTF-8 at byte 1 of the line"),
        (GOOD + b"{", "q.jsonl:2: Expecting"),
        (b"7", "q.jsonl:1: a question is"),
        (b"\n", "q.jsonl: no questions in it"),
    ],
)
def test_a_faulty_question_is_named(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said):
        read_questions(path)


def test_questions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(GOOD * 2)
    assert read_questions(path) == (Question("q", "p", ("a",)),) * 2


def test_a_length_that_is_too_short_names_option_and_task() -> None:
    with pytest.raises(ValueError, match=r"--lengths 140, task niah_single_1 \(128 to answer\): at least \d+ prompt"):
        sample_of("niah_single_1", 140)
