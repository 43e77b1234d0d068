"""A log line every few seconds while requests run: how many, how fast, how well the tiers do."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oasis_tp.engine.engine import EngineStats

EVERY_S = 10.0

logger = logging.getLogger(__name__)


def busy_line(before: "EngineStats", after: "EngineStats", seconds: float) -> str | None:
    """What happened between two snapshots; None when the engine had nothing to do."""
    if after.steps == before.steps and not after.num_running:
        return None
    gained = {
        name: getattr(after, name) - getattr(before, name)
        for name in (
            "prompt_tokens", "generation_tokens", "selected_blocks", "missed_blocks", "draft_tokens", "accepted_tokens",
            "host_to_device_bytes", "device_to_host_bytes",
        )
    }  # fmt: skip
    parts = [
        f"running {after.num_running}, waiting {after.num_waiting}",
        f"prompts {gained['prompt_tokens'] / seconds:.1f} tok/s",
        f"answers {gained['generation_tokens'] / seconds:.1f} tok/s",
        f"pages {after.kv_pages_used / max(after.kv_pages_total, 1):.0%}",
        f"host {after.host_blocks_used / max(after.host_blocks_total, 1):.0%}",
    ]
    if gained["selected_blocks"]:
        parts.append(f"hits {1 - gained['missed_blocks'] / gained['selected_blocks']:.1%}")
    copied = gained["host_to_device_bytes"], gained["device_to_host_bytes"]
    parts.append("host to device {:.2f} GB/s, back {:.2f} GB/s".format(*(value / seconds / 1e9 for value in copied)))
    if gained["draft_tokens"]:
        parts.append(f"drafts accepted {gained['accepted_tokens'] / gained['draft_tokens']:.0%}")
    return ", ".join(parts)


class BusyLog:
    """Logs `busy_line` every `every_s` seconds from a thread of its own."""

    def __init__(self, stats: Callable[[], "EngineStats"], every_s: float = EVERY_S) -> None:
        self._stats, self._every_s = stats, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="busy-log", daemon=True)

    def start(self) -> None:
        """Log from now on."""
        self._thread.start()

    def stop(self) -> None:
        """No line comes after this."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        before, since = self._stats(), time.monotonic()
        while not self._stopped.wait(self._every_s):
            after, now = self._stats(), time.monotonic()
            line = busy_line(before, after, now - since)
            if line is not None:
                logger.info("%s", line)
            before, since = after, now
