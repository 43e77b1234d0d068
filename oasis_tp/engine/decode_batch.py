"""What the decoded rows of a step need: a request's tensors on this rank, and the step's view of them."""

from dataclasses import dataclass, field
from typing import Any

import torch

from oasis_tp.kv.layout import SelectionLayout
from oasis_tp.sparse.lookahead import NONE, Lookahead
from oasis_tp.sparse.sketch import Sketch


@dataclass(slots=True)
class RowStats:
    """What one request's decoding did on this rank. Tensors stay on the device until the request ends."""

    missed_mass: torch.Tensor  # [] fp32, summed over rows, layers and local query heads
    counts: torch.Tensor  # [4] int64: blocks missed, ordered ahead, selected after they landed, selected before
    missed_mass_count: int = 0
    selected_blocks: int = 0
    attended_tokens: int = 0
    context_tokens: int = 0

    @property
    def missed_blocks(self) -> int:
        return int(self.counts[0])

    @property
    def prefetched(self) -> torch.Tensor:
        """[3] int64: blocks ordered ahead, selected after they landed, selected before."""
        return self.counts[1:]


@dataclass(slots=True)
class RowState:
    """A running request on this rank. Slot i is page `pages[i]`; without eviction (`resident`) slot i is block i."""

    row: int
    selection: SelectionLayout
    pages: torch.Tensor  # [num_slots] int64
    host_blocks: torch.Tensor  # [total blocks] int64, model's device
    host_blocks_cpu: torch.Tensor  # the same on the CPU
    resident: bool
    sketch: Sketch | None
    use_tail: bool
    stats: RowStats
    lookahead: Lookahead = NONE
    recall: bool = True
    """What a row selects is fetched; else it attends what earlier steps brought of it."""
    open_block: int = -1
    """The newest block that has a slot."""

    @property
    def num_slots(self) -> int:
        return self.pages.numel()


@dataclass(slots=True)
class DecodeRow:
    """One row of a step: a token at `position` of its request, and which blocks it attends by position alone."""

    state: RowState
    position: int
    candidates: tuple[int, int]
    pinned: tuple[torch.Tensor, torch.Tensor] | None = None
    """Sink blocks [local_kv_head, sink] and recent ones [local_kv_head, n] int64, the open block last; for torch only:
    kernels know them by position.
    """
    probe: bool = False
    """Only looks ahead: attends what is there, and its output, K and V are dropped."""
    leads: bool = False
    """The last row of its request: what it ranks best is brought in for the next step."""

    @property
    def block(self) -> int:
        return self.position // self.state.selection.block_size

    @property
    def selects(self) -> bool:
        """There are more candidates than the budget; else the row attends everything."""
        first, last = self.candidates
        return self.state.selection.budget is not None and last - first > self.state.selection.budget

    @property
    def lookahead(self) -> Lookahead:
        return self.state.lookahead if self.leads and self.selects else NONE

    @property
    def num_attended_tokens(self) -> int:
        """Tokens the row reads, itself included."""
        left_out = 0
        if self.selects:
            assert self.state.selection.budget is not None
            left_out = self.candidates[1] - self.candidates[0] - self.state.selection.budget
        return self.position + 1 - left_out * self.state.selection.block_size


@dataclass(slots=True)
class DecodeBatch:
    """The decoded rows of one step, in plan order, and where their tokens' K/V go."""

    rows: list[DecodeRow] = field(default_factory=list)
    open_pages: torch.Tensor | None = None  # [layer, row, local_kv_head] int64
    offsets: torch.Tensor | None = None  # [row] int64, position inside the block
    step: Any = None
    """The kernels' own view of the rows, where kernels decode them: a CpuStep or a TritonStep."""
