"""The residency tables against plain dictionaries: random decoding, least recently selected goes first."""

import pytest
import torch

from oasis_tp.kv.residency import NOTHING, Residency

CPU = torch.device("cpu")
LAYERS, ROWS, HEADS = 2, 3, 2
SETTLED = torch.full((LAYERS,), NOTHING, dtype=torch.int32)


def make(max_slots: int = 12, max_blocks: int = 60) -> Residency:
    return Residency(
        num_layers=LAYERS, num_rows=ROWS, num_heads=HEADS, max_slots=max_slots, max_blocks=max_blocks, device=CPU
    )


class Model:
    """One (layer, head) of a row: which slot holds which block, and when it was last selected."""

    def __init__(self, num_slots: int) -> None:
        self.block_of = [-1] * num_slots
        self.stamp = [-1] * num_slots

    def victim(self, candidates: tuple[int, int], tick: int | None) -> int:
        """An empty slot, else the least recently selected candidate; the lowest of equals."""
        free = [slot for slot, block in enumerate(self.block_of) if block < 0]
        if free:
            return free[0]
        may_go = [
            slot
            for slot, block in enumerate(self.block_of)
            if candidates[0] <= block < candidates[1] and self.stamp[slot] != tick
        ]
        return min(may_go, key=lambda slot: (self.stamp[slot], slot))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_slots", [7, 8, 12])
def test_random_steps_as_with_dictionaries(num_slots: int, seed: int) -> None:
    """One sink block, one recent block, the open one, and four selected: 7 slots just fit."""
    generator = torch.Generator().manual_seed(seed)
    residency = make()
    row = 1
    models = {(layer, head): Model(num_slots) for layer in range(LAYERS) for head in range(HEADS)}
    for block in range(3):
        residency.tick += 1
        residency.open_block(row, num_slots, (1, 1), block, SETTLED)
        for model in models.values():
            slot = model.victim((1, 1), None)
            model.block_of[slot], model.stamp[slot] = block, residency.tick
    for open_block in range(3, 50):
        candidates = (1, open_block - 1)
        residency.tick += 1
        residency.open_block(row, num_slots, candidates, open_block, SETTLED)
        for model in models.values():
            slot = model.victim(candidates, None)
            model.block_of[slot], model.stamp[slot] = open_block, residency.tick
        for _ in range(2):
            residency.tick += 1
            for layer in range(LAYERS):
                size = min(4, candidates[1] - candidates[0])
                picked = torch.stack(
                    [
                        torch.randperm(candidates[1] - 1, generator=generator)[:size].sort().values + 1
                        for _ in range(HEADS)
                    ]
                )
                pinned = torch.tensor([0, open_block - 1, open_block]).expand(HEADS, -1)
                wanted = torch.cat([picked, pinned], 1)
                slots = residency.lookup(layer, row, wanted)
                missing = slots < 0
                residency.stamp(layer, row, torch.where(missing, slots[:, -1:], slots))
                heads, columns = missing.nonzero(as_tuple=True)
                new, late = residency.replace(layer, row, num_slots, candidates, heads, wanted[heads, columns], NOTHING)
                assert not late
                slots[heads, columns] = new
                for head in range(HEADS):
                    model = models[layer, head]
                    expected = []
                    for block in wanted[head].tolist():
                        slot = model.block_of.index(block) if block in model.block_of else None
                        expected.append(slot)
                        if slot is not None:
                            model.stamp[slot] = residency.tick
                    for index, block in enumerate(wanted[head].tolist()):
                        if expected[index] is None:
                            slot = model.victim(candidates, residency.tick)
                            model.block_of[slot], model.stamp[slot] = block, residency.tick
                            expected[index] = slot
                    assert slots[head].tolist() == expected
                    assert residency.block_in_slot[layer, row, head, :num_slots].tolist() == model.block_of
        residency.check_row(row)
    for other in (0, 2):
        assert (residency.block_in_slot[:, other] == -1).all() and (residency.slot_of_block[:, other] == -1).all()


def test_opening_a_block_evicts_in_every_layer_and_head_apart() -> None:
    residency = make()
    residency.place(0, torch.tensor([0, 8, 9]), torch.tensor([0, 1, 2]))
    chosen = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [2, 7]]])
    residency.place(0, chosen, torch.tensor([3, 4]).expand(LAYERS, HEADS, -1))
    residency.check_row(0)
    residency.tick = 1
    residency.stamp(1, 0, torch.tensor([[3], [3]]))
    residency.open_block(0, 5, (1, 9), 10, SETTLED)
    residency.check_row(0)
    held = residency.block_in_slot[:, 0, :, :5].tolist()
    assert held == [[[0, 10, 9, 1, 2]] * 1 + [[0, 10, 9, 3, 4]], [[0, 10, 9, 5, 6], [0, 10, 9, 2, 7]]]


def test_clearing_a_row_forgets_it_and_no_other() -> None:
    residency = make()
    for row in range(ROWS):
        residency.place(row, torch.tensor([0, 1]), torch.tensor([0, 1]))
    residency.clear(1)
    assert (residency.block_in_slot[:, 1] == -1).all() and (residency.slot_of_block[:, 1] == -1).all()
    for row in (0, 2):
        assert residency.lookup(0, row, torch.tensor([[0, 1]] * HEADS)).tolist() == [[0, 1]] * HEADS


def test_check_row_notices_tables_that_disagree() -> None:
    residency = make()
    residency.place(0, torch.tensor([0, 1]), torch.tensor([0, 1]))
    residency.block_in_slot[1, 0, 1, 5] = 1
    with pytest.raises(AssertionError, match="point back"):
        residency.check_row(0)
    residency.block_in_slot[1, 0, 1, 5] = -1
    residency.slot_of_block[0, 0, 0, 7] = 1
    with pytest.raises(AssertionError, match="two slots"):
        residency.check_row(0)


@pytest.mark.parametrize(("max_slots", "max_blocks", "kind"), [(9, 32767, torch.int16), (9, 32768, torch.int32)])
def test_tables_take_the_bytes_they_were_planned_for(max_slots: int, max_blocks: int, kind: torch.dtype) -> None:
    residency = make(max_slots, max_blocks)
    tables = (residency.block_in_slot, residency.slot_of_block, residency.last_selected, residency.fetched)
    assert residency.slot_of_block.dtype == kind
    assert sum(table.nbytes for table in tables) == Residency.num_bytes(
        num_layers=LAYERS, num_rows=ROWS, num_heads=HEADS, max_slots=max_slots, max_blocks=max_blocks
    )
    last = torch.tensor([max_blocks - 1])
    residency.place(0, last, torch.tensor([8]))
    assert residency.lookup(1, 0, last.expand(HEADS, -1)).tolist() == [[8]] * HEADS
    residency.check_row(0)
