"""Who is timed at a context and batch: this engine's modes and the peers, as contestants that take turns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from oasis_tp.bench.ceiling import StepBytes
from oasis_tp.bench.forks import WARM_STEPS, Decoded
from oasis_tp.bench.gguf_export import export_gguf
from oasis_tp.bench.peers import Peer, PeerError, check_memory, peer_python
from oasis_tp.engine.engine import Engine
from oasis_tp.engine.memory import GIB
from oasis_tp.kv.layout import ceil_div


@dataclass(kw_only=True)
class Contestant:
    """One engine and mode at one context and batch; `decode` takes a turn."""

    engine: str
    mode: str
    dtype: str
    context: int
    batch: int
    ceiling: StepBytes
    decode: Callable[[], Decoded]
    turns: list[Decoded] = field(default_factory=list)
    parts_ms: dict[str, float] = field(default_factory=dict)
    """Where a step's time goes: the median step of one more turn, taken with timers."""

    def row(self, bytes_per_s: float) -> dict[str, Any]:
        """The turns' steps together: median and p99, beside the ceiling at that bandwidth."""
        ranked = sorted(step_s * 1e3 for turn in self.turns for step_s in turn.step_s)
        ceilings = {name: getattr(self.ceiling, name) / bytes_per_s * 1e3 for name in ("weights", "kv", "sketch")}
        hit_rates = [turn.hit_rate for turn in self.turns if turn.hit_rate is not None]
        return {
            "engine": self.engine,
            "mode": self.mode,
            "dtype": self.dtype,
            "context": self.context,
            "batch": self.batch,
            "ms_per_step": round(median(ranked), 2),
            "p99_ms": round(ranked[ceil_div(99 * len(ranked), 100) - 1], 2),
            "ceiling_ms": round(sum(ceilings.values()), 2),
            "ceiling_parts_ms": {name: round(ms, 2) for name, ms in ceilings.items()},
            "ceiling_share": round(sum(ceilings.values()) / median(ranked), 4),
            "hot_kv_bytes": self.turns[-1].hot_kv_bytes,
            "hit_rate": round(fmean(hit_rates), 4) if hit_rates else None,
            "loaded_bytes_per_step": self.turns[-1].loaded_bytes,
            "parts_ms": {part: round(ms, 2) for part, ms in self.parts_ms.items()},
        }


class Rivals:
    """The peers that were asked for, as contestants; those that cannot be measured are listed with the reason."""

    def __init__(self, names: Sequence[str], environments: Path, engine: Engine, num_steps: int) -> None:
        self.engine, self.num_steps = engine, num_steps
        self.not_measured: list[dict[str, Any]] = []
        self.pythons: dict[str, Path] = {}
        self._gguf: Path | None = None
        self._stack = ExitStack()
        for name in names:
            try:
                if engine.tp.device.type != "cpu" and name != "transformers":
                    raise PeerError(f"it runs on the CPU, and this engine on {engine.tp.device.type}")
                self.pythons[name] = peer_python(name, environments)
            except PeerError as error:
                self.report(name, error)

    def report(self, name: str, error: PeerError, **where: int) -> None:
        """Say that a peer is left out, and go on."""
        self.not_measured.append({"engine": name, **where, "why": str(error)})
        place = "".join(f", {key} {value}" for key, value in where.items())
        print(f"{name}{place}: not measured: {error}", flush=True)

    @contextmanager
    def at(self, context: int, batch: int, ceiling: StepBytes) -> Iterator[list[Contestant]]:
        """Every peer's process at one context and batch, waiting for its turns."""
        where = {"context": context, "batch": batch}
        with ExitStack() as stack:
            contestants = []
            for name in self.pythons:
                try:
                    check_memory(ceiling.total + ceiling.kv // batch + GIB // 2)
                    peer = Peer(self.pythons[name], self._job(name, **where))
                except PeerError as error:
                    self.report(name, error, **where)
                    continue
                stack.callback(peer.close)
                contestants.append(
                    Contestant(
                        engine=name,
                        mode="dense",
                        dtype=peer.dtype,
                        context=context,
                        batch=batch,
                        ceiling=ceiling,
                        decode=partial(_turn, peer),
                    )
                )
            yield contestants

    def close(self) -> None:
        self._stack.close()

    def _job(self, name: str, context: int, batch: int) -> dict[str, Any]:
        return {
            "peer": name,
            "model": str(self._gguf_file() if name == "llama.cpp" else self.engine.model_dir),
            # As many cached tokens as the forks have after their first token.
            "context": context - 1 - WARM_STEPS - self.num_steps,
            "batch": batch,
            "warm_steps": WARM_STEPS,
            "steps": self.num_steps,
            "threads": torch.get_num_threads(),
            "device": self.engine.tp.device.type,
            "dtype": dtype_name(self.engine.runner.model.dtype),
        }

    def _gguf_file(self) -> Path:
        if self._gguf is None:
            folder = self._stack.enter_context(TemporaryDirectory(prefix="oasis_tp-"))
            target = Path(folder) / "model.gguf"
            try:
                export_gguf(self.engine.model_dir, target)
            except ValueError as error:
                raise PeerError(str(error)) from error
            self._gguf = target
        return self._gguf


def _turn(peer: Peer) -> Decoded:
    return Decoded(step_s=peer.decode(), hot_kv_bytes=peer.kv_bytes)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
