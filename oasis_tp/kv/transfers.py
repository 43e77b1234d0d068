"""Transfers: every copy between the device pool and the host tier, behind tickets."""

from dataclasses import dataclass

import torch

from oasis_tp.kv.device_pool import DevicePool
from oasis_tp.kv.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class Ticket:
    """A copy that was ordered. Whoever reads its destination, or overwrites its source, waits on it first."""

    num_bytes: int

    def wait(self) -> None:
        """Return once the copy is done."""


class Transfers:
    """Moves blocks between tiers.

    Ordering: copies here are ordered with the compute that surrounds them. On the CPU each is done when the call
    returns; on CUDA each is issued on the compute stream (host memory is pinned), so a store runs after the kernels
    that wrote its source, a load after the kernels that read what it overwrites, and what is launched next sees both
    done. Host bytes written by a store are read by the CPU only through a later load on the same stream. A ticket is
    therefore complete at birth, and its `wait` returns at once; callers wait all the same, because a copy engine that
    runs beside the compute keeps this interface.
    """

    def __init__(self, pool: DevicePool, host: HostTier) -> None:
        assert pool.layout == host.layout
        self.pool = pool
        self.host = host
        self.host_to_device_bytes = 0
        self.device_to_host_bytes = 0
        self._row_bytes = pool.rows.shape[1] * pool.rows.element_size()

    def store_computed(self, layer: int, host_blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ticket:
        """Store freshly computed blocks of one layer: host_blocks [n] int64 (CPU), k and v [head, n, block, dim]."""
        index = self.host.row_index(layer, host_blocks[None, :]).reshape(-1)
        width = self.host.rows.shape[1]
        self.host.rows.index_copy_(0, index, k.reshape(-1, width).cpu())
        self.host.rows.index_copy_(0, index + 1, v.reshape(-1, width).cpu())
        return self._stored(2 * index.numel())

    def store_block(self, pages: torch.Tensor, host_block: int) -> Ticket:
        """Store one sealed block of all layers and heads: pages [layer, head] int64 hold it, host_block is its home."""
        layers, heads = pages.shape
        flat = self._all_layers(pages[:, :, None]).reshape(-1)
        both = torch.stack([flat, flat + 1], dim=1).reshape(-1)
        shape = (layers, heads, 2, *self.host.kv.shape[4:])
        self.host.kv[:, :, host_block].copy_(self.pool.rows.index_select(0, both).view(shape))
        return self._stored(both.numel())

    def load(self, layer: int, heads: torch.Tensor, host_blocks: torch.Tensor, pages: torch.Tensor) -> Ticket:
        """Load blocks of one layer: triples (head, host block, page), each [n] int64."""
        layout = self.pool.layout
        target = ((layer * self.pool.num_pages + pages) * layout.num_kv_heads + heads) * 2
        heads, host_blocks = heads.cpu(), host_blocks.cpu()
        source = ((layer * layout.num_kv_heads + heads) * self.host.num_blocks + host_blocks) * 2
        for offset in (0, 1):
            rows = self.host.rows.index_select(0, source + offset)
            self.pool.rows.index_copy_(0, target + offset, rows.to(self.pool.rows.device))
        self.host_to_device_bytes += 2 * source.numel() * self._row_bytes
        return Ticket(2 * source.numel() * self._row_bytes)

    def read(self, layer: int, host_blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ticket:
        """Read whole blocks of one layer into k and v [head, n * block_size, head_dim]; host_blocks [n] int64 (CPU)."""
        source = self.host.kv[layer]
        for head in range(source.shape[0]):
            picked = source[head].index_select(0, host_blocks)  # [n, K|V, block, dim]
            k[head].view(-1, *picked.shape[2:]).copy_(picked[:, 0])
            v[head].view(-1, *picked.shape[2:]).copy_(picked[:, 1])
        num_bytes = 2 * source.shape[0] * host_blocks.numel() * self._row_bytes
        self.host_to_device_bytes += num_bytes
        return Ticket(num_bytes)

    def _all_layers(self, pages: torch.Tensor) -> torch.Tensor:
        """Flat pool rows of K for pages [layer, head, n]."""
        layers, heads, _ = pages.shape
        layer = torch.arange(layers, device=pages.device)[:, None, None] * self.pool.num_pages
        head = torch.arange(heads, device=pages.device)[None, :, None]
        return ((layer + pages) * heads + head) * 2

    def _stored(self, num_rows: int) -> Ticket:
        self.device_to_host_bytes += num_rows * self._row_bytes
        return Ticket(num_rows * self._row_bytes)
