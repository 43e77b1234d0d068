"""The compiled CPU path, operation by operation: checked against torch's operations, then timed beside them."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

from oasis_tp.bench.ceiling import step_bytes, timed
from oasis_tp.bench.decode_rig import CPU, DecodeRig, layout_of
from oasis_tp.bench.step_parts import PARTS, PartTimer
from oasis_tp.config import SparsityConfig
from oasis_tp.kernels import cpu
from oasis_tp.kv.layout import ceil_div
from oasis_tp.models.registry import ModelArch

COLD_BYTES = 2**28
"""What one pass over an operation's data reads at least: more than caches hold, as in a whole model's step."""
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


def check_decode(arch: ModelArch, library: ctypes.CDLL) -> dict[str, bool]:
    """Whether the compiled select and attend do what torch's operations do, over a few small steps.

    select: the same blocks are on the device after every step; attend: the same output within TOLERANCE.
    """
    sparsity = SparsityConfig(budget_tokens=CHECK_BUDGET_TOKENS, hot_factor=1.5)
    asked = (layout_of(arch, 2), arch.num_heads // arch.num_kv_heads, sparsity, CHECK_CONTEXT, 2)
    ours, theirs = (DecodeRig(*asked, library=found) for found in (library, None))
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
    moved = step_bytes(0, layout_of(arch, 1), sparsity, context, batch)
    num_layers = min(arch.num_layers, ceil_div(COLD_BYTES, moved.kv + moved.sketch))
    num_bytes = {"select": moved.sketch, "attend": moved.kv}
    asked = (layout_of(arch, num_layers), arch.num_heads // arch.num_kv_heads, sparsity, context, batch)
    rigs = [DecodeRig(*asked, library=found) for found in (library, None)]
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
