"""Retrieval tasks that are generated anew, at a length counted by the model's own tokenizer, the same for a seed."""

import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from oasis_tp.bench.haystack import Tokenizer, prose
from oasis_tp.bench.samples import TASK_SPECS, Sample
from oasis_tp.bench.tasks import niah
from oasis_tp.bench.tasks.draft import Ask, Generator, Question, sentences
from oasis_tp.bench.tasks.hide import depth_of
from oasis_tp.bench.tasks.lookup import kv_retrieval, passkey
from oasis_tp.bench.tasks.mrcr import mrcr
from oasis_tp.bench.tasks.qa import qa, read_questions
from oasis_tp.bench.tasks.tracing import vt
from oasis_tp.bench.tasks.words import cwe, fwe

__all__ = ["GENERATORS", "generate", "make_sample", "read_haystack", "read_questions"]

GENERATORS: dict[str, Generator] = {
    **niah.TASKS,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
    "qa": qa,
    "passkey": passkey,
    "kv_retrieval": kv_retrieval,
    "mrcr": mrcr,
}


def generate(
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    lengths: Sequence[int],
    num_samples: int,
    seed: int,
    *,
    haystack: str | None = None,
    questions: tuple[Question, ...] = (),
) -> Iterator[Sample]:
    """`num_samples` of every task at every length; sample i is the same whatever else is asked for.

    Args:
        tokenizer: counts tokens.
        lengths: most tokens of prompt and answer together.
        seed: with task, length and number it decides a sample.
        haystack: prose; None: the standard library's help topics.
        questions: for the task `qa`.

    Raises:
        ValueError: a length at which a task's smallest prompt does not fit; a task that needs a file it has not got.
    """
    pieces = sentences(prose() if haystack is None else haystack)
    for index in range(num_samples):  # first all tasks' first samples: a run that is cut short has some of each
        for length in lengths:
            for task in tasks:
                yield make_sample(tokenizer, task, length, index, seed, pieces, questions)


def make_sample(
    tokenizer: Tokenizer,
    task: str,
    length: int,
    index: int,
    seed: int,
    haystack: tuple[str, ...],
    questions: tuple[Question, ...] = (),
) -> Sample:
    """One sample; see `generate`."""
    if task == "qa" and not questions:
        raise ValueError("task qa needs --qa-file FILE, the questions and their paragraphs")
    spec = TASK_SPECS[task]
    ask = Ask(
        tokenizer=tokenizer,
        num_tokens=length - spec.tokens_to_generate,
        rng=random.Random(f"{seed}/{task}/{length}/{index}"),
        index=index,
        # Each task and length begins elsewhere, so that a few samples of each lie at many depths together.
        depth=depth_of(index + zlib.crc32(f"{task}/{length}".encode())),
        haystack=haystack,
        questions=questions,
    )
    try:
        draft = GENERATORS[task](ask)
    except ValueError as error:
        raise ValueError(f"--lengths {length}, task {task} ({spec.tokens_to_generate} to answer): {error}") from error
    return Sample(
        task=task,
        index=index,
        input=draft.input,
        outputs=draft.outputs,
        length=draft.num_prompt_tokens + spec.tokens_to_generate,
        answer_prefix=draft.answer_prefix,
        max_length=length,
        tokens_to_generate=spec.tokens_to_generate,
        metric=spec.metric,
        depth=None if draft.depth is None else round(draft.depth, 4),
        answer_start=draft.answer_start,
    )


def read_haystack(path: Path) -> str:
    """A user's prose.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"--haystack {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"--haystack {path}:{line}: not UTF-8 at byte {error.start} of the file") from error
    if not text.strip():
        raise ValueError(f"--haystack {path}: the file is empty")
    return text
