"""Rows: what the kernels of one decode step know about each row, on the device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import triton.language as tl

NUM_FACTS = tl.constexpr(12)
TABLE_ROW = tl.constexpr(0)
FIRST = tl.constexpr(1)
LAST = tl.constexpr(2)
BUDGET = tl.constexpr(3)
POSITION = tl.constexpr(4)
NUM_SLOTS = tl.constexpr(5)
RESIDENT = tl.constexpr(6)
USE_TAIL = tl.constexpr(7)
FETCHES = tl.constexpr(8)
PROBE = tl.constexpr(9)
REACH = tl.constexpr(10)
LIMIT = tl.constexpr(11)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """One row, on the host. Counts and indices are in blocks, except `position` (tokens)."""

    table_row: int
    """The request's row in host_table, block_table and the residency tables."""
    first: int
    last: int
    """Candidates are blocks first .. last-1; blocks below are the sink, blocks from `last` on are recent."""
    budget: int
    position: int
    num_slots: int
    resident: bool
    """Every block has its own page: slot = block, nothing is ever missing."""
    use_tail: bool
    fetches: bool = True
    """What is missing gets a slot and is fetched; else it is left out."""
    probe: bool = False
    """Counts nothing and fetches nothing: it only looks ahead."""
    reach: int = 0
    """How many of the best candidates the row wants to see on the device next."""
    limit: int = 0
    """Most of those that get a slot; 0: the row does not look ahead."""

    def as_list(self) -> list[int]:
        """In the order of the columns above."""
        return [
            *(self.table_row, self.first, self.last, self.budget, self.position, self.num_slots),
            *(int(self.resident), int(self.use_tail), int(self.fetches and not self.probe), int(self.probe)),
            *(self.reach, self.limit),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Launch sizes of a step: at least what its rows need. A captured graph serves any step that they cover."""

    max_candidates: int
    max_chosen: int
    max_attended: int
    """Blocks in the longest list: sink, chosen and recent together."""
    max_reach: int
    max_limit: int
    max_slots: int
    """Of rows whose blocks come and go; 0: every row is resident, and nothing can be missing."""
    waves: tuple[int, ...]
    """Rows of one request go one after the other: how many rows go first, then second, and so on."""

    @classmethod
    def of(cls, rows: Sequence[RowFacts], block_size: int) -> "Bounds":
        """The tightest."""
        chosen = [min(r.budget, r.last - r.first) for r in rows]
        attended = [
            r.first + count + r.position // block_size + 1 - r.last for r, count in zip(rows, chosen, strict=True)
        ]
        return cls(
            max_candidates=max(chain([1], (r.last - r.first for r in rows))),
            max_chosen=max(chain([1], chosen)),
            max_attended=max(attended),
            max_reach=max(min(r.reach, r.last - r.first) for r in rows),
            max_limit=max(r.limit for r in rows),
            max_slots=max(0 if r.resident else r.num_slots for r in rows),
            waves=tuple(Counter(turn for turn, _ in in_turn(rows)).values()),
        )

    def rounded(self) -> "Bounds":
        """Up, to eight sizes per power of two, so that few graphs serve all steps."""
        return Bounds(
            max_candidates=_rounded(self.max_candidates),
            max_chosen=_rounded(self.max_chosen),
            max_attended=_rounded(self.max_attended),
            max_reach=_rounded(self.max_reach),
            max_limit=self.max_limit,
            max_slots=_rounded(self.max_slots) if self.max_slots else 0,
            waves=self.waves,
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows. What differs from step to step is read from the two tensors."""

    facts: torch.Tensor  # [row, NUM_FACTS] int32
    order: torch.Tensor  # [row] int32: rows by their turn among those of their request, see Bounds.waves
    bounds: Bounds

    @property
    def num_rows(self) -> int:
        return self.facts.shape[0]

    @classmethod
    def of(cls, rows: Sequence[RowFacts], block_size: int, device: torch.device) -> "Rows":
        """Upload a step's rows."""
        facts = torch.tensor([row.as_list() for row in rows], dtype=torch.int32).to(device)
        order = torch.tensor([row for _, row in in_turn(rows)], dtype=torch.int32).to(device)
        return cls(facts, order, Bounds.of(rows, block_size))


def in_turn(rows: Sequence[RowFacts]) -> list[tuple[int, int]]:
    """(turn, row) ascending: the first row of every request has turn 0, the second one turn 1, and so on."""
    seen: Counter[int] = Counter()
    keyed = []
    for index, row in enumerate(rows):
        keyed.append((seen[row.table_row], index))
        seen[row.table_row] += 1
    return sorted(keyed)


def _rounded(count: int) -> int:
    step = max(1, 1 << max(0, count - 1).bit_length() >> 4)
    return -(-count // step) * step
