"""The entry from start to end, in a process of its own, over an engine without a model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import oasis_tp

SCRIPT = Path(__file__).with_name("fake_engine.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(oasis_tp.__file__).parents[1])}


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that has printed its ready line, and its address."""
    command = [sys.executable, str(SCRIPT), "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"ready: (\S+)", line)
        assert match is not None, line + (process.communicate(timeout=60)[1] if not line else "")
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


def stream(url: str) -> tuple[list[dict], bool]:
    """Events of a streamed request, and whether it ended in `[DONE]`."""
    body = {"prompt": "x", "stream": True}
    lines = [line[6:] for line in httpx.post(f"{url}/v1/completions", json=body, timeout=30).text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"], lines[-1] == "[DONE]"


def test_sigterm_aborts_what_is_open_and_exits_0() -> None:
    with running("silent", "--shutdown-timeout", "0") as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=30) as reply:
            assert reply.status_code == 200
            process.send_signal(signal.SIGTERM)
            text = reply.read().decode()
        assert '"finish_reason":"abort"' in text and text.endswith("data: [DONE]\n\n")
        assert process.wait(30) == 0


def test_an_engine_that_fails_tells_open_requests_and_exits_1() -> None:
    with running("broken") as (process, url):
        events, done = stream(url)
        assert done and events[-1]["error"]["type"] == "server_error"
        assert "a kernel" not in events[-1]["error"]["message"], "the cause is for the log"
        assert process.wait(30) == 1
        assert process.stderr is not None
        log = process.stderr.read()
        assert "a kernel fell over" in log and "rank 0" in log


def test_an_engine_that_hangs_tells_open_requests_prints_its_stacks_and_exits_1() -> None:
    with running("hanging", "--watchdog-timeout", "1", "--log-format", "json") as (process, url):
        events, done = stream(url)
        assert done and events[-1]["error"]["type"] == "server_error"
        assert "hangs" in events[-1]["error"]["message"]
        assert process.wait(30) == 1
        assert process.stderr is not None
        log = process.stderr.read()
        (said,) = [json.loads(line) for line in log.splitlines() if line.startswith("{") and "no step" in line]
        assert (said["level"], said["rank"]) == ("ERROR", 0)
        assert "most recent call first" in log and "fake_engine.py" in log, "where it hangs"


def test_a_unix_socket_in_place_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "oasis.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # a server that was killed leaves its file
    with running("model", "--uds", str(path)) as (process, url):
        assert url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://oasis", timeout=30) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        code, message = run("--uds", str(path))
        assert code == 2 and f"--uds {path}: Address already in use" in message
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()
    assert run("--uds", "/no/such/folder/x")[1].startswith(
        "oasis-tp serve: error: --uds /no/such/folder/x: No such file"
    )


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    return result.returncode, result.stderr


def test_what_cannot_start_says_so_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = run("--port", str(port))
        assert code == 2 and f"--port {port}: Address already in use" in message
    code, message = run("missing", "--port", "0")
    assert (code, message.strip()) == (2, "oasis-tp serve: error: --model missing: no such directory")
    code, message = run("--port", "0", "--chat-template", "/no/such.jinja")
    assert code == 2 and message.startswith("oasis-tp serve: error: --chat-template /no/such.jinja:")
    code, message = run("--port", "0", "--api-key-file", "/no/such/keys")
    assert code == 2 and message.startswith("oasis-tp serve: error: --api-key-file /no/such/keys:")
    code, message = run("--prot", "0")
    assert code == 2 and "unknown option --prot; did you mean --port?" in message
