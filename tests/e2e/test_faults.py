"""A rank of two is killed, stopped or raises while a request runs: the client is told, and nothing stays behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.tiny import make_tiny

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("failing.py")
WATCHDOG_S = 4
TOLD_WITHIN_S = WATCHDOG_S + 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A window that no request fills before the fault.
    return make_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


@contextmanager
def serving(model: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, list[psutil.Process]]]:
    """The launcher, the server's address, and its ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    options = ["--port", "0", "--comm", "gloo", "--watchdog-timeout", str(WATCHDOG_S), "--max-num-seqs", "2"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    process = subprocess.Popen(
        [*launcher, str(model), *options, "--budget-tokens", "64"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=variables,
    )  # fmt: skip
    ranks: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if match := re.search(r"ready: (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(printed))
        ranks = [child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()]
        yield process, match[1], sorted(ranks, key=lambda child: int(child.environ()["RANK"]))
    finally:
        for one in [process, *ranks]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()


class HealthWatch:
    """Asks /health all the time; `statuses` are its answers, in order, without repetitions (0: no answer)."""

    def __init__(self, url: str) -> None:
        self.statuses: list[int] = []
        self._url = url
        self._answered, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "HealthWatch":
        self._thread.start()
        assert self._answered.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            try:
                status = httpx.get(f"{self._url}/health", timeout=30).status_code
            except httpx.TransportError:
                status = 0
            if self.statuses[-1:] != [status]:
                self.statuses.append(status)
            self._answered.set()


def check_fault(fault: str, rank: int, model: Path, **environment: str) -> None:
    before = set(os.listdir("/dev/shm"))
    with serving(model, **environment) as (launcher, url, ranks):
        assert len(ranks) == 2
        body = {"prompt": "the quick brown fox", "max_tokens": 16000, "ignore_eos": True, "stream": True}
        events: list[str] = []
        with (
            HealthWatch(url) as health,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply,
        ):
            lines = reply.iter_lines()
            events.append(next(lines))
            assert "text" in events[0]
            started = time.monotonic()
            if fault != "raise":
                ranks[rank].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            try:
                events += [line for line in lines if line]
            except httpx.TransportError:
                assert (fault, rank) == ("kill", 0), "only a server that is gone may leave its clients without a word"
                events.append("gone")
            assert time.monotonic() - started < TOLD_WITHIN_S
            if (fault, rank) == ("stop", 1):
                ranks[rank].send_signal(signal.SIGCONT)  # the launcher would kill it after 30 s
            assert launcher.stdout is not None
            log = launcher.stdout.read()
            assert launcher.wait(40) != 0
        if events[-1] != "gone":
            assert health.statuses == [200, 503, 0]
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
            assert error["type"] == "server_error" and "kernel" not in error["message"], "the cause is for the log"
        else:
            assert health.statuses == [200, 0]
        if fault == "stop":
            assert "no step for" in log and "most recent call first" in log
        if fault == "raise":
            assert f"rank {rank}" in log and "a kernel fell over" in log
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive, "orphans"
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, int(port)))
    left = {name for name in set(os.listdir("/dev/shm")) - before if "oasis" in name or "deepspeed" in name}
    assert not left


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["kill", "stop", "raise"])
def test_a_fault_on_a_rank_is_told_and_leaves_nothing_behind(model: Path, fault: str, rank: int) -> None:
    check_fault(fault, rank, model, **({"FAIL_RANK": str(rank)} if fault == "raise" else {}))
