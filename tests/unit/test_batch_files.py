"""The files of a batch: what is read from them, and what survives a job that ends anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.batch.lines import BadLineError, BatchLine, count_lines, read_lines
from oasis_tp.batch.results import ErrorFile, ResultFile, StatusFile


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "x"}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | changes


def read(path: Path, *lines: dict[str, Any] | bytes, done: tuple[str, ...] = ()) -> list[BatchLine | BadLineError]:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return list(read_lines(path, ("tiny",), done.__contains__))


def test_requests_come_in_order_without_blank_and_answered_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    chat = line("c", url="/v1/chat/completions", body={"messages": [{"role": "user", "content": "hi"}]})
    found = read(path, line("a"), b"  ", line("b"), chat, done=("b",))
    assert [(item.number, item.custom_id, item.model) for item in found if isinstance(item, BatchLine)] == [
        (1, "a", "tiny"),
        (4, "c", "tiny"),
    ]
    assert len(found) == 2
    assert count_lines(path, {"b", "z"}.__contains__) == (3, 1)


@pytest.mark.parametrize(
    ("bad", "said", "status"),
    [
        (b"{", "not valid JSON", 400),
        (b"[" * 100_000, "not valid JSON", 400),
        (b"\xff", "not valid JSON", 400),
        (b"[]", "JSON object", 400),
        (line(None), "custom_id is missing", 400),
        (line(""), "custom_id is missing", 400),
        (line(7), "custom_id is missing", 400),
        (line("\ud800"), "surrogate", 400),
        (line("a"), "line 1 too", 400),
        (line("b", method="GET"), "method is 'GET'", 400),
        (line("b", url="/v1/embeddings"), "url is '/v1/embeddings'", 400),
        (line("b", url=["/v1/completions"]), "url is", 400),
        (line("b", body=None), "the body must be a JSON object", 400),
        (line("b", body={"prompt": "x", "temprature": 1}), "unknown field temprature", 400),
        (line("b", body={"prompt": 5}), "prompt is missing or malformed", 400),
        (line("b", body={"prompt": "x", "stream": True}), "stream", 400),
        (line("b", body={"prompt": "x", "tools": [1]}), "tools is not supported", 400),
        (line("b", body={"prompt": "x", "model": "other"}), "'other' is not served", 404),
        (line("b", extra=1), "unknown field extra", 400),
    ],
)
def test_a_bad_line_is_named_and_stops_no_other(
    tmp_path: Path, bad: dict[str, Any] | bytes, said: str, status: int
) -> None:
    first, second, third = read(tmp_path / "in.jsonl", line("a"), bad, line("z"))
    assert isinstance(first, BatchLine) and isinstance(third, BatchLine)
    assert isinstance(second, BadLineError)
    assert (second.number, second.error.status) == (2, status) and said in second.error.message


@pytest.mark.parametrize("tail", [b'{"custom_id": "c"', b'{"custom_id": "c"}', b"\0\0\0"])
def test_a_half_written_last_line_is_dropped_and_the_others_are_done(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out.jsonl"
    whole = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
    path.write_bytes(whole + tail)
    results = ResultFile(path)
    assert results.done == {"a", "b"} and path.read_bytes() == whole
    results.append({"custom_id": "d", "text": "ü"})
    assert path.read_bytes() == whole + '{"custom_id": "d", "text": "ü"}\n'.encode(), "it is there before any close"
    assert "d" in results.done
    results.close()


@pytest.mark.parametrize("content", ["notes\n", "[1]\n", '{"text": 1}\n', "\n", '{"custom_id": "a"}\nnotes\n{"cus'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"--output-file .*line \d+ is no answer"):
        ResultFile(path)
    assert path.read_text() == content


def test_two_jobs_cannot_write_one_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="another job"):
        ResultFile(tmp_path / "out.jsonl")
    first.close()
    ResultFile(tmp_path / "out.jsonl").close()


def test_files_that_cannot_be_written_are_named_by_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--output-file"):
        ResultFile(tmp_path / "no" / "out")
    with pytest.raises(ValueError, match="--error-file"):
        ErrorFile(tmp_path / "no" / "out")
    with pytest.raises(ValueError, match="--status-file"):
        StatusFile(tmp_path / "no" / "out", 1, 0).write("running", completed=0, failed=0)


def test_status_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    status = StatusFile(path, total=5, resumed=2)
    for state in ("running", "preempted"):
        status.write(state, completed=3, failed=1)
        content = json.loads(path.read_text())
        assert (content["state"], content["total"], content["completed"]) == (state, 5, 3)
        assert (content["resumed"], content["failed"]) == (2, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
