"""Rows of equal context over random KV: a few layers of a decode step without a model around them."""

import ctypes
from collections.abc import Hashable

import torch

from oasis_tp.config import SparsityConfig
from oasis_tp.engine.cuda_graphs import DecodeGraphs, Forward, Tensors
from oasis_tp.engine.decode_batch import RowState
from oasis_tp.engine.kv_cache import CacheShape, KvCache
from oasis_tp.kv.blocks import runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, Capacity, KvLayout, SelectionLayout
from oasis_tp.models.registry import ModelArch
from oasis_tp.request import Request, RequestSpec, SamplingParams

CPU = torch.device("cpu")
BLOCK = 16
SEAL_BLOCKS = 512


def layout_of(arch: ModelArch, num_layers: int, dtype: torch.dtype = torch.float32) -> KvLayout:
    """The KV of so many layers of a model."""
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        block_size=BLOCK,
        dtype_bytes=dtype.itemsize,
    )


class DecodeRig:
    """Rows of equal context through a KvCache: by the compiled path, the Triton kernels or torch's operations.

    Two of the same arguments hold the same and are asked the same, whatever they decode with.
    """

    def __init__(
        self,
        layout: KvLayout,
        group: int,
        sparsity: SparsityConfig,
        context: int,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        library: ctypes.CDLL | None = None,
        use_triton: bool = False,
    ) -> None:
        """`group`: query heads per KV head; `context` in tokens, the row's own included."""
        assert layout.dtype_bytes == dtype.itemsize
        self.layout, self.group, self.position, self.sparsity = layout, group, context - 1, sparsity
        self.dtype, self.device, self.use_triton = dtype, device, use_triton
        selection = SelectionLayout.from_config(sparsity, layout.block_size, float(sparsity.hot_factor))
        num_blocks = layout.num_blocks(context)
        own, homes = selection.num_pages(num_blocks, host_tier=True), runs_for(num_blocks) * RUN_BLOCKS
        shape = CacheShape(
            layout=layout,
            capacity=Capacity(num_pages=batch * own, num_host_blocks=batch * homes, hot_factor=selection.hot_factor),
            host_tier=True,
            max_model_len=context,
            max_num_seqs=batch,
            max_slots=own,
            sketches=(sparsity.sketch,),
            group=group,
        )
        self.cache = KvCache(shape, dtype, device, library, use_triton=use_triton)
        self.generator = torch.Generator(device).manual_seed(context)
        self._fill()
        self.query = self._normal(batch, layout.num_kv_heads * group)
        self.keys, self.values = (self._normal(batch, layout.num_kv_heads) for _ in range(2))
        self.states = [self._admit(row, context, selection, own, homes) for row in range(batch)]

    def step(self, graphs: DecodeGraphs | None = None) -> torch.Tensor:
        """Every layer attends with its rows' next queries, close to the last: outputs [layer, row, head, D]."""
        self.query = 0.95 * self.query + 0.3 * self._normal(*self.query.shape[1:3])
        self.keys, self.values = (self._normal(*self.keys.shape[1:3]) for _ in range(2))
        return self.again(graphs)

    def again(self, graphs: DecodeGraphs | None = None) -> torch.Tensor:
        """A step that asks the same as the last one did."""
        key, inputs, forward = self.prepare()
        (out,) = forward(inputs) if graphs is None else graphs.run(key, inputs, forward)
        return out

    def prepare(self) -> tuple[Hashable, Tensors, Forward]:
        """The next step as DecodeGraphs takes it."""
        batch = self.cache.prepare(self.states, [self.position] * len(self.states))
        inputs = [self.query, self.keys, self.values]
        if self.use_triton:
            inputs.append(batch.step.inputs)

        def forward(inputs: Tensors) -> Tensors:
            if self.use_triton:
                batch.step.inputs = inputs[3]
            layers = enumerate(zip(*inputs[:3], strict=True))
            return [torch.stack([self.cache.decode(layer, batch, *qkv) for layer, qkv in layers])]

        return batch.step.key if self.use_triton else None, inputs, forward

    def _normal(self, *shape: int) -> torch.Tensor:
        """[layer, *shape, D], a little wider than unit variance, so that scores have peaks."""
        size = (self.layout.num_layers, *shape, self.layout.head_dim)
        return (1.5 * torch.randn(size, generator=self.generator, device=self.device)).to(self.dtype)

    def _fill(self) -> None:
        assert self.cache.transfers is not None
        for layer, host in enumerate(self.cache.transfers.host.kv):  # [head, host block, K|V, block, D]
            for ids in torch.arange(host.shape[1]).split(SEAL_BLOCKS):
                size = (len(ids), host.shape[0], *host.shape[2:])
                part = torch.randn(size, generator=self.generator, device=self.device).to(self.dtype)
                host[:, ids] = part.transpose(0, 1).cpu()
                for sketch in self.cache.sketches.values():
                    sketch.seal(layer, ids.to(self.device), *part.unbind(2))

    def _admit(self, row: int, context: int, selection: SelectionLayout, own: int, homes: int) -> RowState:
        request = Request(
            spec=RequestSpec(request_id=row, prompt_ids=(0,) * (context - 1), sampling=SamplingParams()),
            max_total_tokens=context,
            sparsity=self.sparsity,
            row=row,
            pages=list(range(row * own, (row + 1) * own)),
            host_blocks=list(range(row * homes, (row + 1) * homes)),
        )
        state = self.cache.admit(request, selection, self.sparsity.looks_ahead(self.device.type == "cuda"))
        self.cache.begin_decode(state, context - 1, self.query[:, row], -1)
        return state
