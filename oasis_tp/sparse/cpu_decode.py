"""CpuDecode: the decoded rows of a step through the compiled CPU path (kernels/cpu.cpp)."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

from oasis_tp.config import SketchKind
from oasis_tp.kernels import cpu
from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.residency import NOTHING, Residency
from oasis_tp.kv.transfers import Transfers, Wanted
from oasis_tp.sparse.sketch import Sketch

CpuRow = cpu.Row
CpuStep = cpu.Step


def load_library(cache_dir: Path) -> ctypes.CDLL | None:
    """The compiled path, built into `cache_dir` on first use; None where there is no C++ compiler."""
    return cpu.load(cache_dir)


class CpuDecode:
    """What kernels/cpu.cpp reads, as addresses taken once; the tensors behind them are the cache's and outlive this.

    Residency tables are updated in place, as the torch path does; copies go through `Transfers` between the two calls
    of a layer, and what a verify row reads is waited for before pages are read. What is ordered ahead overwrites slots
    that no row of this step reads, so it need not wait for the second call.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        pool: DevicePool,
        residency: Residency,
        transfers: Transfers | None,
        sketches: Mapping[SketchKind, Sketch],
        group: int,
    ) -> None:
        layout = pool.layout
        assert pool.kv.dtype == torch.float32 and pool.kv.device.type == "cpu"
        self.library = library
        self.transfers = transfers
        self.layout = layout
        self.group = group
        tables = (residency.block_in_slot, residency.slot_of_block, residency.last_selected, residency.fetched)
        self.layers = [
            cpu.Layer(
                num_heads=layout.num_kv_heads,
                group=group,
                head_dim=layout.head_dim,
                block_size=layout.block_size,
                pool=pool.kv[layer].data_ptr(),
                wide_tables=int(residency.block_in_slot.dtype == torch.int32),
                block_in_slot=tables[0][layer].data_ptr(),
                slot_of_block=tables[1][layer].data_ptr(),
                last_selected=tables[2][layer].data_ptr(),
                fetched=tables[3][layer].data_ptr(),
                max_slots=tables[0].shape[3],
                max_blocks=tables[1].shape[3],
            )
            for layer in range(layout.num_layers)
        ]
        self.sketches = {kind: _sketch_layers(sketch, layout.num_layers) for kind, sketch in sketches.items()}

    def row(
        self,
        *,
        sketch: Sketch | None,
        pages: torch.Tensor,
        host_blocks: torch.Tensor,
        candidates: tuple[int, int],
        budget: int | None,
        **numbers: int,
    ) -> CpuRow:
        """One row of a step. `pages` and `host_blocks` are int64 and must live as long as the step."""
        return CpuRow(
            sketches=ctypes.addressof(self.sketches[sketch.kind]) if sketch else None,
            pages=pages.data_ptr(),
            host_blocks=host_blocks.data_ptr(),
            num_slots=pages.numel(),
            first=candidates[0],
            last=candidates[1],
            budget=-1 if budget is None else budget,
            **numbers,
        )

    def begin(self, rows: list[CpuRow]) -> CpuStep:
        """A step over rows, for all layers in turn."""
        return CpuStep(rows, self.layout.num_kv_heads, self.group, self.layout.block_size)

    def run(self, layer: int, step: CpuStep, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep the rows' tokens and attend, in one layer: q [row, local_head, head_dim] -> the same.

        k and v: [row, local_kv_head, head_dim].
        """
        grouped = q.view(q.shape[0], self.layout.num_kv_heads, self.group, self.layout.head_dim)
        transfers, tables = self.transfers, self.layers[layer]
        tables.in_flight = transfers.in_flight(layer) if transfers else NOTHING
        loads = cpu.select(self.library, tables, layer, step, grouped, k, v)
        if transfers is not None:
            if step.must_wait:
                transfers.settle(layer)
            if loads.shape[1]:
                transfers.load(layer, *loads).wait()
            if ahead := step.ahead():
                transfers.prefetch(layer, step.tick, [Wanted(row, *wanted) for row, wanted in ahead])
        return cpu.attend(self.library, tables, layer, step, grouped).view(q.shape)


def _sketch_layers(sketch: Sketch, num_layers: int) -> "ctypes.Array[cpu.SketchLayer]":
    def address(name: str, layer: int) -> int | None:
        tensor = getattr(sketch, name, None)
        return None if tensor is None else tensor[layer].data_ptr()

    return (cpu.SketchLayer * num_layers)(
        *(
            cpu.SketchLayer(
                kind=cpu.KINDS[sketch.kind],
                codes=address("codes", layer),
                token_scales=address("token_scales", layer),
                means=address("means", layer),
                mean_scales=address("mean_scales", layer),
                bounds=address("bounds", layer),
                rotation=sketch.rotation.data_ptr() if sketch.has_tail else None,
            )
            for layer in range(num_layers)
        )
    )
