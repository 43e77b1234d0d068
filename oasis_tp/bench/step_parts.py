"""Where a decode step's time goes: timers around the engine's own functions, there only while a profile is taken."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch

from oasis_tp.bench.ceiling import synchronize

PARTS = {
    "matrix products": (
        "oasis_tp.nn.linear:ColumnLinear.__call__",
        "oasis_tp.nn.linear:RowLinear.__call__",
        "oasis_tp.nn.embedding:VocabEmbedding.logits",
    ),
    "all-reduce": ("oasis_tp.comm:TpGroup.all_reduce", "oasis_tp.comm:TpGroup.gather_logits"),
    # The compiled CPU path, the torch operations that run without it, and the Triton kernels.
    "select": (
        "oasis_tp.kernels.cpu:select",
        "oasis_tp.engine.kv_cache:select_blocks",
        "oasis_tp.sparse.triton_decode:TritonDecode._score",
        "oasis_tp.kernels.group_scores:group_scores",
        "oasis_tp.kernels.top_blocks:top_blocks",
        "oasis_tp.kernels.copy_plan:plan_copies",
        "oasis_tp.kernels.copy_plan:plan_ahead",
    ),
    # Those that a step waits for, and the orders of those that it does not.
    "copies": tuple(
        f"oasis_tp.kv.transfers:Transfers.{name}"
        for name in ("load", "settle", "prefetch", "load_planned", "prefetch_planned", "join")
    ),
    "attend": (
        "oasis_tp.kernels.attention:sparse_attention",
        "oasis_tp.kernels.tail_attention:tail_attention",
        "oasis_tp.kernels.merge_states:merge_states",
        "oasis_tp.kernels.cpu:attend",
        "oasis_tp.engine.kv_cache:attend_blocks",
        "oasis_tp.kv.device_pool:DevicePool.gather",
    ),
    "store and seal": ("oasis_tp.kv.device_pool:DevicePool.write_tokens", "oasis_tp.engine.kv_cache:KvCache.seal"),
    # What is left of these, once the parts above are taken out of them.
    "norm, rope and rest": ("oasis_tp.models.llama:LlamaModel.forward",),
    "sampling": ("oasis_tp.engine.model_runner:ModelRunner._sample",),
}
REST = "plan and bookkeeping"
"""A step outside all parts."""


class PartTimer:
    """Seconds by part, step by step. A part's time is its own: what it spends inside other timed calls is theirs."""

    def __init__(self, device: torch.device, parts: Mapping[str, tuple[str, ...]] = PARTS) -> None:
        self.device = device
        self.parts = parts
        self.steps: list[dict[str, float]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time every call of the parts' functions while the context lasts."""
        with ExitStack() as stack:
            for part, names in self.parts.items():
                for name in names:
                    place, attribute = _place(name)
                    timed = self._timed(part, getattr(place, attribute))
                    stack.enter_context(patch.object(place, attribute, timed))
            yield

    def run(self, action: Callable[[], object]) -> None:
        """Call `action`, one step, with the timers in place; what lies in no part is counted as REST."""
        self._seconds.clear()
        with self.installed():
            self._timed(REST, action)()
        self.steps.append({part: self._seconds[part] for part in (*self.parts, REST)})

    def median_step(self) -> dict[str, float]:
        """The parts of the step whose time is the median, in the order of the table."""
        return sorted(self.steps, key=lambda step: sum(step.values()))[len(self.steps) // 2]

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            synchronize(self.device)
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                synchronize(self.device)
                elapsed = time.perf_counter() - start
                self._seconds[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return call


def _place(name: str) -> tuple[Any, str]:
    """`module:Class.method` or `module:function` -> what holds it, and its name there."""
    module, _, path = name.partition(":")
    *owner, attribute = path.split(".")
    return resolve_name(f"{module}:{'.'.join(owner)}"), attribute
