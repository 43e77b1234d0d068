"""The compiled CPU path, operation by operation: checked against torch's operations, then timed beside them."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

from oasis_tp.bench.ceiling import step_bytes, timed
from oasis_tp.bench.step_parts import PARTS, PartTimer
from oasis_tp.config import SparsityConfig
from oasis_tp.engine.decode_batch import RowState
from oasis_tp.engine.kv_cache import CacheShape, KvCache
from oasis_tp.kernels import cpu
from oasis_tp.kv.blocks import runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, Capacity, KvLayout, SelectionLayout, ceil_div
from oasis_tp.models.registry import ModelArch
from oasis_tp.request import Request, RequestSpec, SamplingParams

CPU = torch.device("cpu")
BLOCK = 16
COLD_BYTES = 2**28
"""What one pass over an operation's data reads at least: more than caches hold, as in a whole model's step."""
SEAL_BLOCKS = 512
TOLERANCE = 2e-5  # fp32 sums over unit variance, both sides in fp32
CHECK_CONTEXT, CHECK_BUDGET_TOKENS = 700, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One operation at a shape; `context` is 0 where it does not matter. Seconds are medians over rounds."""

    kernel: str
    context: int
    batch: int
    num_bytes: int
    seconds: float
    torch_seconds: float | None


class DecodeRig:
    """Rows of equal context over random KV, `num_layers` layers of it, through the compiled path or torch's.

    Two of the same arguments hold the same and are asked the same.
    """

    def __init__(
        self,
        arch: ModelArch,
        sparsity: SparsityConfig,
        context: int,
        batch: int,
        num_layers: int,
        library: ctypes.CDLL | None,
    ) -> None:
        self.group, self.position = arch.num_heads // arch.num_kv_heads, context - 1
        layout = _layout(arch, num_layers)
        selection = SelectionLayout.from_config(sparsity, BLOCK, float(sparsity.hot_factor))
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
            group=self.group,
        )
        self.cache = KvCache(shape, torch.float32, CPU, library)
        self.generator = torch.Generator().manual_seed(context)
        self._fill()
        self.query = self._normal(batch, arch.num_kv_heads * self.group)
        self.states = [self._admit(row, context, sparsity, selection, own, homes) for row in range(batch)]

    def step(self) -> torch.Tensor:
        """Every layer attends with its rows' next queries, close to the last: outputs [layer, row, head, D]."""
        shape = self.query.shape[1:]
        self.query = 0.95 * self.query + 0.3 * self._normal(*shape[:2])
        batch = self.cache.prepare(self.states, [self.position] * len(self.states))
        k, v = torch.zeros(2, shape[0], self.cache.layout.num_kv_heads, shape[2])
        return torch.stack([self.cache.decode(layer, batch, q, k, v) for layer, q in enumerate(self.query)])

    def _normal(self, *shape: int) -> torch.Tensor:
        """[layer, *shape, D], a little wider than unit variance, so that scores have peaks."""
        layout = self.cache.layout
        return 1.5 * torch.randn(layout.num_layers, *shape, layout.head_dim, generator=self.generator)

    def _fill(self) -> None:
        assert self.cache.transfers is not None
        host = self.cache.transfers.host.kv.normal_(generator=self.generator)
        for sketch in self.cache.sketches.values():
            for layer in range(host.shape[0]):
                for ids in torch.arange(host.shape[2]).split(SEAL_BLOCKS):
                    k, v = host[layer][:, ids].transpose(0, 1).unbind(2)
                    sketch.seal(layer, ids, k, v)

    def _admit(
        self, row: int, context: int, sparsity: SparsityConfig, selection: SelectionLayout, own: int, homes: int
    ) -> RowState:
        request = Request(
            spec=RequestSpec(request_id=row, prompt_ids=(0,) * (context - 1), sampling=SamplingParams()),
            max_total_tokens=context,
            sparsity=sparsity,
            row=row,
            pages=list(range(row * own, (row + 1) * own)),
            host_blocks=list(range(row * homes, (row + 1) * homes)),
        )
        state = self.cache.admit(request, selection)
        self.cache.begin_decode(state, context - 1, self.query[:, row], -1)
        return state


