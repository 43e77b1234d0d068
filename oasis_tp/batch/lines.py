"""The input of a batch: one JSON request per line, checked as the HTTP server would check it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oasis_tp.server.protocol import ApiError, ChatRequest, CompletionRequest, check_model, validation_error

BODIES: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLine:
    """One request of the input; `number` is its line, from 1."""

    number: int
    custom_id: str
    model: str
    body: CompletionRequest | ChatRequest


class BadLineError(Exception):
    """A line that cannot become a request; what was readable of it, and why."""

    def __init__(self, number: int, custom_id: str | None, error: ApiError) -> None:
        super().__init__(error.message)
        self.number, self.custom_id, self.error = number, custom_id, error


def read_lines(path: Path, served: Sequence[str], is_done: Callable[[str], bool]) -> Iterator[BatchLine | BadLineError]:
    """The requests of a file in order, without blank lines and without those that are done.

    A file is read as it is used, so its length does not matter.

    Args:
        served: names that a body's `model` may have.
        is_done: whether a custom_id has its answer.
    """
    first_line: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            custom_id = None
            try:
                data = _parse(line)
                custom_id = _custom_id(data)
                if custom_id in first_line:
                    raise ApiError(400, f"custom_id stands on line {first_line[custom_id]} too", "custom_id")
                first_line[custom_id] = number
                if is_done(custom_id):
                    continue
                body = _body(data)
                yield BatchLine(number=number, custom_id=custom_id, model=check_model(body.model, served), body=body)
            except ApiError as error:
                yield BadLineError(number, custom_id, error)


def count_lines(path: Path, is_done: Callable[[str], bool]) -> tuple[int, int]:
    """Lines of the input that are not blank, and how many of them are done (see `read_lines`)."""
    total, done = 0, set()
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            total += 1
            try:
                custom_id = _custom_id(_parse(line))
            except ApiError:
                continue
            if is_done(custom_id):
                done.add(custom_id)
    return total, len(done)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the line is not valid JSON") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the line must be a JSON object with custom_id, method, url and body")
    return data


def _custom_id(data: dict[str, Any]) -> str:
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ApiError(400, "custom_id is missing; allowed: a string that is not empty", "custom_id")
    if custom_id.encode(errors="replace").decode() != custom_id:
        raise ApiError(400, "custom_id holds half of a surrogate pair, which is not text", "custom_id")
    return custom_id


def _body(data: dict[str, Any]) -> CompletionRequest | ChatRequest:
    unknown = sorted(data.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise ApiError(400, f"unknown field {unknown[0]}; a line has custom_id, method, url and body", unknown[0])
    if data.get("method") != "POST":
        raise ApiError(400, f"method is {data.get('method')!r}; allowed: 'POST'", "method")
    url = data.get("url")
    kind = BODIES.get(url) if isinstance(url, str) else None
    if kind is None:
        raise ApiError(400, f"url is {url!r}; allowed: {', '.join(BODIES)}", "url")
    try:
        body = kind.model_validate(data.get("body"))
    except ValidationError as error:
        raise validation_error({**error.errors()[0]}) from error
    if body.stream:
        raise ApiError(400, "stream: a batch has nobody to stream to; leave it out", "stream")
    return body
