"""DevicePool: the pages that attention reads."""

import torch

from oasis_tp.kv.layout import KvLayout


class DevicePool:
    """K and V pages on the model's device.

    A page id names one slot in every layer and local head. Rows of the flat view are (layer, page, head, K|V) with
    block_size * head_dim elements each; their number passes 2**31 elements, so indices are int64.
    """

    def __init__(self, layout: KvLayout, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        heads, block, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        # [layer, page, local_kv_head, K|V, block_size, head_dim]
        self.kv = torch.empty(layout.num_layers, num_pages, heads, 2, block, dim, dtype=dtype, device=device)
        self.rows = self.kv.view(-1, block * dim)
        self._tokens = self.kv.view(-1, dim)
        self._head_offset = torch.arange(heads, device=device)[:, None]  # [head, 1]

    def row_index(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Flat row of K (V is the next one) for pages [local_kv_head, n] int64 of one layer."""
        return ((layer * self.num_pages + pages) * self.layout.num_kv_heads + self._head_offset) * 2

    def write_tokens(
        self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Put tokens into pages [n, local_kv_head] int64 at offsets [n] int64 in the block; k and v [n, head, dim]."""
        rows = self.row_index(layer, pages.t()).t()  # [n, head]
        index = (rows * self.layout.block_size + offsets[:, None]).reshape(-1)
        dim = self.layout.head_dim
        self._tokens.index_copy_(0, index, k.reshape(-1, dim))
        self._tokens.index_copy_(0, index + self.layout.block_size, v.reshape(-1, dim))

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [local_kv_head, n * block_size, head_dim] of pages [local_kv_head, n], in the order given."""
        heads, count = pages.shape
        index = self.row_index(layer, pages).reshape(-1)
        shape = (heads, count * self.layout.block_size, self.layout.head_dim)
        return self.rows.index_select(0, index).view(shape), self.rows.index_select(0, index + 1).view(shape)

    def gather_block(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [layer, local_kv_head, block_size, head_dim] of one block, at pages [layer, local_kv_head] int64."""
        layers = torch.arange(pages.shape[0], device=pages.device)[:, None]
        both = self.kv[layers, pages, self._head_offset.t()]  # [layer, head, K|V, block, dim]
        return both[:, :, 0], both[:, :, 1]
