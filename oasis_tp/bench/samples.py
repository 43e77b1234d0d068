"""Samples of retrieval tasks and their file: JSON lines with RULER's field names, and a few of our own beside them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Metric = Literal["all", "part", "mrcr"]
REQUIRED = ("index", "input", "outputs", "length")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """What a task's name alone says: how long its answers may be, and how they are scored (bench/scoring.py)."""

    tokens_to_generate: int
    metric: Metric = "all"


TASK_SPECS: dict[str, TaskSpec] = {
    **{
        f"niah_{name}": TaskSpec(tokens_to_generate=128)
        for name in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue")
    },
    "niah_multiquery": TaskSpec(tokens_to_generate=128),
    "vt": TaskSpec(tokens_to_generate=30),
    "cwe": TaskSpec(tokens_to_generate=120),
    "fwe": TaskSpec(tokens_to_generate=50),
    "qa": TaskSpec(tokens_to_generate=32, metric="part"),
    "passkey": TaskSpec(tokens_to_generate=16),
    "kv_retrieval": TaskSpec(tokens_to_generate=64),
    "mrcr": TaskSpec(tokens_to_generate=192, metric="mrcr"),
}
"""Every task by name. RULER's 13 tasks are the first 12: it has `qa` over two data sets (`qa_1` and `qa_2`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prompt and what a right answer contains. Every field but `source` is in the file, under the same name."""

    task: str
    index: int
    input: str
    """The prompt without the start of its answer."""
    outputs: tuple[str, ...]
    """References; how they count is the metric's matter."""
    length: int
    """Tokens of the prompt, and of the answer at its longest."""
    answer_prefix: str = ""
    """The start of the answer; the prompt is `input` and this."""
    max_length: int
    """What `length` was to come near and not to exceed; samples of one `max_length` are reported together."""
    tokens_to_generate: int
    metric: Metric = "all"
    depth: float | None = None
    """Where the one thing asked for stands, 0 (first) to 1 (last)."""
    answer_start: str = ""
    """What the answer must begin with (metric `mrcr`)."""
    source: str = field(default="", compare=False)
    """File and line it was read from."""

    @property
    def prompt(self) -> str:
        return self.input + self.answer_prefix

    @property
    def digest(self) -> str:
        """A name for the question, its references and its answer's length: what an answer kept in a file answers."""
        parts = [self.task, self.prompt, list(self.outputs), self.tokens_to_generate, self.answer_start]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def record(self) -> dict[str, Any]:
        """The sample as its file has it. `length_w_model_temp` is RULER's second name for the length."""
        return {
            "index": self.index,
            "input": self.input,
            "outputs": list(self.outputs),
            "length": self.length,
            "length_w_model_temp": self.length,
            "answer_prefix": self.answer_prefix,
            "task": self.task,
            "max_length": self.max_length,
            "tokens_to_generate": self.tokens_to_generate,
            "metric": self.metric,
            "depth": self.depth,
            "answer_start": self.answer_start,
        }


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Write the file, and return how many samples it has.

    Raises:
        ValueError: the file cannot be written.
    """
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for count, sample in enumerate(samples, 1):  # noqa: B007 - the count is returned
                file.write(json.dumps(sample.record(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    return count


def read_samples(path: Path) -> tuple[list[Sample], list[str]]:
    """Read a file of samples: ours, or one that RULER made.

    RULER's files do not name their task: it is the file's own name or its directory's (`vt/validation.jsonl`), and
    all samples of such a file are reported at the longest one's length.

    Returns:
        The usable samples, and one complaint (`file:line: what is wrong`) for each that is not.

    Raises:
        ValueError: the file cannot be read, or has no usable line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    records: list[tuple[str, dict[str, Any]]] = []
    complaints: list[str] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            records.append((f"{path}:{number}", _checked(_parsed(line), path)))
        except ValueError as error:
            complaints.append(f"{path}:{number}: {error}")
    if not records:
        why = f"; the first of {len(complaints)} faulty lines: {complaints[0]}" if complaints else ": the file is empty"
        raise ValueError(f"{path}: no samples in it{why}")
    longest = max(record["length"] for _, record in records)
    return [_sample(record, source, longest) for source, record in records], complaints


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not a sample: nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError(f"a sample is a JSON object, this line is a {type(record).__name__}")
    return record


def _checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record with its task filled in, after a look at every field."""
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise ValueError(f"missing field {', '.join(missing)}; needed: {', '.join(REQUIRED)}")
    task = record.get("task") or next((name for name in (path.stem, path.parent.name) if _task(name)), None)
    if not isinstance(task, str) or not _task(task):
        said = (
            "no field task, and neither the file nor its directory is named after one" if task is None else repr(task)
        )
        raise ValueError(f"task: {said}; known: {', '.join(TASK_SPECS)}")
    spec = TASK_SPECS[_task(task)]
    record = {
        "answer_prefix": "",
        "answer_start": "",
        "depth": None,
        "metric": spec.metric,
        "tokens_to_generate": spec.tokens_to_generate,
        **{name: value for name, value in record.items() if value is not None},
        "task": task,
    }

    def check(name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name} is {str(record[name])[:60]!r}; allowed: {allowed}")

    outputs, depth = record["outputs"], record["depth"]
    check("index", _is_whole(record["index"]), "a whole number")
    check("input", isinstance(record["input"], str) and record["input"] != "", "text that is not empty")
    check(
        "outputs",
        isinstance(outputs, list) and bool(outputs) and all(isinstance(text, str) and text for text in outputs),
        "a list of texts, none of them empty",
    )
    for name in ("length", "tokens_to_generate", *(["max_length"] if "max_length" in record else [])):
        check(name, _is_whole(record[name]) and record[name] > 0, "a whole number from 1")
    for name in ("answer_prefix", "answer_start"):
        check(name, isinstance(record[name], str), "text")
    check("metric", record["metric"] in get_args(Metric), ", ".join(get_args(Metric)))
    check("depth", depth is None or (isinstance(depth, int | float) and 0 <= depth <= 1), "0 to 1")
    texts = [record["input"], record["answer_prefix"], record["answer_start"], *outputs]
    if any(text.encode(errors="replace").decode() != text for text in texts):
        raise ValueError("holds half of a surrogate pair, which is not text")
    return record


def _task(name: str) -> str:
    """The task of that name in TASK_SPECS, or nothing. RULER's two question-answering files are one task here."""
    name = "qa" if name in ("qa_1", "qa_2") else name
    return name if name in TASK_SPECS else ""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sample(record: dict[str, Any], source: str, longest: int) -> Sample:
    return Sample(
        task=record["task"],
        index=record["index"],
        input=record["input"],
        outputs=tuple(record["outputs"]),
        length=record["length"],
        answer_prefix=record["answer_prefix"],
        max_length=record.get("max_length", longest),
        tokens_to_generate=record["tokens_to_generate"],
        metric=record["metric"],
        depth=None if record["depth"] is None else float(record["depth"]),
        answer_start=record["answer_start"],
        source=source,
    )
