"""A real server of one rank in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def served(model: Path, *options: str, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it takes requests; killed at the end. `log` gets what it says on stderr."""
    command = [sys.executable, "-m", "oasis_tp.serve", str(model), "--port", "0", *options]
    with log.open("w") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        try:
            assert process.stdout is not None
            ready = next((match[1] for line in process.stdout if (match := re.search(r"ready: (\S+)", line))), None)
            assert ready is not None, log.read_text()
            yield process, ready
        finally:
            process.kill()
            process.communicate()
