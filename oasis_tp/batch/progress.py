"""How far a batch is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """Counts answered and failed requests towards the total, on stderr."""

    def __init__(self, total: int, resumed: int) -> None:
        self.resumed = resumed
        self._total, self._count = total, resumed
        self._started = self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=resumed, unit="req", dynamic_ncols=True)
        else:
            self._print()

    def advance(self) -> None:
        """One more request has ended."""
        self._count += 1
        if self._bar is not None:
            self._bar.update()
        elif time.monotonic() - self._last >= EVERY_S or self._count == self._total:
            self._print()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self) -> None:
        self._last = time.monotonic()
        seconds = self._last - self._started
        rate = (self._count - self.resumed) / seconds if seconds else 0.0
        print(f"oasis_tp batch: {self._count} of {self._total} requests, {rate:.2f} req/s", file=sys.stderr, flush=True)
