"""The line that a busy server writes every few seconds."""

import logging
import threading
import time
from dataclasses import replace

import pytest

from oasis_tp.engine.report import EngineStats
from oasis_tp.server.busy_log import BusyLog, busy_line

BEFORE = EngineStats(kv_pages_total=10, host_blocks_total=100)


def test_a_busy_engine_says_what_it_did() -> None:
    after = replace(
        BEFORE, steps=5, num_running=3, num_waiting=2, prompt_tokens=400, generation_tokens=100, selected_blocks=1000,
        missed_blocks=50, draft_tokens=10, accepted_tokens=7, host_to_device_bytes=2 * 10**9, kv_pages_used=5,
        host_blocks_used=25,
    )  # fmt: skip
    assert busy_line(BEFORE, after, 2.0) == (
        "running 3, waiting 2, prompts 200.0 tok/s, answers 50.0 tok/s, pages 50%, host 25%, hits 95.0%, "
        "host to device 1.00 GB/s, back 0.00 GB/s, drafts accepted 70%"
    )
    assert "hits" not in (busy_line(BEFORE, replace(BEFORE, steps=1), 1.0) or "")


def test_an_idle_engine_says_nothing() -> None:
    assert busy_line(BEFORE, replace(BEFORE, last_step_time=time.monotonic()), 2.0) is None
    assert busy_line(BEFORE, replace(BEFORE, num_running=1), 2.0) is not None, "a step may take longer than a line"


def test_lines_come_while_it_is_busy_and_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    snapshots, asked = [replace(BEFORE, steps=step, num_running=1) for step in range(3)], threading.Event()

    def stats() -> EngineStats:
        if len(snapshots) == 1:
            asked.set()
            return snapshots[0]
        return snapshots.pop(0)

    with caplog.at_level(logging.INFO):
        log = BusyLog(stats, every_s=0.01)
        log.start()
        assert asked.wait(10)
        log.stop()
    assert sum("running 1" in record.getMessage() for record in caplog.records) >= 2
