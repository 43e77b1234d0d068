"""The Triton kernels of a decode step, one by one: a step's calls, each replayed alone from a CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from oasis_tp.bench.ceiling import seconds
from oasis_tp.bench.decode_rig import DecodeRig, layout_of
from oasis_tp.config import SparsityConfig
from oasis_tp.kernels import gather
from oasis_tp.models.registry import ModelArch
from oasis_tp.sparse.sketch import Sketch
from oasis_tp.sparse.sketch import rotate as rotate_torch
from oasis_tp.sparse.sketch import top_blocks as top_blocks_torch

REPEATS = 20
"""Times a call stands in its graph, so that the launch of the graph does not count."""
CASE_OF = {"plan_copies": "copy_plan", "sparse_attention": "attention", "tail_attention": "tail"}
"""Kernels whose case in kernel_cases.py has another name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One kernel of a step with its arguments. `num_bytes`: what it must move; `over_link`: from or to host memory."""

    kernel: str
    run: Callable[[], Any]
    num_bytes: int
    over_link: bool = False
    torch_run: Callable[[], Any] | None = None
    """The same by torch's operations, where there are such."""

    @property
    def case(self) -> str:
        return CASE_OF.get(self.kernel, self.kernel)


def decode_rig(
    arch: ModelArch, dtype: torch.dtype, device: torch.device, context: int, batch: int, budget_tokens: int
) -> DecodeRig:
    """A layer of the model at a context, nothing brought in ahead."""
    sparsity = SparsityConfig(budget_tokens=budget_tokens, hot_factor=2.0, prefetch="off")
    where: dict[str, Any] = {"dtype": dtype, "device": device, "use_triton": True}
    group = arch.num_heads // arch.num_kv_heads
    return DecodeRig(layout_of(arch, 1, dtype), group, sparsity, context, batch, **where)


def step_calls(rig: DecodeRig) -> Iterator[Call]:
    """The kernels that a rig's step launches in its first layer, in order, as calls that can be made again.

    A second call of `plan_copies` finds everything resident, so its copies are counted as the first one's.
    """
    recorded = record(rig)
    q = recorded["rotate"][1][0]  # [row, head, group, D]
    group = q.shape[2]
    heads = q.shape[0] * q.shape[1]
    selection = rig.states[0].selection
    first, last = selection.candidates(rig.position)
    assert selection.budget is not None and last - first > selection.budget
    candidates, attended = last - first, selection.pinned + selection.budget
    codes, token_scales, means, mean_scales = (x[0, 0, 0] for x in _sketch(rig).tensors())
    mean_bytes = (means.nbytes + mean_scales.nbytes) // 2  # of keys or of values
    block_bytes = rig.cache.pool.kv[0, 0, 0].nbytes
    scores = 4 * heads * group * candidates
    missing = int(recorded["gather"][1][4].sum())
    moved = {
        "rotate": 2 * q.nbytes,
        "score": heads * candidates * (codes.nbytes + token_scales.nbytes + mean_bytes) + 2 * scores,
        "group_scores": scores + scores // group,
        "top_blocks": scores // group,
        "plan_copies": 4 * heads * (selection.budget + attended),
        "gather": missing * block_bytes,
        "sparse_attention": heads * attended * block_bytes,
        "tail_attention": heads * candidates * mean_bytes + scores,
        "merge_states": recorded["merge_states"][1][0].nbytes,
    }
    assert set(moved) == set(recorded), set(moved) ^ set(recorded)
    plain = _torch_runs(rig, recorded)
    for kernel, (function, arguments) in recorded.items():
        yield Call(
            kernel=kernel,
            run=lambda function=function, arguments=arguments: function(*arguments),  # type: ignore[misc]
            num_bytes=moved[kernel],
            over_link=kernel == "gather",
            torch_run=plain.get(kernel),
        )


def record(rig: DecodeRig) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Wrapper name -> the wrapper and its arguments, in the order of the first layer of one `rig.step()`."""
    modules = ("rotate", "score", "group_scores", "top_blocks", "copy_plan", "attention", "tail_attention")
    wrappers = {"copy_plan": "plan_copies", "attention": "sparse_attention"}
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.setdefault(name, (function, arguments))
            return function(*arguments)

        return call

    transfers = rig.cache.transfers
    assert transfers is not None
    load = transfers.load_planned

    def gathering(layer: int, *plan: torch.Tensor) -> None:
        # On a CPU the engine copies by other means.
        calls.setdefault("gather", (gather.gather, (transfers.host.kv[layer], rig.cache.pool.kv[layer], *plan)))
        load(layer, *plan)

    with ExitStack() as stack:
        for module_name in (*modules, "merge_states"):
            module, name = import_module(f"oasis_tp.kernels.{module_name}"), wrappers.get(module_name, module_name)
            stack.enter_context(patch.object(module, name, recording(name, getattr(module, name))))
        stack.enter_context(patch.object(transfers, "load_planned", gathering))
        rig.step()
    return calls


def _torch_runs(
    rig: DecodeRig, recorded: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
) -> dict[str, Callable[[], Any]]:
    """What the engine does without these kernels, row by row where it does it so."""
    q = recorded["rotate"][1][0]
    sketch, selection = _sketch(rig), rig.states[0].selection
    first, last = selection.candidates(rig.position)
    candidates = [state.host_blocks[first:last] for state in rig.states]
    scores = recorded["group_scores"][1][0]
    shares = recorded["top_blocks"][1][0]
    return {
        "rotate": lambda: rotate_torch(q.float()),
        "score": lambda: [sketch.score(0, ids, row) for ids, row in zip(candidates, q, strict=True)],
        "group_scores": lambda: [Sketch.group_scores(row) for row in scores],
        "top_blocks": lambda: [top_blocks_torch(row, selection.budget or 0) for row in shares],
    }


def _sketch(rig: DecodeRig) -> Sketch:
    return rig.cache.sketches[rig.sparsity.sketch]


def time_call(run: Callable[[], Any]) -> float:
    """Seconds of one call, from a graph of many; no word from the host lies between them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    return seconds(graph.replay) / REPEATS
