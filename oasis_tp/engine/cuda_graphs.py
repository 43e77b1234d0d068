"""Decode steps as CUDA graphs: launches are recorded once and replayed. The only owner of capture and replay."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

Tensors = Sequence[torch.Tensor]
Forward = Callable[[Tensors], Tensors]
"""From a step's inputs to its outputs; all that differs between two steps of one key is in the inputs."""
Record = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]
"""Record what a call launches, without running it: how to run it again, and where its results will then be."""

MAX_GRAPHS = 64
"""Each keeps its own outputs and launch parameters; the one that was not used for longest goes."""
RECORD_AT = 3
"""The meeting of a key at which it is recorded: that costs several steps, and many keys never come again."""
MAX_COUNTED = 4096


@dataclass(slots=True)
class _Graph:
    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    outputs: Tensors


class DecodeGraphs:
    """Runs steps: one of a new key launches its kernels one by one (which also compiles them), the third one is
    recorded, later ones are replayed with their inputs copied over the recorded ones.

    What is recorded reads nothing of a step but its inputs: neither the host's numbers nor tensors made for one step
    only. Results stand in memory that all graphs share: use them before the next step.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._met: Counter[Hashable] = Counter()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self.num_replays = 0

    def run(self, key: Hashable, inputs: Tensors, forward: Forward) -> Tensors:
        """The results of `forward(inputs)`. `key` says everything that its launches depend on besides the inputs."""
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._met) > MAX_COUNTED:
                self._met.clear()
            self._met[key] += 1
            if self._met[key] < RECORD_AT:
                return forward(inputs)
            del self._met[key]  # should it be evicted, it begins anew
            static = [x.clone() for x in inputs]
            graph = _Graph(static, *self._record(lambda: forward(static)))
            self._graphs[key] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        for kept, new in zip(graph.inputs, inputs, strict=True):
            kept.copy_(new)
        graph.replay()
        self.num_replays += 1
        return graph.outputs


class CudaRecorder:
    """`Record` by CUDA stream capture. Side streams that the launches fork are captured where they join again."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may ask the driver things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = launch()
        return graph.replay, outputs
