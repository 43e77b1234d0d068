"""What a CUDA graph would do, where there is no GPU: the recorder that DecodeGraphs is checked with on a CPU."""

from collections.abc import Callable

import torch

from oasis_tp.engine.cuda_graphs import Tensors


def recorded(launch: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """`Record` that keeps the call with all it was given at first, so that whatever a later step does not say through
    its inputs would be an earlier step's. A replay makes the same launches, with the results where the first ones were.
    """
    outputs: list[torch.Tensor] = []

    def replay() -> None:
        fresh = launch()
        if not outputs:
            outputs.extend(fresh)
        for kept, new in zip(outputs, fresh, strict=True):
            kept.copy_(new)

    return replay, outputs
