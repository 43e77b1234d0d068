"""The demo's own parts, without the engine: starting and ending a server, reading a stream, judging the figures."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.bench import demo
from oasis_tp.bench.demo import Answer, Server
from oasis_tp.bench.haystack import Needle

LAUNCHER = """
import signal, subprocess, sys, time
rank = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('rank up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, text=True, start_new_session=True)
assert child.stdout.readline()
{on_term}
print("capacity: 3 requests", flush=True)
print("[rank 0] oasis_tp ready on http://127.0.0.1:123\\na late line", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("on_term", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_stop_ends_ranks_in_sessions_of_their_own_that_ignore_sigterm(
    on_term: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Server([sys.executable, "-c", LAUNCHER.format(on_term=on_term)])
    try:
        assert server.start(timeout_s=60) == "http://127.0.0.1:123"
        assert len(server.processes()) == 2
    finally:
        server.stop(timeout_s=2)
    assert server.processes() == []
    assert "capacity: 3 requests" in capfd.readouterr().out
    assert server.unseen_lines() == ["a late line"]


def test_a_server_that_dies_or_never_gets_ready_is_an_error() -> None:
    for code, message in (("raise SystemExit(3)", "exit code 3"), ("import signal; signal.pause()", "not ready")):
        server = Server([sys.executable, "-c", code])
        try:
            with pytest.raises(RuntimeError, match=message):
                server.start(timeout_s=2 if "pause" in code else 60)
        finally:
            server.stop(timeout_s=5)
        assert server.processes() == []


@pytest.fixture
def api() -> Iterator[tuple[str, list[Any], list[Any]]]:
    """URL of a stand-in server, the events that it will stream, and the bodies that it got."""
    events: list[Any] = []
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if not events:
                self.send_response(400)
                self.end_headers()
                self.wfile.write(b"prompt too long")
                return
            self.send_response(200)
            self.end_headers()
            for event in events:
                data = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f": keep-alive\n\ndata: {data}\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", events, bodies
        server.shutdown()


def test_a_stream_is_printed_and_collected(
    api: tuple[str, list[Any], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, events, bodies = api
    events += [
        {"choices": [{"text": " 12"}]},
        {"choices": [{"text": "34", "finish_reason": "length", "kv": {"hit_rate": 0.5}}]},
        {"choices": [], "usage": {"prompt_tokens": 6000, "completion_tokens": 2}},
        "[DONE]",
    ]
    answer = demo.complete(url, {"prompt": "x"})
    assert bodies == [{"prompt": "x", "stream": True}]
    assert (answer.text, answer.num_tokens, answer.num_prompt_tokens) == (" 1234", 2, 6000)
    assert answer.kv == {"hit_rate": 0.5}
    assert capsys.readouterr().out == " 1234\n"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([{"choices": [{"text": "12"}]}, {"error": {"message": "rank 1 died"}}, "[DONE]"], "rank 1 died"),
        ([{"choices": [{"text": "12"}]}], r"without \[DONE\]"),
        ([], "prompt too long"),
    ],
)
def test_a_stream_that_fails_is_an_error(api: tuple[str, list[Any], list[Any]], sent: list[Any], message: str) -> None:
    url, events, _ = api
    events += sent
    with pytest.raises(RuntimeError, match=message):
        demo.complete(url, {"prompt": "x"})


def make_answer(text: str, hot_bytes: int) -> Answer:
    kv = {"budget_tokens": 512, "hot_kv_bytes": hot_bytes, "sketch_bytes": 100, "dense_kv_bytes": 1000, "hit_rate": 0.9}
    return Answer(text=text, num_tokens=3, num_prompt_tokens=6000, first_text_s=1.0, last_text_s=2.0, kv=kv)


@pytest.mark.parametrize(
    ("text", "hot_bytes", "code"), [(" 7654321.", 250, 0), (" 7654321.", 251, 1), (" 1234567.", 250, 1)]
)
def test_the_exit_code_says_whether_it_was_found_within_the_share(
    text: str, hot_bytes: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([make_answer(text, hot_bytes), make_answer(" 7654321", 1000)])
    needle = Needle("where is it", "7654321", "key")
    monkeypatch.setattr(demo, "resolve_model", lambda name, revision: Path(name))
    monkeypatch.setattr(demo, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(demo, "noise_needle", lambda *arguments, **options: needle)
    monkeypatch.setattr(demo.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(Server, "start", lambda self: "http://127.0.0.1:0")
    monkeypatch.setattr(demo, "complete", lambda url, body: next(answers))
    assert demo.main([]) == code
    output = capsys.readouterr().out.splitlines()
    figures = json.loads(output[-1])
    assert figures["answer_ok"] == ("7654321" in text) and figures["dense_answer_ok"]
    assert figures["tp"] == 2 and figures["prompt_tokens"] == 6000 and figures["dense_kv_bytes"] == 1000
    assert figures["tokens_per_s"] == 2.0
