"""A rank ends with its launcher, and a loop that moves is left alone."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from oasis_tp.lifetime import Watchdog
from oasis_tp.server.logs import JsonFormatter

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""
RANK = """
import os, signal
from oasis_tp.lifetime import exit_with_parent
exit_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_rank_ends_when_its_launcher_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        launcher.send_signal(signal.SIGKILL)
        try:
            # The pipe is the rank's too: it ends when both are gone.
            reader = threading.Thread(target=launcher.stdout.read, daemon=True)
            reader.start()
            reader.join(20)
            assert not reader.is_alive(), "the rank lives on"
        finally:
            if reader.is_alive():
                os.kill(rank, signal.SIGKILL)


def test_the_watchdog_leaves_a_loop_alone_that_moves() -> None:
    asked = threading.Semaphore(0)

    def last_step() -> float:
        asked.release()
        return time.monotonic()

    def hang() -> None:
        raise AssertionError("it moves")

    watchdog = Watchdog(0.02, last_step, hang)
    watchdog.start()
    for _ in range(5):
        assert asked.acquire(timeout=10)
    watchdog.stop()


def test_a_json_log_line_has_one_line_and_the_exception() -> None:
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        record = logging.LogRecord("name", logging.ERROR, "", 0, "step %d", (7,), sys.exc_info())
    line = JsonFormatter(3).format(record)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["level"], entry["rank"], entry["logger"], entry["message"]) == ("ERROR", 3, "name", "step 7")
    assert "RuntimeError: a\nb" in entry["exception"] and entry["time"].endswith("Z")
