"""Residency: which block each slot of each request holds, by layer and head. Rank-local; never steers scheduling."""

import torch

NEVER_EVICT = 2**31 - 1
NOTHING = -2
"""The tick of a layer's background load when none is in flight."""


class Residency:
    """Two tables that are each other's inverse, and when each slot was last selected or filled in the background.

    A request in row r owns slots 0 .. num_slots-1; the scheduler's block_table says which page each slot is.
    `tick` counts decode steps; a slot's stamp is the tick of its last selection. A block that a background load brings
    is resident from the order on; its slot notes the order's tick in `fetched`, and is in flight while that is the tick
    of the layer's load under way (`in_flight` below, see kv/transfers.py).
    """

    def __init__(
        self, *, num_layers: int, num_rows: int, num_heads: int, max_slots: int, max_blocks: int, device: torch.device
    ) -> None:
        kind = torch.int16 if max(max_slots, max_blocks) <= 32767 else torch.int32
        shape = (num_layers, num_rows, num_heads)
        self.block_in_slot = torch.full((*shape, max_slots), -1, dtype=kind, device=device)  # -1 = empty
        self.slot_of_block = torch.full((*shape, max_blocks), -1, dtype=kind, device=device)  # -1 = not resident
        self.last_selected = torch.full((*shape, max_slots), -1, dtype=torch.int32, device=device)
        # Tick of the background load into the slot, -1 = none, or its block was selected since.
        self.fetched = torch.full((*shape, max_slots), -1, dtype=torch.int32, device=device)
        self.tick = 0

    @staticmethod
    def num_bytes(*, num_layers: int, num_rows: int, num_heads: int, max_slots: int, max_blocks: int) -> int:
        """Device bytes of the four tables."""
        kind = 2 if max(max_slots, max_blocks) <= 32767 else 4
        return num_layers * num_rows * num_heads * (max_slots * (kind + 8) + max_blocks * kind)

    def clear(self, row: int) -> None:
        """Forget everything about a row."""
        self.block_in_slot[:, row] = -1
        self.slot_of_block[:, row] = -1
        self.last_selected[:, row] = -1
        self.fetched[:, row] = -1

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

    def count_fetched(
        self, layer: int, row: int, slots: torch.Tensor, in_flight: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many of the slots [head, n] hold a block of a background load that nobody selected before.

        Returns two [] int64: those that have landed, and those in flight. They count once.
        """
        here = self.fetched[layer, row]
        ticks = here.gather(1, slots)
        late = ticks == in_flight
        landed = (ticks >= 0) & ~late
        here.scatter_(1, slots, -1)
        return landed.sum(), late.sum()

    def replace(
        self,
        layer: int,
        row: int,
        num_slots: int,
        candidates: tuple[int, int],
        heads: torch.Tensor,
        blocks: torch.Tensor,
        in_flight: int,
    ) -> tuple[torch.Tensor, bool]:
        """Make room for missing blocks: (heads[i], blocks[i]), both [m] int64, sorted by head.

        Victims are the least recently selected slots that hold a candidate block (or none) and were not selected
        in this step; slots in flight go last. Candidates are sealed and stored, so a victim's bytes are safe at home.
        Returns slots [m], and whether a slot in flight is among them: settle it before it is written.
        """
        held = self.block_in_slot[layer, row, :, :num_slots]
        stamps = self.last_selected[layer, row, :, :num_slots]
        flying = self.fetched[layer, row, :, :num_slots] == in_flight
        order = torch.sort(_keys(held, stamps, candidates, self.tick, flying), dim=-1, stable=True).indices
        slots = order[heads, _rank_in_head(heads)]
        late = bool(flying[heads, slots].any())
        self._put(layer, row, heads, blocks, slots)
        self.fetched[layer, row][heads, slots] = -1
        return slots, late

    def fetch(
        self, layer: int, row: int, num_slots: int, candidates: tuple[int, int], blocks: torch.Tensor, limit: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give slots to missing ones among blocks [head, n] int64, the most wanted first, at most `limit` per head.

        For a background load: nothing of the layer may be in flight, and who finds no victim stays out. Returns heads,
        blocks and slots [m], sorted by head.
        """
        held = self.block_in_slot[layer, row, :, :num_slots]
        keys = _keys(held, self.last_selected[layer, row, :, :num_slots], candidates, self.tick, None)
        order = torch.sort(keys, dim=-1, stable=True).indices
        room = (keys != NEVER_EVICT).sum(1, keepdim=True).clamp(max=limit)
        missing = self.lookup(layer, row, blocks) < 0
        taken = missing & (missing.cumsum(1) <= room)
        heads, columns = taken.nonzero(as_tuple=True)
        blocks, slots = blocks[heads, columns], order[heads, _rank_in_head(heads)]
        self._put(layer, row, heads, blocks, slots)
        self.fetched[layer, row][heads, slots] = self.tick
        return heads, blocks, slots

    def open_block(
        self, row: int, num_slots: int, candidates: tuple[int, int], block: int, in_flight: torch.Tensor
    ) -> None:
        """Find a slot for the block that the next token begins, in every layer and head.

        Between steps nothing is being read, so blocks of the last step may go; slots in flight may not, and they never
        fill a row's slots (see sparse/lookahead.py). in_flight [layer] int32.
        """
        held = self.block_in_slot[:, row, :, :num_slots]
        fetched = self.fetched[:, row, :, :num_slots]
        keys = _keys(
            held, self.last_selected[:, row, :, :num_slots], candidates, None, fetched == in_flight[:, None, None]
        )
        slots = torch.sort(keys, dim=-1, stable=True).indices[..., :1]
        evicted = held.gather(2, slots).long()
        here = self.slot_of_block[:, row]
        # An empty slot evicts nothing: point its write at the new block, which is set right after.
        here.scatter_(2, torch.where(evicted >= 0, evicted, block), -1)
        held.scatter_(2, slots, block)
        here[:, :, block] = slots[..., 0].to(here.dtype)
        self.last_selected[:, row].scatter_(2, slots, self.tick)
        fetched.scatter_(2, slots, -1)

    def check_row(self, row: int) -> None:
        """The two tables are inverse to each other, and only blocks that are somewhere were fetched."""
        held, here = self.block_in_slot[:, row].long(), self.slot_of_block[:, row].long()
        back = here.gather(2, held.clamp(min=0))
        slots = torch.arange(held.shape[2], device=held.device).expand_as(held)
        assert torch.equal(torch.where(held >= 0, back, slots), slots), "a slot's block does not point back"
        assert torch.equal((held >= 0).sum(2), (here >= 0).sum(2)), "a block is in two slots"
        fetched = self.fetched[:, row]
        assert not ((fetched >= 0) & (held < 0)).any(), "a slot without a block is said to be fetched"
        assert (fetched <= self.tick).all(), "a slot is said to be fetched in a step to come"

    def _put(self, layer: int, row: int, heads: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """Let slots [m] of heads [m] hold blocks [m] and forget what they held."""
        held, here = self.block_in_slot[layer, row], self.slot_of_block[layer, row]
        evicted = held[heads, slots].long()
        was_held = evicted >= 0
        here[heads[was_held], evicted[was_held]] = -1
        held[heads, slots] = blocks.to(held.dtype)
        here[heads, blocks] = slots.to(here.dtype)
        self.last_selected[layer, row][heads, slots] = self.tick


def _keys(
    held: torch.Tensor,
    stamps: torch.Tensor,
    candidates: tuple[int, int],
    tick: int | None,
    flying: torch.Tensor | None,
) -> torch.Tensor:
    """When each slot may go, the smallest first: empty ones, then by last selection, then `flying` ones.

    NEVER_EVICT: holds no candidate, or was selected at `tick`.
    """
    free = held < 0
    may_go = free | ((held >= candidates[0]) & (held < candidates[1]))
    if tick is not None:
        may_go &= stamps != tick
    keys = torch.where(free, -2, stamps)
    if flying is not None:
        keys = torch.where(flying, NEVER_EVICT - 1, keys)
    return torch.where(may_go, keys, NEVER_EVICT)


def _rank_in_head(heads: torch.Tensor) -> torch.Tensor:
    """Place of each entry among those of its head; heads [m] ascending."""
    return torch.arange(heads.numel(), device=heads.device) - torch.searchsorted(heads, heads)
