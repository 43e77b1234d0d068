"""When a process must end by itself: its launcher is gone, or its engine does not move any more."""

import ctypes
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
STDERR = 2
"""The process's own, whatever `sys.stderr` has become."""
BACKSTOP_S = 15.0
"""Seconds after the watchdog's time at which the process ends even if no Python code can run in it."""

logger = logging.getLogger(__name__)


def exit_with_parent() -> None:
    """Have Linux send this process SIGTERM when its launcher dies, also of SIGKILL.

    For ranks of a launcher only: a single server may well outlive the shell that started it.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        logger.warning("cannot follow the launcher's end: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it died before Linux knew
        os.kill(os.getpid(), signal.SIGTERM)


class Watchdog:
    """Ends a process whose engine has not made a step for too long.

    All Python stacks go to stderr first. A thread looks at the engine's heartbeat; where even that thread cannot run
    (something keeps the interpreter), the interpreter's own timer writes the stacks and ends the process.

    Args:
        timeout_s: longest time without a step.
        last_step: time.monotonic() of the engine's last step.
        on_hang: called once before the process ends with status 1, to tell whoever waits.
    """

    def __init__(self, timeout_s: float, last_step: Callable[[], float], on_hang: Callable[[], None]) -> None:
        self._timeout_s, self._last_step, self._on_hang = timeout_s, last_step, on_hang
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """The loop has ended as it should."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        started = time.monotonic()
        while True:
            age_s = time.monotonic() - max(self._last_step(), started)
            left_s = self._timeout_s - age_s
            if left_s <= 0:
                break
            faulthandler.dump_traceback_later(left_s + BACKSTOP_S, exit=True, file=STDERR)
            if self._stopped.wait(left_s):
                return
        logger.error("the engine has made no step for %.0f s; the stacks of all threads follow", age_s)
        faulthandler.dump_traceback(all_threads=True, file=STDERR)
        try:
            self._on_hang()
        finally:
            os._exit(1)
