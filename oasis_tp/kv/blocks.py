"""PagePool and RunPool: who owns which device page and which host block. Pure counters, the same on every rank."""

from oasis_tp.kv.layout import RUN_BLOCKS, ceil_div


class PagePool:
    """Device pages, each owned by at most one request."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages; the caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        assert self._used.issuperset(pages), "a page was given back twice"
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Free and used pages are disjoint and together all there are."""
        assert len(self._free) + len(self._used) == self.num_pages, "pages were lost"
        assert not self._used.intersection(self._free), "a page is both free and used"


class RunPool:
    """Host blocks in runs of RUN_BLOCKS, shared read-only by reference counting (forks of one prompt)."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks % RUN_BLOCKS == 0
        self.num_runs = num_blocks // RUN_BLOCKS
        self._free = set(range(self.num_runs))
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Free runs."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free runs, contiguous where a gap is wide enough; the caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        runs = self._contiguous(count) or sorted(self._free)[:count]
        self._free.difference_update(runs)
        self._references.update(dict.fromkeys(runs, 1))
        return runs

    def share(self, runs: list[int]) -> None:
        """Add a reference to runs that are in use."""
        for run in runs:
            self._references[run] += 1

    def release(self, runs: list[int]) -> None:
        """Drop one reference each; runs without any are free again."""
        for run in runs:
            self._references[run] -= 1
            if self._references[run] == 0:
                del self._references[run]
                self._free.add(run)

    def check_integrity(self) -> None:
        """Free and referenced runs are disjoint and together all there are."""
        assert len(self._free) + len(self._references) == self.num_runs, "host blocks were lost"
        assert not self._free.intersection(self._references), "a run is both free and used"
        assert all(count > 0 for count in self._references.values())

    def _contiguous(self, count: int) -> list[int] | None:
        start, length = -1, 0
        for run in sorted(self._free):
            start, length = (start, length + 1) if run == start + length else (run, 1)
            if length == count:
                return list(range(start, start + count))
        return None


def runs_for(num_blocks: int) -> int:
    return ceil_div(num_blocks, RUN_BLOCKS)


def blocks_of(runs: list[int]) -> list[int]:
    """The host block ids in `runs`, in order."""
    return [run * RUN_BLOCKS + offset for run in runs for offset in range(RUN_BLOCKS)]
