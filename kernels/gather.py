"""Copies of whole blocks by a plan that lies on the device: host memory to pages, and pages to host memory."""

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check

COPIERS = 4
"""Programs per row and head: few, so that a copy beside the compute leaves it its processors."""


@triton.jit
def copy_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_blocks: tl.tensor,
    target_blocks: tl.tensor,
    counts: tl.tensor,
    max_blocks: int,
    source_block_stride: int,
    source_head_stride: int,
    target_block_stride: int,
    target_head_stride: int,
    ELEMENTS: tl.constexpr,
) -> None:
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pair = row * tl.num_programs(1) + head
    element = tl.arange(0, ELEMENTS)
    for index in range(tl.program_id(0), tl.load(counts + pair), tl.num_programs(0)):
        source_block = tl.load(source_blocks + pair * max_blocks + index).to(tl.int64)
        target_block = tl.load(target_blocks + pair * max_blocks + index).to(tl.int64)
        if (source_block >= 0) & (target_block >= 0):
            here = source + source_block * source_block_stride + head.to(tl.int64) * source_head_stride
            there = target + target_block * target_block_stride + head.to(tl.int64) * target_head_stride
            tl.store(there + element, tl.load(here + element))


def gather(
    host: torch.Tensor, kv: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
) -> None:
    """Copy blocks host[kv_head, source] -> kv[target, kv_head], each K and V: one layer, in one launch.

    Args:
        host: [kv_head, host_block, K|V, block_size, D]; on CUDA in pinned memory, read directly by the kernel.
        kv: [page, kv_head, K|V, block_size, D].
        sources, targets: [row, kv_head, n] int32, as in `CopyPlan`; -1 in either = skip.
        counts: [row, kv_head] int32, how many of the n are set.
    """
    _copy(host, kv, sources, targets, counts, host.stride(1), host.stride(0), kv.stride(0), kv.stride(1))


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
) -> None:
    num_rows, num_heads, length = sources.shape
    assert source.shape[2:] == target.shape[2:] and source.dtype == target.dtype, (source.shape, target.shape)
    assert source.is_contiguous() and target.is_contiguous() and source.dtype in FLOATS
    check(sources, (num_rows, num_heads, length), torch.int32, like=sources)
    check(targets, (num_rows, num_heads, length), torch.int32, like=sources)
    check(counts, (num_rows, num_heads), torch.int32, like=sources)
    elements = source[0, 0].numel()
    assert elements & (elements - 1) == 0, "block_size times head_dim is no power of two"
    copy_blocks_kernel[(min(COPIERS, length), num_heads, num_rows)](
        source, target, sources, targets, counts, length, *strides, ELEMENTS=elements
    )
