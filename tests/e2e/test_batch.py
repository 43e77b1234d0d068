"""A batch from file to file on a tiny model: answers, faults, and the same answers after preemption at any size."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.batch.__main__ import PREEMPTED, SIGNALS, main
from tests.tiny import make_tiny

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("preempted.py")
NUM_GOOD = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def requests() -> list[dict[str, Any]]:
    """Every kind of request in both shapes; random draws with and without a seed."""
    made = []
    changed = {"logit_bias": {"5": -100, "9": 3}, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    for number in range(NUM_GOOD):
        prompt = "the quick brown fox " * (1 + number % 7) + str(number)
        common: dict[str, Any] = {"max_tokens": 5 + 3 * (number % 5), "ignore_eos": True}
        common |= [{"temperature": 0}, {"seed": 5, "n": 2}, changed, {"temperature": 0, "stop": ["e", " q"]}][
            number % 4
        ]
        if number % 3:
            url, body = "/v1/completions", {"prompt": prompt, "logprobs": 2 if number % 2 else None}
            body["echo"] = number % 4 == 1
        else:
            url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
        made.append({"custom_id": f"req-{number}", "method": "POST", "url": url, "body": common | body})
    return made


BAD = [
    b"half a line",
    json.dumps({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}}).encode(),
    json.dumps(
        {
            "custom_id": "bias",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "logit_bias": {"999": 1}},
        }
    ).encode(),
    json.dumps(
        {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5] * 600}}
    ).encode(),
]


def write_input(path: Path) -> Path:
    lines = [json.dumps(request).encode() for request in requests()]
    lines[4:4] = BAD
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def arguments(model: Path, folder: Path) -> list[str]:
    files = ["-i", str(write_input(folder / "in.jsonl")), "-o", str(folder / "out.jsonl")]
    return [
        str(model),
        *files,
        "--max-num-seqs",
        "2",
        "--max-num-queued-reqs",
        "1",
        "--budget-tokens",
        "64",
        "--recent-tokens",
        "16",
    ]


def answers(folder: Path) -> dict[str, Any]:
    """By custom_id, what does not differ between two runs; no custom_id twice."""
    entries = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    found = {}
    for entry in entries:
        assert entry["custom_id"] not in found, "answered twice"
        assert (entry["response"]["status_code"], entry["error"]) == (200, None)
        body = entry["response"]["body"]
        texts = [choice.get("text", choice.get("message")) for choice in body["choices"]]
        found[entry["custom_id"]] = (texts, [choice["finish_reason"] for choice in body["choices"]], body["usage"])
    return found


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.jsonl.status.json").read_text())


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(arguments(model, folder)) == 0
    return folder


def test_every_line_has_an_answer_or_an_error(whole: Path) -> None:
    found = answers(whole)
    assert set(found) == {request["custom_id"] for request in requests()}
    for request in requests():
        texts, reasons, usage = found[request["custom_id"]]
        assert len(texts) == request["body"].get("n", 1)
        assert all(reason in ("length", "stop") for reason in reasons)
        if "stop" in request["body"]:
            assert all("e" not in str(text if isinstance(text, str) else text["content"]) for text in texts)
        else:
            assert usage["completion_tokens"] == request["body"]["max_tokens"] * len(texts)
    faults = [json.loads(line) for line in (whole / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert {(fault["line"], fault["custom_id"]) for fault in faults} == {
        (5, None),
        (6, "bad"),
        (7, "bias"),
        (8, "long"),
    }
    messages = [fault["response"]["body"]["error"]["message"] for fault in faults]
    assert any("logit_bias has token id 999" in message for message in messages)
    assert any("600 tokens" in message and "512" in message for message in messages)
    assert [status(whole)[key] for key in ("state", "total", "completed", "failed")] == ["completed", 24, 20, 4]


def test_answers_are_those_of_the_http_server_s_shapes(whole: Path) -> None:
    entries = [json.loads(line) for line in (whole / "out.jsonl").read_text().splitlines()]
    bodies = {entry["custom_id"]: entry["response"]["body"] for entry in entries}
    assert bodies["req-1"]["object"] == "text_completion" and bodies["req-1"]["choices"][0]["logprobs"]["tokens"]
    assert bodies["req-0"]["object"] == "chat.completion" and bodies["req-0"]["choices"][0]["message"]["content"]


def test_a_finished_job_has_nothing_left_to_do(whole: Path, model: Path) -> None:
    before = (whole / "out.jsonl").read_bytes()
    assert main(arguments(model, whole)) == 0
    assert (whole / "out.jsonl").read_bytes() == before
    assert status(whole)["resumed"] == NUM_GOOD


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)


def test_preempted_and_resumed_gives_the_same_answers(model: Path, whole: Path, tmp_path: Path) -> None:
    result = run([sys.executable, str(SCRIPT), *arguments(model, tmp_path)])
    assert result.returncode == PREEMPTED, result.stderr
    assert status(tmp_path)["state"] == "preempted"
    assert 3 <= len(answers(tmp_path)) < NUM_GOOD
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "req-1')
    assert main(arguments(model, tmp_path)) == 0
    assert answers(tmp_path) == answers(whole)
    assert status(tmp_path)["completed"] == NUM_GOOD and status(tmp_path)["resumed"] >= 3


def test_two_ranks_preempted_through_their_launcher_and_resumed(model: Path, whole: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = run([*launcher, str(SCRIPT), *arguments(model, tmp_path), "--comm", "gloo"], PREEMPT="launcher")
    assert result.returncode != 0 and status(tmp_path)["state"] == "preempted", result.stderr
    assert 3 <= len(answers(tmp_path)) < NUM_GOOD
    result = run([*launcher, "-m", "oasis_tp.batch", *arguments(model, tmp_path), "--comm", "gloo"])
    assert result.returncode == 0, result.stderr
    assert answers(tmp_path) == answers(whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["-i", "/no/such/file"], "--input-file /no/such/file: No such file"),
        (["-o", "/no/such/file"], "--output-file /no/such/file"),
        (["--model", "/no/such/model"], "--model /no/such/model"),
    ],
)
def test_what_cannot_start_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    given = arguments(model, tmp_path)
    assert main([*(given[1:] if change[0] == "--model" else given), *change]) == 2
    assert said in capsys.readouterr().err
