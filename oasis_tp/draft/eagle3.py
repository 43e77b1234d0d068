"""Eagle3Drafter: a head that reads the target's hidden states and writes ahead, greedily."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oasis_tp.draft.drafter import Drafter
from oasis_tp.draft.eagle3_head import Eagle3Head
from oasis_tp.draft.window import MAX_PIECE_TOKENS, Piece, WindowKv, pieces, spans
from oasis_tp.request import Request


@dataclass(slots=True)
class _Row:
    """Features the head has not gone through yet, and its output at the last position it has."""

    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (start, [T, hidden]) after `fc`
    hidden: torch.Tensor | None = None  # [hidden]

    @property
    def num_waiting(self) -> int:
        return sum(features.shape[0] for _, features in self.waiting)


class Eagle3Drafter(Drafter):
    """The head on each rank, with windowed KV of one layer.

    Committed features wait until drafts are asked for (or make a whole piece), so that a head that pauses costs one
    small matrix product a step. Of a prompt the sink and the newest tokens count. A fork starts without its prompt's
    features: they were its parent's.
    """

    def __init__(self, head: Eagle3Head, feature_layers: tuple[int, ...], *, num_rows: int, max_model_len: int) -> None:
        self.head = head
        self.feature_layers = feature_layers
        self.kv = WindowKv(
            num_layers=1,
            num_rows=num_rows,
            num_kv_heads=head.arch.num_kv_heads,
            head_dim=head.arch.head_dim,
            max_model_len=max_model_len,
            dtype=head.dtype,
            device=head.device,
        )
        self._rows: dict[int, _Row] = {}

    @property
    def device_bytes(self) -> int:
        return self.head.num_bytes + self.kv.kv.nbytes

    def release(self, row: int) -> None:
        self.kv.release(row)
        self._rows.pop(row, None)

    @torch.inference_mode()
    def learn(self, request: Request, start: int, features: torch.Tensor) -> None:
        row = self._rows.setdefault(request.row, _Row())
        stop = start + features.shape[0]
        kept = spans(request.num_prompt_tokens) if start < request.num_prompt_tokens else [(start, stop)]
        for first, last in kept:
            first, last = max(first, start), min(last, stop)
            if first < last:
                row.waiting.append((first, self.head.fc(features[first - start : last - start])))
        if row.num_waiting >= MAX_PIECE_TOKENS:
            self._catch_up([request])

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        self._catch_up(requests)
        known = [index for index, request in enumerate(requests) if request.row in self._rows]
        proposals: list[tuple[int, ...]] = [()] * len(requests)
        if not known:
            return proposals
        hidden = torch.stack([self._hidden(requests[index]) for index in known])
        tokens = self.head.draft(hidden)
        drafts = [tokens]
        for depth in range(1, max(counts[index] for index in known)):
            going = [at for at, index in enumerate(known) if counts[index] > depth]
            # The head at position i knows token i + 1: the last committed token stands behind the first draft's entry.
            starts = [(requests[known[at]].row, requests[known[at]].num_tokens - 2 + depth) for at in going]
            ahead = [Piece(row, start, start + 1) for row, start in starts]
            hidden, tokens = hidden.clone(), tokens.clone()
            hidden[going] = self._forward(ahead, tokens[going], hidden[going])
            tokens[going] = self.head.draft(hidden[going])
            drafts.append(tokens)
        for index, row in zip(known, torch.stack(drafts, dim=1).tolist(), strict=True):
            proposals[index] = tuple(row[: counts[index]])
        return proposals

    def _hidden(self, request: Request) -> torch.Tensor:
        hidden = self._rows[request.row].hidden
        assert hidden is not None
        return hidden

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Take the head through the features that wait; every request's last piece in one pass."""
        last: list[tuple[Request, Piece, torch.Tensor]] = []
        for request in requests:
            row = self._rows.get(request.row)
            if row is None or not row.waiting:
                continue
            *earlier, newest = [
                (request, piece, features[piece.start - start : piece.stop - start])
                for start, features in _joined(row.waiting)
                for piece in pieces(request.row, start, start + features.shape[0])
            ]
            for item in earlier:
                self._advance([item])
            last.append(newest)
            row.waiting = []
        if last:
            self._advance(last)

    def _advance(self, items: list[tuple[Request, Piece, torch.Tensor]]) -> None:
        tokens = [token for request, piece, _ in items for token in request.tokens(piece.start + 1, piece.stop + 1)]
        features = torch.cat([features for _, _, features in items])
        out = self._forward([piece for _, piece, _ in items], torch.tensor(tokens, device=self.head.device), features)
        for (request, _, _), hidden in zip(items, out, strict=True):
            self._rows[request.row].hidden = hidden

    def _forward(self, batch: list[Piece], next_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output at the last position of each piece, [n, hidden]."""
        window = self.kv.begin(batch)
        out = self.head.forward(
            next_tokens, hidden, window.positions, lambda layer, q, k, v: self.kv.attend(layer, window, q, k, v)
        )
        return out[window.ends]


def _joined(waiting: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """The same features with neighbours side by side put together."""
    joined: list[tuple[int, list[torch.Tensor]]] = []
    stop = -1
    for start, features in waiting:
        if start == stop:
            joined[-1][1].append(features)
        else:
            joined.append((start, [features]))
        stop = start + features.shape[0]
    return [(start, torch.cat(parts)) for start, parts in joined]
