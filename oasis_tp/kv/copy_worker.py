"""Copies beside the compute: what a copy engine offers, and the one for the CPU, a thread."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol


class Point(Protocol):
    """A place in the order of things: all compute up to some moment, or the end of one copy."""

    def reached(self) -> bool:
        """It lies behind us; asking costs next to nothing."""
        ...

    def wait(self) -> None:
        """Whatever the compute is given from here on comes after it."""
        ...


class CopyEngine(Protocol):
    """Runs copies beside the compute. Between two copies there is no order but the one that `after` asks for."""

    def now(self) -> Point:
        """Everything that the compute was given so far."""
        ...

    def run(self, copy: Callable[[], None]) -> None:
        """Run a copy in line with the compute."""
        ...

    def submit(self, copy: Callable[[], None], after: Sequence[Point]) -> Point:
        """Run a copy beside the compute once every point of `after` is reached. Returns the copy's end."""
        ...


class Done:
    """A point behind us."""

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


DONE = Done()


class CopyWorker:
    """Copies on one thread that starts with the first and ends with this object.

    The compute of a CPU is done when its call returns, so `now` is always behind us. Who must wait for a copy that has
    not begun does it himself. A copy that fails raises where its end is asked for.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    def now(self) -> Point:
        return DONE

    def run(self, copy: Callable[[], None]) -> None:
        copy()

    def submit(self, copy: Callable[[], None], after: Sequence[Point]) -> Point:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._jobs,), name="oasis_tp copies", daemon=True)
            thread.start()
            weakref.finalize(self, _stop, self._jobs, thread)
        job = _Job(copy, after)
        self._jobs.put(job)
        return job


class _Job:
    """A submitted copy and its end."""

    def __init__(self, copy: Callable[[], None], after: Sequence[Point]) -> None:
        self._copy: Callable[[], None] | None = copy
        self._after = after
        self._taken = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def perform(self) -> None:
        """Do it, unless somebody else does or did."""
        if not self._taken.acquire(blocking=False):
            return
        assert self._copy is not None
        try:
            for point in self._after:
                point.wait()
            self._copy()
        except BaseException as error:  # the thread that waits is the one to fail
            self._error = error
        self._copy, self._after = None, ()
        self._ended.set()

    def reached(self) -> bool:
        return self._ended.is_set() and self._succeeded()

    def wait(self) -> None:
        self.perform()
        self._ended.wait()
        self._succeeded()

    def _succeeded(self) -> bool:
        if self._error is not None:
            raise RuntimeError("a background copy failed") from self._error
        return True


def _stop(jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    """Let what was submitted end. A thread that the interpreter's exit meets inside a copy would abort the process."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.perform()
