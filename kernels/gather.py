"""Copies of whole blocks by a plan that lies on the device: host memory to pages, and pages to host memory."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check

COPIERS = 4
"""Programs per row and head."""
BESIDE = 8
"""Rows and heads at a time of a copy beside the compute: few programs leave it its processors."""


@triton.jit
def copy_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    counts: tl.tensor,
    num_pairs: int,
    num_heads: int,
    max_blocks: int,
    source_block_stride: tl.tensor,
    source_head_stride: tl.tensor,
    target_block_stride: tl.tensor,
    target_head_stride: tl.tensor,
    ELEMENTS: tl.constexpr,
) -> None:
    element = tl.arange(0, ELEMENTS)
    for pair in range(tl.program_id(1), num_pairs, tl.num_programs(1)):
        head, first = tl.zeros((), tl.int64) + pair % num_heads, tl.zeros((), tl.int64) + pair * max_blocks
        for index in range(tl.program_id(0), tl.load(counts + pair), tl.num_programs(0)):
            source_block = tl.load(source_blocks + first + index).to(tl.int64)
            target_block = tl.load(target_blocks + first + index).to(tl.int64)
            if (source_block >= 0) & (target_block >= 0):
                here = source + source_block * source_block_stride + head * source_head_stride
                there = target + target_block * target_block_stride + head * target_head_stride
                tl.store(there + element, tl.load(here + element))


def gather(
    host: torch.Tensor,
    kv: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    counts: torch.Tensor,
    *,
    beside: bool = False,
) -> None:
    """Copy blocks host[kv_head, source] -> kv[target, kv_head], each K and V: one layer, in one launch.

    Args:
        host: [kv_head, host_block, K|V, block_size, D]; on CUDA in pinned memory, read directly by the kernel.
        kv: [page, kv_head, K|V, block_size, D].
        sources, targets: [row, kv_head, n] int32, as in `CopyPlan`; -1 in either = skip.
        counts: [row, kv_head] int32, how many of the n are set.
        beside: the compute goes on meanwhile, so take few programs.
    """
    strides = (host.stride(1), host.stride(0), kv.stride(0), kv.stride(1))
    _copy(host, kv, sources, targets, counts, *strides, most_pairs=BESIDE if beside else None)


def write_back(
    kv: torch.Tensor, host: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
) -> None:
    """Copy blocks kv[source, kv_head] -> host[kv_head, target]: the way of `gather` backwards, at sealing."""
    _copy(kv, host, sources, targets, counts, kv.stride(0), kv.stride(1), host.stride(1), host.stride(0))


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    counts: torch.Tensor,
    *strides: int,
    most_pairs: int | None = None,
) -> None:
    num_rows, num_heads, length = sources.shape
    assert source.shape[2:] == target.shape[2:] and source.dtype == target.dtype, (source.shape, target.shape)
    assert source.is_contiguous() and target.is_contiguous() and source.dtype in FLOATS
    check(sources, (num_rows, num_heads, length), torch.int32, like=sources)
    check(targets, (num_rows, num_heads, length), torch.int32, like=sources)
    check(counts, (num_rows, num_heads), torch.int32, like=sources)
    elements = source[0, 0].numel()
    assert elements & (elements - 1) == 0, "block_size times head_dim is no power of two"
    num_pairs = num_rows * num_heads
    copy_blocks_kernel[(min(COPIERS, length), min(num_pairs, most_pairs or num_pairs))](
        source, target, sources, targets, counts, num_pairs, num_heads, length, *strides, ELEMENTS=elements
    )
