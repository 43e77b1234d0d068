"""A copy engine that delays and reorders whatever has no edge, by a seeded chance."""

import random
from collections.abc import Callable, Sequence

from oasis_tp.kv.copy_worker import DONE, Point
from oasis_tp.kv.transfers import Transfers, _index_copy


class Scrambled:
    """Copies run whenever chance wants, as far as the points they come after let them.

    With `queued`, as on a GPU: compute runs late too, in its own order, given through `run`; and a copy is launched
    when it is submitted (so it cannot be dropped any more), though its bytes move later. Without, as on a CPU: compute
    is done at once, and a copy decides when it begins what of it is still wanted.
    """

    def __init__(self, rng: random.Random, queued: bool) -> None:
        self.rng = rng
        self.queued = queued
        self._line: list[Callable[[], None] | _Job] = []  # a job: the compute waits for it
        self._num_given = self._num_done = 0
        self._beside: list[_Job] = []
        self._launching: _Job | None = None

    def attach(self, transfers: Transfers) -> None:
        """Have the engine move the bytes of what it is given."""

        def copy(*what: object) -> None:
            if self._launching is not None:
                self._launching.moves.append(lambda: _index_copy(*what))  # type: ignore[arg-type]
            else:
                _index_copy(*what)  # type: ignore[arg-type]

        transfers._copy = copy

    def now(self) -> Point:
        return _Mark(self, self._num_given) if self.queued else DONE

    def run(self, copy: Callable[[], None]) -> None:
        if self.queued:
            self._give(copy)
        else:
            copy()
        self.stir()

    def submit(self, copy: Callable[[], None], after: Sequence[Point]) -> Point:
        job = _Job(self, after)
        if self.queued:
            self._launching = job
            copy()
            self._launching = None
        else:
            job.moves.append(copy)
        self._beside.append(job)
        self.stir()
        return job

    def stir(self) -> None:
        """Run some of what may run, in some order."""
        while self.rng.random() < 0.4 and self._run_one():
            pass

    def drain(self) -> None:
        """Run all that is left, in some order."""
        while self._run_one():
            pass
        assert not self._line and not self._beside, "a circle of edges"

    def finish(self, job: "_Job") -> None:
        """Run a copy, and what it comes after, now."""
        for point in job.after:
            if isinstance(point, _Job):
                self.finish(point)
        if not job.done:
            self._perform(job)

    def wait_in_line(self, job: "_Job") -> None:
        self._give(job)

    def is_done(self, count: int) -> bool:
        return self._num_done >= count

    def _give(self, item: "Callable[[], None] | _Job") -> None:
        self._line.append(item)
        self._num_given += 1

    def _run_one(self) -> bool:
        ready: list[_Job | None] = [job for job in self._beside if all(point_is_done(p) for p in job.after)]
        if self._line and not (isinstance(self._line[0], _Job) and not self._line[0].done):
            ready.append(None)
        if not ready:
            return False
        chosen = self.rng.choice(ready)
        if chosen is not None:
            self._perform(chosen)
            return True
        item = self._line.pop(0)
        if not isinstance(item, _Job):
            item()
        self._num_done += 1
        return True

    def _perform(self, job: "_Job") -> None:
        for move in job.moves:
            move()
        job.done = True
        self._beside.remove(job)


class _Job:
    def __init__(self, engine: Scrambled, after: Sequence[Point]) -> None:
        self.engine = engine
        self.after = after
        self.moves: list[Callable[[], None]] = []
        self.done = False

    def reached(self) -> bool:
        self.engine.stir()
        return self.done

    def wait(self) -> None:
        if self.engine.queued:
            self.engine.wait_in_line(self)
        else:
            self.engine.finish(self)


class _Mark:
    def __init__(self, engine: Scrambled, count: int) -> None:
        self.engine = engine
        self.count = count

    def reached(self) -> bool:
        return self.engine.is_done(self.count)

    def wait(self) -> None:
        raise AssertionError("the compute never waits for itself")


def point_is_done(point: Point) -> bool:
    return point.done if isinstance(point, _Job) else point.reached()
