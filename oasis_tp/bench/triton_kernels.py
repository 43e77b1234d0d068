"""The Triton kernels of a decode step, one by one: a step's calls, each replayed alone from a CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from oasis_tp.bench.gpu_check import seconds
from oasis_tp.bench.kernel_chain import DecodeLayer
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


def decode_layer(
    arch: ModelArch, dtype: torch.dtype, device: torch.device, context: int, batch: int, budget: int
) -> DecodeLayer:
    """A layer of the model at a context; `budget` in tokens."""
    return DecodeLayer(
        dtype,
        device,
        num_rows=batch,
        num_heads=arch.num_kv_heads,
        group=arch.num_heads // arch.num_kv_heads,
        head_dim=arch.head_dim,
        num_candidates=context // 16 - 4,
        budget=budget // 16,
    )


def step_calls(layer: DecodeLayer, q: torch.Tensor) -> Iterator[Call]:
    """The kernels that `layer.step(q)` launches, in order, as calls that can be made again.

    A second call of `plan_copies` finds everything resident, so its copies are counted as the first one's.
    """
    recorded = record(layer, q)
    group, head_dim = q.shape[2], q.shape[3]
    heads = q.shape[0] * q.shape[1]
    candidates, attended = layer.rows.bounds.max_candidates, layer.rows.bounds.max_attended
    codes, token_scales, means, mean_scales = (x[0, 0, 0] for x in layer.sketch.tensors())
    mean_bytes = (means.nbytes + mean_scales.nbytes) // 2  # of keys or of values
    block_bytes = layer.kv[0, 0].nbytes
    scores = 4 * heads * group * candidates
    missing = int(recorded["gather"][1][4].sum())
    moved = {
        "rotate": 2 * q.nbytes,
        "score": heads * candidates * (codes.nbytes + token_scales.nbytes + mean_bytes) + 2 * scores,
        "group_scores": scores + scores // group,
        "top_blocks": scores // group,
        "plan_copies": 4 * heads * (layer.budget + attended),
        "gather": missing * block_bytes,
        "sparse_attention": heads * attended * block_bytes,
        "tail_attention": heads * candidates * mean_bytes + scores,
        "merge_states": recorded["merge_states"][1][0].nbytes,
    }
    assert set(moved) == set(recorded), set(moved) ^ set(recorded)
    plain = _torch_runs(layer, recorded, head_dim)
    for kernel, (function, arguments) in recorded.items():
        yield Call(
            kernel=kernel,
            run=lambda function=function, arguments=arguments: function(*arguments),  # type: ignore[misc]
            num_bytes=moved[kernel],
            over_link=kernel == "gather",
            torch_run=plain.get(kernel),
        )


def record(layer: DecodeLayer, q: torch.Tensor) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Wrapper name -> the wrapper and its arguments, in the order of one `layer.step(q)`."""
    modules = ("rotate", "score", "group_scores", "top_blocks", "copy_plan", "gather", "attention", "tail_attention")
    wrappers = {"copy_plan": "plan_copies", "attention": "sparse_attention"}
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] = function, arguments
            return function(*arguments)

        return call

    with ExitStack() as stack:
        for module_name in (*modules, "merge_states"):
            module, name = import_module(f"oasis_tp.kernels.{module_name}"), wrappers.get(module_name, module_name)
            stack.enter_context(patch.object(module, name, recording(name, getattr(module, name))))
        layer.step(q)
    return calls


def _torch_runs(
    layer: DecodeLayer, recorded: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], head_dim: int
) -> dict[str, Callable[[], Any]]:
    """What the engine does without these kernels, row by row where it does it so."""
    q = recorded["rotate"][1][0]
    candidates = [homes[1 : layer.last] for homes in layer.homes]
    scores = recorded["group_scores"][1][0]
    shares = recorded["top_blocks"][1][0]
    return {
        "rotate": lambda: rotate_torch(q.float()),
        "score": lambda: [layer.sketch.score(0, ids, row) for ids, row in zip(candidates, q, strict=True)],
        "group_scores": lambda: [Sketch.group_scores(row) for row in scores],
        "top_blocks": lambda: [top_blocks_torch(row, layer.budget) for row in shares],
    }


def time_call(run: Callable[[], Any]) -> float:
    """Seconds of one call, from a graph of many; no word from the host lies between them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    return seconds(graph.replay) / REPEATS
