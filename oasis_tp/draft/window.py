"""WindowKv: a drafter's own small dense KV. Each row keeps a sink and its newest tokens, at their true positions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from oasis_tp.nn.attention import attend_chunk

SINK_TOKENS = 16
WINDOW_TOKENS = 2048
MAX_PIECE_TOKENS = 256
"""Most tokens of one row in one forward pass: the window can spare their slots while they are written."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) of the request in `row`."""

    row: int
    start: int
    stop: int


@dataclass(slots=True)
class WindowRow:
    """What a row holds: the first `num_sink` tokens, and tokens [first, stop) as far as the window reaches back."""

    num_sink: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Where the tokens of some pieces are written, and what each of them may read."""

    pieces: Sequence[Piece]
    rows: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    masks: list[torch.Tensor]  # per piece [T_i, num_slots read], additive
    ends: list[int]
    """Of the T tokens, each piece's last one."""


class WindowKv:
    """K and V of `num_rows` rows: [layer, row, K|V, kv_head, slot, head_dim].

    Slot p holds position p of the sink; the slots after it are a ring. The ring is larger than the window by what one
    piece writes, so drafts that were rejected took nothing from the window: they are overwritten and, until then, lie
    ahead of every query. Memory is touched when allocated: whoever plans with what is left sees it taken.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = min(max_model_len, SINK_TOKENS + WINDOW_TOKENS + MAX_PIECE_TOKENS)
        self.ring = max(1, self.num_slots - SINK_TOKENS)
        self.device = device
        shape = (num_layers, num_rows, 2, num_kv_heads, self.num_slots, head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.rows: dict[int, WindowRow] = {}

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """The row's request ended. What it wrote is wiped: a masked slot may hold anything but what is no number."""
        if self.rows.pop(row, None) is not None:
            self.kv[:, row].zero_()

    def missing(self, row: int, stop: int) -> list[Piece]:
        """Pieces that bring a row up to `stop` tokens: of a new row only the sink and the newest `WINDOW_TOKENS`."""
        held = self.rows.get(row)
        if held is not None:
            return list(pieces(row, held.stop, stop))
        return [piece for start, end in spans(stop) for piece in pieces(row, start, end)]

    def rewind(self, row: int, stop: int) -> None:
        """Tokens from `stop` on were drafts: whatever comes overwrites them."""
        held = self.rows[row]
        held.stop = min(held.stop, stop)

    def begin(self, batch: Sequence[Piece]) -> WindowBatch:
        """Take the pieces (at most one of a row, each at most `MAX_PIECE_TOKENS`) as written from now on."""
        every_position, rows, masks = [], [], []
        ends: list[int] = []
        for piece in batch:
            assert 0 < piece.stop - piece.start <= MAX_PIECE_TOKENS
            held = self._extend(piece)
            positions = torch.arange(piece.start, piece.stop)
            every_position.append(positions)
            rows.append(torch.full_like(positions, piece.row))
            masks.append(self._mask(held, positions).to(self.device, self.kv.dtype))
            ends.append(piece.stop - piece.start - 1 + (ends[-1] + 1 if ends else 0))
        positions = torch.cat(every_position)
        return WindowBatch(
            pieces=batch,
            rows=torch.cat(rows).to(self.device),
            positions=positions.to(self.device),
            slots=self._slots(positions).to(self.device),
            masks=masks,
            ends=ends,
        )

    def attend(self, layer: int, batch: WindowBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v [T, kv_head, D], then attend each token to its row's: q [T, num_heads, D] -> like q."""
        kv = self.kv[layer]
        kv[batch.rows, 0, :, batch.slots] = k
        kv[batch.rows, 1, :, batch.slots] = v
        out, first = [], 0
        for piece, mask in zip(batch.pieces, batch.masks, strict=True):
            keys, values = kv[piece.row, :, :, : mask.shape[1]]
            last = first + piece.stop - piece.start
            out.append(attend_chunk(q[first:last], keys, values, mask))
            first = last
        return torch.cat(out)

    def _extend(self, piece: Piece) -> WindowRow:
        held = self.rows.get(piece.row)
        if held is None:
            held = self.rows[piece.row] = WindowRow(0, piece.start, piece.start)
        if piece.start > held.stop:
            held.first = piece.start  # the tokens between were left out
        if piece.start <= held.num_sink:
            held.num_sink = max(held.num_sink, min(SINK_TOKENS, piece.stop))
        held.stop = piece.stop
        return held

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.where(positions < SINK_TOKENS, positions, SINK_TOKENS + (positions - SINK_TOKENS) % self.ring)

    def _mask(self, held: WindowRow, positions: torch.Tensor) -> torch.Tensor:
        """0 where a slot's token may be read, else -inf: [T, slots that may be in use]."""
        last = held.stop - 1
        slots = torch.arange(min(self.num_slots, held.stop))
        # The ring slot's latest position up to the last one written.
        in_ring = last - (last - slots) % self.ring
        at = torch.where(slots < SINK_TOKENS, slots, in_ring)
        stored = (at < held.num_sink) | (at >= held.first)
        near = (at < SINK_TOKENS) | (at > positions[:, None] - WINDOW_TOKENS)
        readable = stored & near & (at <= positions[:, None])
        return torch.zeros(readable.shape).masked_fill_(~readable, float("-inf"))


def spans(num_tokens: int) -> list[tuple[int, int]]:
    """The parts [start, stop) of a text of `num_tokens` that a window can hold."""
    start = num_tokens - WINDOW_TOKENS
    return [(0, num_tokens)] if start <= SINK_TOKENS else [(0, SINK_TOKENS), (start, num_tokens)]


def pieces(row: int, start: int, stop: int) -> Iterator[Piece]:
    """[start, stop) cut into pieces for one forward pass each."""
    for first in range(start, stop, MAX_PIECE_TOKENS):
        yield Piece(row, first, min(stop, first + MAX_PIECE_TOKENS))
