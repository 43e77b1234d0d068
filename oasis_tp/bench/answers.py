"""Answers to retrieval samples, and the file they are appended to: what a run that was interrupted goes on from."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from oasis_tp.bench.samples import Sample
from oasis_tp.bench.scoring import score
from oasis_tp.config import HotFactor, SketchKind, SparsityConfig
from oasis_tp.request import KvStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How an answer was made: `dense`, `resolve` or `paper` with the rest, or `endpoint`, the server's own matter."""

    mode: str
    sketch: SketchKind | None = None
    budget: int | None = None
    tail: bool | None = None

    @property
    def label(self) -> str:
        if self.mode == "paper":
            return f"paper {self.budget}"
        if self.mode != "resolve":
            return self.mode
        return f"{self.sketch} {self.budget}" + (" + tail" if self.tail else "")

    def sparsity(self, hot_factor: HotFactor) -> SparsityConfig:
        """The engine's words for it."""
        if self.mode == "dense":
            return SparsityConfig(attention="dense")
        if self.mode == "paper":
            assert self.budget
            return SparsityConfig(attention="paper", budget_tokens=self.budget, hot_factor=hot_factor)
        assert self.mode == "resolve" and self.sketch and self.budget and self.tail is not None, self
        return SparsityConfig(
            budget_tokens=self.budget, hot_factor=hot_factor, sketch=self.sketch, tail_estimate=self.tail
        )


def make_modes(modes: list[str], sketches: list[SketchKind], budgets: list[int], tails: list[bool]) -> list[Mode]:
    """`dense` first, because all others are compared with it; minmax has no tail estimate, and paper is minmax."""
    found = [Mode(mode=mode) for mode in ("dense", "endpoint") if mode in modes]
    if "resolve" in modes:
        found += [
            Mode(mode="resolve", sketch=sketch, budget=budget, tail=tail)
            for sketch in sketches
            for budget in budgets
            for tail in (tails if sketch != "minmax" else [False])
        ]
    if "paper" in modes:
        found += [Mode(mode="paper", sketch="minmax", budget=budget, tail=False) for budget in budgets]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One sample's answer in one mode. The names `index`, `pred`, `outputs` are RULER's.

    With `error` there is no answer; such a one is asked again by the next run.
    """

    digest: str
    task: str
    index: int
    max_length: int
    depth: float | None
    mode: Mode
    pred: str
    outputs: tuple[str, ...]
    score: float
    error: str | None = None
    missed_mass: float | None = None
    hit_rate: float | None = None
    attended_share: float | None = None

    @classmethod
    def to(cls, sample: Sample, mode: Mode, pred: str, kv: KvStats | dict[str, Any] | None) -> "Answer":
        """The scored answer. `kv`: the request's tier statistics, where the engine gave some."""
        figures: dict[str, Any] = asdict(kv) if isinstance(kv, KvStats) else (kv or {})
        kept: dict[str, Any] = {name: figures.get(name) for name in ("missed_mass", "hit_rate", "attended_share")}
        return cls(**_about(sample, mode), pred=pred, score=score(sample, pred), **kept)

    @classmethod
    def failed(cls, sample: Sample, mode: Mode, error: str) -> "Answer":
        where = f"{sample.source}: " if sample.source else ""
        return cls(**_about(sample, mode), pred="", score=0.0, error=where + error)

    @property
    def key(self) -> tuple[str, Mode]:
        return self.digest, self.mode


def _about(sample: Sample, mode: Mode) -> dict[str, Any]:
    return {
        "digest": sample.digest,
        "task": sample.task,
        "index": sample.index,
        "max_length": sample.max_length,
        "depth": sample.depth,
        "mode": mode,
        "outputs": sample.outputs,
    }


class AnswerFile:
    """JSON lines: how the run was made, then one answer each, on the disk before the next is asked for."""

    def __init__(self, path: Path, made_with: dict[str, Any]) -> None:
        """Open it, made or not. A last line that was cut off by an interruption is removed.

        Args:
            made_with: what answers of one file have in common; a file made otherwise is refused.

        Raises:
            ValueError: the file is not one of answers, was made otherwise, or cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        self.answers: dict[tuple[str, Mode], Answer] = {}
        if whole == 0:
            self._append({"made_with": made_with})
            return
        before, answers = _read(path, data[:whole])
        different = [name for name in {**before, **made_with} if before.get(name) != made_with.get(name)]
        if different:
            said = "; ".join(f"{name} {before.get(name)!r}, now {made_with.get(name)!r}" for name in different)
            raise ValueError(f"{path} was made with {said}: give another --out, or the options it was made with")
        self.answers = {answer.key: answer for answer in answers}

    @property
    def done(self) -> set[tuple[str, Mode]]:
        """What need not be asked again."""
        return {key for key, answer in self.answers.items() if answer.error is None}

    def append(self, answer: Answer) -> None:
        """Keep an answer for good. A second one for the same sample and mode takes the first one's place."""
        self.answers[answer.key] = answer
        self._append(asdict(answer))

    def close(self) -> None:
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_answers(path: Path) -> tuple[dict[str, Any], list[Answer]]:
    """How a file's run was made, and its answers; the last one counts where a sample was asked again.

    Raises:
        ValueError: no such file, or not one of answers; file and line are named.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    made_with, answers = _read(path, data[: data.rfind(b"\n") + 1])
    return made_with, list({answer.key: answer for answer in answers}.values())


def _read(path: Path, data: bytes) -> tuple[dict[str, Any], list[Answer]]:
    made_with: dict[str, Any] | None = None
    answers = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line.decode())
            if number == 1:
                made_with = dict(record["made_with"])
            else:
                record["mode"] = Mode(**record["mode"])
                record["outputs"] = tuple(record["outputs"])
                answers.append(Answer(**record))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a line of answers ({error}); give another --out") from error
    if made_with is None:
        raise ValueError(f"{path}: no answers in it")
    return made_with, answers
