"""Residency: which block each slot of each request holds, by layer and head. Rank-local; never steers scheduling."""

import torch

NEVER_EVICT = 2**31 - 1


class Residency:
    """Two tables that are each other's inverse, and when each slot was last selected.

    A request in row r owns slots 0 .. num_slots-1; the scheduler's block_table says which page each slot is.
    `tick` counts decode steps; a slot's stamp is the tick of its last selection.
    """

    def __init__(
        self, *, num_layers: int, num_rows: int, num_heads: int, max_slots: int, max_blocks: int, device: torch.device
    ) -> None:
        kind = torch.int16 if max(max_slots, max_blocks) <= 32767 else torch.int32
        shape = (num_layers, num_rows, num_heads)
        self.block_in_slot = torch.full((*shape, max_slots), -1, dtype=kind, device=device)  # -1 = empty
        self.slot_of_block = torch.full((*shape, max_blocks), -1, dtype=kind, device=device)  # -1 = not resident
        self.last_selected = torch.full((*shape, max_slots), -1, dtype=torch.int32, device=device)
        self.tick = 0

    @staticmethod
    def num_bytes(*, num_layers: int, num_rows: int, num_heads: int, max_slots: int, max_blocks: int) -> int:
        """Device bytes of the three tables."""
        kind = 2 if max(max_slots, max_blocks) <= 32767 else 4
        return num_layers * num_rows * num_heads * (max_slots * (kind + 4) + max_blocks * kind)

    def clear(self, row: int) -> None:
        """Forget everything about a row."""
        self.block_in_slot[:, row] = -1
        self.slot_of_block[:, row] = -1
        self.last_selected[:, row] = -1

    def place(self, row: int, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Put blocks into empty slots: [n] for all layers and heads alike, or [layer, head, n]."""
        shape = (*self.block_in_slot.shape[:1], self.block_in_slot.shape[2], blocks.shape[-1])
        blocks, slots = blocks.expand(shape), slots.expand(shape)
        self.block_in_slot[:, row].scatter_(2, slots, blocks.to(self.block_in_slot.dtype))
        self.slot_of_block[:, row].scatter_(2, blocks, slots.to(self.slot_of_block.dtype))

    def lookup(self, layer: int, row: int, blocks: torch.Tensor) -> torch.Tensor:
        """Slots [head, n] int64 of blocks [head, n] int64; -1 where a block is not resident."""
        return self.slot_of_block[layer, row].gather(1, blocks).long()

    def stamp(self, layer: int, row: int, slots: torch.Tensor) -> None:
        """Mark slots [head, n] as selected now. Call before `replace`, so that nothing selected now is a victim."""
        self.last_selected[layer, row].scatter_(1, slots, self.tick)

    def replace(
        self,
        layer: int,
        row: int,
        num_slots: int,
        candidates: tuple[int, int],
        heads: torch.Tensor,
        blocks: torch.Tensor,
    ) -> torch.Tensor:
        """Make room for missing blocks: (heads[i], blocks[i]), both [m] int64, sorted by head.

        Victims are the least recently selected slots that hold a candidate block (or none) and were not selected
        in this step. Candidates are sealed and stored, so a victim's bytes are safe at home. Returns slots [m].
        """
        held = self.block_in_slot[layer, row, :, :num_slots]
        order = self._victims(held, self.last_selected[layer, row, :, :num_slots], candidates)
        rank_in_head = torch.arange(heads.numel(), device=heads.device) - torch.searchsorted(heads, heads)
        slots = order[heads, rank_in_head]
        evicted = held[heads, slots].long()
        here = self.slot_of_block[layer, row]
        was_held = evicted >= 0
        here[heads[was_held], evicted[was_held]] = -1
        held[heads, slots] = blocks.to(held.dtype)
        here[heads, blocks] = slots.to(here.dtype)
        self.last_selected[layer, row][heads, slots] = self.tick
        return slots

    def open_block(self, row: int, num_slots: int, candidates: tuple[int, int], block: int) -> None:
        """Find a slot for the block that the next token begins, in every layer and head."""
        held = self.block_in_slot[:, row, :, :num_slots]
        slots = self._victims(held, self.last_selected[:, row, :, :num_slots], candidates, everything=True)[..., :1]
        evicted = held.gather(2, slots).long()
        here = self.slot_of_block[:, row]
        # An empty slot evicts nothing: point its write at the new block, which is set right after.
        here.scatter_(2, torch.where(evicted >= 0, evicted, block), -1)
        held.scatter_(2, slots, block)
        here[:, :, block] = slots[..., 0].to(here.dtype)
        self.last_selected[:, row].scatter_(2, slots, self.tick)

    def check_row(self, row: int) -> None:
        """The two tables are inverse to each other."""
        held, here = self.block_in_slot[:, row].long(), self.slot_of_block[:, row].long()
        back = here.gather(2, held.clamp(min=0))
        slots = torch.arange(held.shape[2], device=held.device).expand_as(held)
        assert torch.equal(torch.where(held >= 0, back, slots), slots), "a slot's block does not point back"
        assert torch.equal((held >= 0).sum(2), (here >= 0).sum(2)), "a block is in two slots"

    def _victims(
        self, held: torch.Tensor, stamps: torch.Tensor, candidates: tuple[int, int], everything: bool = False
    ) -> torch.Tensor:
        """Slots ordered by when they may go, least recently selected first; pinned ones last.

        `everything` lets blocks selected in this step go too: between steps nothing is being read.
        """
        first, last = candidates
        free = held < 0
        may_go = free | ((held >= first) & (held < last))
        if not everything:
            may_go &= stamps != self.tick
        key = torch.where(may_go, torch.where(free, -2, stamps), NEVER_EVICT)
        return torch.sort(key, dim=-1, stable=True).indices
