"""Rows: what the kernels of one decode step know about each row, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import triton.language as tl

NUM_FACTS = tl.constexpr(8)
TABLE_ROW = tl.constexpr(0)
FIRST = tl.constexpr(1)
LAST = tl.constexpr(2)
BUDGET = tl.constexpr(3)
POSITION = tl.constexpr(4)
NUM_SLOTS = tl.constexpr(5)
RESIDENT = tl.constexpr(6)
USE_TAIL = tl.constexpr(7)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """One row, on the host. Counts and indices are in blocks, except `position` (tokens)."""

    table_row: int
    """The request's row in host_table, block_table and the residency tables; no two rows of a step share one."""
    first: int
    last: int
    """Candidates are blocks first .. last-1; blocks below are the sink, blocks from `last` on are recent."""
    budget: int
    position: int
    num_slots: int
    resident: bool
    """Every block has its own page: slot = block, nothing is ever missing."""
    use_tail: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows. The kernels read `facts` alone, so a captured graph serves any step that the bounds cover."""

    facts: torch.Tensor  # [row, NUM_FACTS] int32
    max_candidates: int
    max_chosen: int
    max_attended: int
    """Blocks in the longest list: sink, chosen and recent together."""

    @property
    def num_rows(self) -> int:
        return self.facts.shape[0]

    @classmethod
    def of(cls, rows: Sequence[RowFacts], block_size: int, device: torch.device) -> "Rows":
        """Upload a step's rows; bounds are the tightest that hold."""
        table = [
            [r.table_row, r.first, r.last, r.budget, r.position, r.num_slots, int(r.resident), int(r.use_tail)]
            for r in rows
        ]
        chosen = [min(r.budget, r.last - r.first) for r in rows]
        attended = [
            r.first + count + r.position // block_size + 1 - r.last for r, count in zip(rows, chosen, strict=True)
        ]
        return cls(
            torch.tensor(table, dtype=torch.int32).to(device),
            max(chain([1], (r.last - r.first for r in rows))),
            max(chain([1], chosen)),
            max(attended),
        )
