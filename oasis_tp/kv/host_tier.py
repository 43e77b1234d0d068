"""HostTier: the home of every block in the rank's own host memory."""

import math
import mmap
import weakref

import torch

from oasis_tp.kv.layout import KvLayout, ceil_div

REGISTER_CHUNK_BYTES = 64 * 2**30


class HostTier:
    """Full KV of every admitted request, pinned where the model is on CUDA.

    Rows of the flat view are (layer, head, host block, K|V) with block_size * head_dim elements each. A block's bytes
    are valid once it was stored; kv/transfers.py moves them.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype, *, pin: bool) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        heads, block, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        # [layer, local_kv_head, host_block, K|V, block_size, head_dim]
        shape = (layout.num_layers, heads, num_blocks, 2, block, dim)
        self.kv = _whole_pages(math.prod(shape), dtype).view(shape) if pin else torch.empty(shape, dtype=dtype)
        if pin:
            # Memory that is given back while registered could not be registered for the next tier that gets it.
            weakref.finalize(self, _unregister, _register(self.kv)).atexit = False
        self.rows = self.kv.view(-1, block * dim)
        self._head_offset = torch.arange(heads)[:, None] * num_blocks  # [head, 1]

    def row_index(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Flat row of K (V is the next one) for host blocks [local_kv_head or 1, n] int64 of one layer."""
        return (layer * self.layout.num_kv_heads * self.num_blocks + self._head_offset + blocks) * 2


def _whole_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [numel] that shares no page of memory with anything else: what is pinned is pages."""
    raw = torch.empty(numel * dtype.itemsize + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    start = -raw.data_ptr() % mmap.PAGESIZE
    return raw[start : start + numel * dtype.itemsize].view(dtype)


def _register(tensor: torch.Tensor) -> list[int]:
    """Pin the pages of a `_whole_pages` tensor, in chunks: torch's own pinned allocator rounds up to a power of two.

    Returns where the chunks begin.
    """
    start, left = tensor.data_ptr(), ceil_div(tensor.nbytes, mmap.PAGESIZE) * mmap.PAGESIZE
    starts = []
    while left > 0:
        size = min(left, REGISTER_CHUNK_BYTES)
        code = torch.cuda.cudart().cudaHostRegister(start, size, 0)
        if int(code) != 0:
            raise ValueError(
                f"pinning {left / 2**30:.1f} GiB of host memory failed (CUDA error {int(code)}): lower --host-kv-gb or "
                "raise the locked-memory limit (ulimit -l)"
            )
        starts.append(start)
        start, left = start + size, left - size
    return starts


def _unregister(starts: list[int]) -> None:
    """Let go of `_register`'s chunks, once no copy can be reading them any more."""
    torch.cuda.synchronize()
    for start in starts:
        torch.cuda.cudart().cudaHostUnregister(start)
