"""RULER's question answering over a user's file: the paragraph that answers, among the file's others."""

import json
from pathlib import Path
from typing import Any

from oasis_tp.bench.tasks.draft import Ask, Draft, Question
from oasis_tp.bench.tasks.fit import largest_fit


def qa(ask: Ask) -> Draft:
    """Question number `index` of the file; as many other paragraphs around its own as fit, in random order."""
    wanted = ask.questions[ask.index % len(ask.questions)]
    others = [text for text in dict.fromkeys(q.paragraph for q in ask.questions) if text != wanted.paragraph]
    ask.rng.shuffle(others)
    place = ask.rng.random()

    def text(size: int) -> str:
        paragraphs = others[:size]
        paragraphs.insert(round(place * len(paragraphs)), wanted.paragraph)
        documents = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(paragraphs, 1))
        return (
            "Answer the question from the documents below. Give the answer alone, without other words.\n\n"
            f"{documents}\n\nQuestion: {wanted.question}"
        )

    # Past the last paragraph a size adds nothing; the search must not run on for ever there.
    size, num_tokens = largest_fit(
        ask.tokenizer, ask.num_tokens, lambda size: text(size) + " Answer:" + " ." * max(0, size - len(others)), 0
    )
    if size > len(others):
        size = len(others)
        num_tokens = len(ask.tokenizer.encode(text(size) + " Answer:"))
    return Draft(
        input=text(size), outputs=wanted.answers, answer_prefix=" Answer:", num_prompt_tokens=num_tokens, depth=place
    )


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read JSON lines of {"question": text, "paragraph": text, "answers": [text, …]}.

    Raises:
        ValueError: the file cannot be read, is empty, or a line is not of that form; file and line are named.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--qa-file {path}: {error.strerror}") from error
    questions = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                questions.append(_question(json.loads(line.decode())))
            except UnicodeDecodeError as error:
                raise ValueError(f"--qa-file {path}:{number}: not UTF-8 at byte {error.start} of the line") from error
            except ValueError as error:  # JSON's errors are of this kind too
                raise ValueError(f"--qa-file {path}:{number}: {error}") from error
    if not questions:
        raise ValueError(f"--qa-file {path}: no questions in it")
    return tuple(questions)


def _question(record: Any) -> Question:
    form = '{"question": text, "paragraph": text, "answers": [text, …]}'
    if not isinstance(record, dict):
        raise ValueError(f"a question is {form}")
    texts = [record.get("question"), record.get("paragraph"), *(record.get("answers") or [None])]
    if not isinstance(record.get("answers"), list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"a question is {form}, none of them empty")
    return Question(record["question"], record["paragraph"], tuple(record["answers"]))
