"""WindowKv against plain attention over everything written so far, masked to the sink and the window."""

import random

import pytest
import torch

from oasis_tp.draft import window
from oasis_tp.draft.window import Piece, WindowKv

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SINK_TOKENS", 3), ("WINDOW_TOKENS", 10), ("MAX_PIECE_TOKENS", 6)):
        monkeypatch.setattr(window, name, value)


def make_kv(max_model_len: int = 100) -> WindowKv:
    return WindowKv(
        num_layers=1, num_rows=3, num_kv_heads=KV_HEADS, head_dim=DIM, max_model_len=max_model_len,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


class Twin:
    """Every K and V a row was given, by position; later writes win."""

    def __init__(self) -> None:
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}

    def attend(self, position: int, q: torch.Tensor) -> torch.Tensor:
        seen = [p for p in sorted(self.k) if p <= position and (p < 3 or p > position - 10)]
        k = torch.stack([self.k[p] for p in seen], dim=1).repeat_interleave(HEADS // KV_HEADS, 0)  # [head, S, D]
        v = torch.stack([self.v[p] for p in seen], dim=1).repeat_interleave(HEADS // KV_HEADS, 0)
        weights = torch.softmax((k @ q[:, :, None])[..., 0] * DIM**-0.5, -1)
        return (weights[:, None] @ v)[:, 0]


def check(kv: WindowKv, twins: dict[int, Twin], batch: list[Piece]) -> None:
    laid_out = kv.begin(batch)
    num_tokens = laid_out.positions.numel()
    q, k, v = (torch.randn(num_tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rows = [piece.row for piece in batch for _ in range(piece.start, piece.stop)]
    assert laid_out.rows.tolist() == rows
    for index, (row, position) in enumerate(zip(rows, laid_out.positions.tolist(), strict=True)):
        twins[row].k[position], twins[row].v[position] = k[index], v[index]
    out = kv.attend(0, laid_out, q, k, v)
    expected = [
        twins[row].attend(p, q[i]) for i, (row, p) in enumerate(zip(rows, laid_out.positions.tolist(), strict=True))
    ]
    assert torch.allclose(out, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 2, 5, 13, 14, 40])
@pytest.mark.parametrize("max_model_len", [60, 500])
def test_window_moves_in_step(small: None, prompt: int, max_model_len: int) -> None:
    """Prompts shorter and longer than the window, then tokens gained with drafts ahead that are mostly rejected."""
    torch.manual_seed(0)
    rng = random.Random(prompt)
    kv, twins = make_kv(max_model_len), {0: Twin(), 2: Twin()}
    totals = {0: prompt, 2: prompt + 1}
    while max(totals.values()) < 56:
        newest = []
        for row, total in totals.items():
            *earlier, last = kv.missing(row, total)
            for piece in earlier:
                check(kv, twins, [piece])
            newest.append(last)
        check(kv, twins, newest)
        for ahead in range(rng.randrange(4)):
            check(kv, twins, [Piece(row, total + ahead, total + ahead + 1) for row, total in totals.items()])
        for row, total in totals.items():
            kv.rewind(row, total)
            for position in [p for p in twins[row].k if p >= total]:
                del twins[row].k[position]
            totals[row] = total + rng.randrange(1, 5)


def test_a_long_prompt_costs_its_sink_and_its_window(small: None) -> None:
    kv = make_kv()
    tokens = [p for piece in kv.missing(0, 40) for p in range(piece.start, piece.stop)]
    assert tokens == [0, 1, 2, *range(30, 40)]
    assert all(piece.stop - piece.start <= 6 for piece in kv.missing(0, 40))


def test_who_joins_late_reads_nothing_from_before(small: None) -> None:
    """A fork's features begin at its first own token; what an earlier request left in the row is not read."""
    torch.manual_seed(1)
    kv, twins = make_kv(), {1: Twin()}
    for piece in kv.missing(1, 20):
        check(kv, twins, [piece])
    kv.release(1)
    assert not kv.rows
    twins[1] = Twin()
    for start in (7, 9, 12):
        check(kv, twins, [Piece(1, start, {7: 9, 9: 12, 12: 14}[start])])