def check_decode(arch: ModelArch, library: ctypes.CDLL) -> dict[str, bool]:
    """Whether the compiled select and attend do what torch's operations do, over a few small steps.

    select: the same blocks are on the device after every step; attend: the same output within TOLERANCE.
    """
    sparsity = SparsityConfig(budget_tokens=CHECK_BUDGET_TOKENS, hot_factor=1.5)
    ours, theirs = (DecodeRig(arch, sparsity, CHECK_CONTEXT, 2, 2, found) for found in (library, None))
    right = {"select": True, "attend": True}
    before = ours.cache.residency.block_in_slot.clone()
    for _ in range(4):
        out, want = ours.step(), theirs.step()
        right["attend"] &= bool((out - want).abs().max() <= TOLERANCE)
        right["select"] &= torch.equal(ours.cache.residency.block_in_slot, theirs.cache.residency.block_in_slot)
    assert not torch.equal(before, theirs.cache.residency.block_in_slot), "nothing was fetched: the check says nothing"
    return right


def time_decode(
    arch: ModelArch, sparsity: SparsityConfig, context: int, batch: int, library: ctypes.CDLL, rounds: int
) -> Iterator[Timing]:
    """select and attend, per layer."""
    moved = step_bytes(0, _layout(arch, 1), sparsity, context, batch)
    num_layers = min(arch.num_layers, ceil_div(COLD_BYTES, moved.kv + moved.sketch))
    num_bytes = {"select": moved.sketch, "attend": moved.kv}
    rigs = [DecodeRig(arch, sparsity, context, batch, num_layers, found) for found in (library, None)]
    timers = [PartTimer(CPU, {part: PARTS[part] for part in num_bytes}) for _ in rigs]
    for rig in rigs:
        rig.step()
    for _ in range(rounds):
        for rig, timer in zip(rigs, timers, strict=True):
            timer.run(rig.step)
    for kernel, size in num_bytes.items():
        ours, theirs = (median(step[kernel] for step in timer.steps) / num_layers for timer in timers)
        yield Timing(kernel=kernel, context=context, batch=batch, num_bytes=size, seconds=ours, torch_seconds=theirs)


def linears(arch: ModelArch) -> dict[str, tuple[int, int, bool]]:
    """The model's products: inputs, outputs, and whether SiLU of a gate comes before."""
    heads, kv_heads, dim, hidden = arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.hidden_size
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * dim, False),
        "out": (heads * dim, hidden, False),
        "gate_up": (hidden, 2 * arch.intermediate_size, False),
        "down": (arch.intermediate_size, hidden, True),
        "head": (hidden, arch.vocab_size, False),
    }


def torch_linear(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """f(x) Wᵀ; `gated`: f is silu of the first half of x times the second."""
    if gated:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    return F.linear(x, weight)


def check_linear(arch: ModelArch, library: ctypes.CDLL, name: str) -> bool:
    """Whether the compiled product is torch's, within TOLERANCE, for one row and for several."""
    inputs, outputs, gated = linears(arch)[name]
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    several = torch.randn(5, inputs * (1 + gated), generator=generator)
    return all(
        bool((cpu.linear(library, x, weight, gated=gated) - torch_linear(x, weight, gated)).abs().max() <= TOLERANCE)
        for x in (several[:1], several)
    )


def time_linear(arch: ModelArch, name: str, batch: int, library: ctypes.CDLL, rounds: int) -> Timing:
    """One of the model's products, over so many copies of its weights that none is found in a cache."""
    inputs, outputs, gated = linears(arch)[name]
    copies = ceil_div(COLD_BYTES, outputs * inputs * torch.float32.itemsize)
    weights = torch.randn(copies, outputs, inputs) / inputs**0.5
    x = torch.randn(batch, inputs * (1 + gated))

    def compiled() -> None:
        for weight in weights:
            cpu.linear(library, x, weight, gated=gated)

    def plain() -> None:
        for weight in weights:
            torch_linear(x, weight, gated)

    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, times in zip((compiled, plain), seconds, strict=True):
            times.append(timed(side, CPU) / copies)
    ours, theirs = map(median, seconds)
    return Timing(
        kernel=f"linear {name}", context=0, batch=batch, num_bytes=weights[0].nbytes, seconds=ours, torch_seconds=theirs
    )


def _layout(arch: ModelArch, num_layers: int) -> KvLayout:
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        block_size=BLOCK,
        dtype_bytes=torch.float32.itemsize,
    )
