"""ModelDrafter: a smaller model of the same vocabulary writes ahead, greedily (Leviathan et al., 2023)."""

from collections.abc import Sequence

import torch

from oasis_tp.draft.drafter import Drafter
from oasis_tp.draft.window import Piece, WindowKv
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.weights import weight_bytes
from oasis_tp.request import Request


class ModelDrafter(Drafter):
    """A whole copy of the model on each rank, with windowed KV of its own.

    The KV moves in step with the target's: a row's prompt (as much as the window holds) is computed when drafts are
    first asked for, committed tokens when they are next asked for, and drafts overwrite each other. Positions beyond
    the model's own window are computed as they are; what that costs in acceptance shortens the drafts.
    """

    def __init__(self, model: LlamaModel, *, num_rows: int, max_model_len: int) -> None:
        assert model.tp.size == 1
        self.model = model
        self.kv = WindowKv(
            num_layers=model.arch.num_layers,
            num_rows=num_rows,
            num_kv_heads=model.arch.num_kv_heads,
            head_dim=model.arch.head_dim,
            max_model_len=max_model_len,
            dtype=model.dtype,
            device=model.device,
        )

    @property
    def device_bytes(self) -> int:
        return weight_bytes(self.model) + self.kv.kv.nbytes

    def release(self, row: int) -> None:
        self.kv.release(row)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        newest = []
        for request in requests:
            *earlier, last = self.kv.missing(request.row, request.num_tokens)
            for piece in earlier:
                self._forward([piece], self._tokens(request, piece))
            newest.append(last)
        known = torch.cat([self._tokens(request, piece) for request, piece in zip(requests, newest, strict=True)])
        tokens = self._forward(newest, known)
        drafts = [tokens]
        for depth in range(1, max(counts)):
            going = [index for index, count in enumerate(counts) if count > depth]
            starts = [(requests[index].row, requests[index].num_tokens + depth - 1) for index in going]
            ahead = [Piece(row, start, start + 1) for row, start in starts]
            tokens = drafts[-1].clone()
            tokens[going] = self._forward(ahead, drafts[-1][going])
            drafts.append(tokens)
        for request in requests:
            self.kv.rewind(request.row, request.num_tokens)
        table = torch.stack(drafts, dim=1).tolist()
        return [tuple(row[:count]) for row, count in zip(table, counts, strict=True)]

    def _tokens(self, request: Request, piece: Piece) -> torch.Tensor:
        return torch.tensor(request.tokens(piece.start, piece.stop), device=self.model.device)

    def _forward(self, batch: list[Piece], token_ids: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each piece, [n] int64."""
        window = self.kv.begin(batch)
        hidden = self.model.forward(
            token_ids,
            window.positions,
            lambda layer, q, k, v: self.kv.attend(layer, window, q, k, v),
        )
        return self.model.logits(hidden[window.ends]).argmax(dim=-1)
