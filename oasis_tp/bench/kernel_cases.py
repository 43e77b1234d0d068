"""Every Triton kernel against kernels/reference.py: the cases that tests and `gpu_check` share.

Each case builds its inputs from a seed, runs the kernel with NaN-filled outputs, and yields what to compare.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from oasis_tp.bench.kernel_tolerance import BF16, FP16, FP32, TOLERANCE
from oasis_tp.kernels import (
    attention,
    copy_plan,
    gather,
    group_scores,
    merge_states,
    reference,
    rms_norm,
    rope_store,
    rotate,
    score,
    seal,
    silu_mul,
    tail_attention,
    top_blocks,
)
from oasis_tp.kernels.rows import RowFacts, Rows

BLOCK = 16
SINK, RECENT = 1, 3  # pinned blocks of every row, the open one among them


@dataclass(frozen=True, slots=True)
class Case:
    """One shape: `count` is what the kernel runs over (tokens, candidates, columns)."""

    dtype: torch.dtype
    device: torch.device
    group: int
    head_dim: int
    count: int
    num_heads: int = 2
    bits: int = 2


Comparison = tuple[str, torch.Tensor, torch.Tensor]
"""A name, what the kernel made, and the truth; both on the CPU."""


class Source:
    """Random tensors of a case, from one seed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.count * 1000 + case.head_dim + case.group)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype or self.case.dtype).to(self.case.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.case.device)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator).to(self.case.device)

    def signs(self) -> torch.Tensor:
        return self.integers(0, 2, self.case.head_dim).float() * 2 - 1


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty is filled with NaN (integers: their maximum), so that what a kernel does not write is seen."""
    plain_empty = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        made = plain_empty(*shape, **options)
        return made.fill_(math.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)

    # torch's own filling of uninitialised memory would load its whole compiler.
    with patch.object(torch, "empty", empty):
        yield


def worst(kernel: str, case: Case) -> float:
    """Run a case; the largest error as a share of its tolerance (exact cases: 0 or infinity). At most 1 is right."""
    allowed = TOLERANCE[kernel, case.dtype]
    share = 0.0
    with poisoned():
        comparisons = list(CASES[kernel](case))
    assert comparisons, kernel
    for name, got, want in comparisons:
        assert got.shape == want.shape, (kernel, name, got.shape, want.shape)
        same = torch.equal(got.double(), want.double())
        if not same and allowed == 0:
            return math.inf
        if not same:
            # Infinities must agree in place; their difference is no number.
            finite = got.isfinite() & want.isfinite()
            if not torch.equal(got[~finite].double(), want[~finite].double()):
                return math.inf
            share = max(share, float((got[finite].double() - want[finite].double()).abs().max()) / allowed)
    return share


def _rope_store(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    tokens, heads, dim, pages = case.count, case.num_heads, case.head_dim, case.count + 3
    fused = make.normal(tokens, (case.group + 2) * heads, dim)
    q, k, v = fused.split([case.group * heads, heads, heads], 1)
    angles = make.normal(200, dim // 2, dtype=FP32)
    positions = make.integers(0, 200, tokens)
    where = torch.stack([make.permutation(pages)[:tokens] for _ in range(heads)], 1)
    where[::5] = -1
    kv = make.normal(pages, heads, 2, BLOCK, dim)
    want_kv = kv.cpu().clone()
    got = rope_store.rope_store(q, k, v, angles.cos(), angles.sin(), positions, where, kv)
    want = reference.rope_store(
        q.cpu(), k.cpu(), v.cpu(), angles.cos().cpu(), angles.sin().cpu(), positions.cpu(), where.cpu(), want_kv
    )
    yield "queries", got.cpu(), want
    yield "pages", kv.cpu(), want_kv


def _rotate(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    x, signs = make.normal(case.count, case.group, case.head_dim), make.signs()
    want = x.cpu().double() @ reference.rotation(signs.int().tolist())
    yield "rotated", rotate.rotate(x, signs).cpu(), want


def _unpack(codes: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Codes as whole numbers, channel by channel."""
    bits = 8 * codes.shape[-1] // head_dim
    shifts = torch.arange(0, 8, bits)
    return (codes.cpu().int()[..., None] >> shifts & (2**bits - 1)).flatten(-2)


def _levels(bits: int) -> tuple[int, ...]:
    return reference.TWO_BIT_LEVELS if bits == 2 else reference.ONE_BIT_LEVELS


def _empty_sketch(case: Case, num_blocks: int) -> list[torch.Tensor]:
    """codes, token_scales, means, mean_scales of two layers, poisoned by hand: sealing fills what it is asked for."""
    head = (2, num_blocks, case.num_heads)
    return [
        torch.full((*head, BLOCK, case.head_dim * case.bits // 8), 101, dtype=torch.uint8, device=case.device),
        torch.full((*head, BLOCK), math.nan, dtype=FP16, device=case.device),
        torch.full((*head, 2, case.head_dim), 101, dtype=torch.int8, device=case.device),
        torch.full((*head, 2), math.nan, dtype=FP16, device=case.device),
    ]


def _seal(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    n, heads, dim = min(case.count, 40), case.num_heads, case.head_dim
    kv = make.normal(2, n + 2, heads, 2, BLOCK, dim) + make.normal(1, heads, 2, 1, dim)
    kv[:, 0, 0, :] = 0  # a block of zeros has scales of zero
    pages = torch.stack([make.permutation(n + 2)[:n] for _ in range(2 * heads)], 1)
    pages = pages.view(n, 2, heads).transpose(0, 1).contiguous()
    pages[:, 0, 0] = 0
    ids, signs = make.permutation(n + 4)[:n], make.signs()
    sketch = _empty_sketch(case, n + 4)
    seal.seal(kv[:, :, :, 0], kv[:, :, :, 1], pages, ids, signs, *sketch)
    layers = torch.arange(2, device=case.device)[:, None, None]
    blocks = (
        kv[layers, pages, torch.arange(heads, device=case.device)].cpu().flatten(0, 1)
    )  # [layer n, head, K|V, B, D]
    levels, token_scales, means, mean_scales = reference.seal_residual(
        blocks[:, :, 0], blocks[:, :, 1], signs.int().tolist(), _levels(case.bits)
    )
    codes, got_scales, got_means, got_mean_scales = (x[:, ids].flatten(0, 1).cpu() for x in sketch)
    zeros = token_scales == 0  # codes of a residual of zeros are arbitrary
    wanted = torch.stack([levels == level for level in _levels(case.bits)]).int().argmax(0)
    difference = (_unpack(codes, dim) - wanted).abs().masked_fill(zeros[..., None], 0)
    yield "codes at most one level off", (difference > 1).double(), torch.zeros(difference.shape)
    yield "share of codes", (difference > 0).double().mean()[None], torch.zeros(1)
    yield "share of mean steps", (got_means.double() != means).double().mean()[None], torch.zeros(1)
    yield "steps", (got_means.double() - means).abs().clamp(min=1), torch.ones(means.shape)
    for name, got, want in (("token scales", got_scales, token_scales), ("mean scales", got_mean_scales, mean_scales)):
        # Within an fp16's last place: 1e-3 of the scale, held against 5e-3.
        yield name, got.double() / want.clamp(min=1e-9), (want > 0).double()
    untouched = torch.ones(n + 4, dtype=torch.bool)
    untouched[ids.cpu()] = False
    beside = sketch[0].cpu()[:, untouched]
    yield "neighbours", beside, torch.full_like(beside, 101)
    bounds = torch.full((2, n + 4, heads, 2, dim), math.nan, dtype=BF16, device=case.device)
    seal.seal_bounds(kv[:, :, :, 0], pages, ids, bounds)
    want_bounds = reference.seal_bounds(blocks[:, :, 0])
    yield "bounds", bounds[:, ids].flatten(0, 1).cpu(), want_bounds


def _rows(case: Case, max_rows: int = 3) -> tuple[list[RowFacts], Rows]:
    """Rows with `count` candidates, with fewer, and (where there is room) with none; sink 1, two recent blocks."""
    facts = []
    for row, candidates in enumerate((case.count, case.count // 2, 0)[:max_rows]):
        last = 1 + candidates
        position = (last + 2) * BLOCK + (BLOCK - 1, 6, 0)[row]
        facts.append(
            RowFacts(
                table_row=(2, 0, 3)[row],
                first=1,
                last=last,
                budget=max(1, case.count // 3),
                position=position,
                num_slots=case.count // 3 * 2 + 9,
                resident=False,
                use_tail=row != 1,
            )
        )
    return facts, Rows.of(facts, BLOCK, case.device)


def _host_table(make: Source, num_tables: int, max_blocks: int) -> torch.Tensor:
    """Every table row's blocks at homes of their own, in no order."""
    return make.permutation(num_tables * max_blocks).int().view(num_tables, max_blocks).contiguous()


def _random_sketch(make: Source, case: Case, num_blocks: int) -> list[torch.Tensor]:
    heads, dim = case.num_heads, case.head_dim
    return [
        make.integers(0, 256, num_blocks, heads, BLOCK, dim * case.bits // 8, dtype=torch.uint8),
        (make.normal(num_blocks, heads, BLOCK, dtype=FP32).abs() * (0.15 if case.bits == 2 else 0.8)).to(FP16),
        make.integers(-127, 128, num_blocks, heads, 2, dim, dtype=torch.int8),
        (make.normal(num_blocks, heads, 2, dtype=FP32).abs() / 60).to(FP16),
    ]


def _score(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    facts, rows = _rows(case)
    table = _host_table(make, 4, case.count + 4)
    sketch = _random_sketch(make, case, table.numel())
    q, signs = make.normal(len(facts), case.num_heads, case.group, case.head_dim), make.signs()
    got, got_tail = score.score(q, rotate.rotate(q, signs), table, rows, *sketch)
    want = torch.full(got.shape, -math.inf, dtype=torch.float64)
    want_tail = want.clone()
    codes, token_scales, means, mean_scales = (x.cpu() for x in sketch)
    levels = torch.tensor(_levels(case.bits), dtype=torch.float64)[_unpack(codes, case.head_dim)]
    for i, row in enumerate(facts):
        homes = table[row.table_row, row.first : row.last].cpu().long()
        n = homes.numel()
        stored = levels[homes], token_scales[homes].double(), means[homes].double(), mean_scales[homes].double()
        want[i, :, :, :n] = reference.score_residual(q[i].cpu(), *stored, signs.int().tolist())
        want_tail[i, :, :, :n] = reference.tail(q[i].cpu(), *stored[2:], BLOCK)[0]
    yield "scores", got.cpu(), want
    yield "tail logits", got_tail.cpu(), want_tail


def _score_bounds(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    facts, rows = _rows(case)
    table = _host_table(make, 4, case.count + 4)
    keys = make.normal(table.numel(), case.num_heads, BLOCK, case.head_dim)
    bounds = reference.seal_bounds(keys.cpu()).to(case.device)
    q = make.normal(len(facts), case.num_heads, case.group, case.head_dim)
    got = score.score_bounds(q, table, rows, bounds, BLOCK)
    want = torch.full(got.shape, -math.inf, dtype=torch.float64)
    for i, row in enumerate(facts):
        homes = table[row.table_row, row.first : row.last].long()
        want[i, :, :, : homes.numel()] = reference.score_minmax(q[i].cpu(), keys[homes].cpu())
    yield "scores", got.cpu(), want


def _group_scores(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    facts, rows = _rows(case)
    scores = 5 * make.normal(len(facts), case.num_heads, case.group, rows.bounds.max_candidates, dtype=FP32)
    got = group_scores.group_scores(scores, rows)
    want = torch.full(got.shape, -math.inf, dtype=torch.float64)
    for i, row in enumerate(facts):
        n = row.last - row.first
        if n:
            want[i, :, :n] = reference.group_scores(scores[i, :, :, :n].cpu())
    yield "shares", got.cpu(), want


def _top_blocks(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    facts, rows = _rows(case)
    shape = (len(facts), case.num_heads)
    # Many equal scores; one head where all are equal, and one of zeros with either sign.
    scores = (make.normal(*shape, rows.bounds.max_candidates, dtype=FP32) * 2).round() / 2
    scores[0, -1] = -1.5
    scores[1, -1] *= 0
    tail = make.normal(*shape, case.group, rows.bounds.max_candidates, dtype=FP32)
    want_tail = tail.cpu().clone()
    got = top_blocks.top_blocks(scores, rows, tail)
    want = torch.full(got.shape, -1, dtype=torch.int32)
    for i, row in enumerate(facts):
        n = row.last - row.first
        best = reference.top_blocks(scores[i, :, :n].cpu(), row.budget)
        want[i, :, : best.shape[1]] = best
        for head in range(case.num_heads):
            want_tail[i, head, :, best[head]] = -math.inf
    yield "chosen", got.cpu(), want
    yield "tail logits", tail.cpu(), want_tail
    reaching = Rows.of([replace(row, reach=case.count // 2 + 1) for row in facts], BLOCK, case.device)
    ranked = top_blocks.most_wanted(scores, reaching)
    want = torch.full(ranked.shape, -1, dtype=torch.int32)
    for i, row in enumerate(facts):
        n = row.last - row.first
        best = torch.sort(scores[i, :, :n].cpu(), dim=1, descending=True, stable=True).indices[:, : case.count // 2 + 1]
        want[i, :, : best.shape[1]] = best
    yield "most wanted", ranked.cpu(), want


def _plan_rows(case: Case) -> list[RowFacts]:
    """Rows of every sort that the plan knows."""
    facts, _ = _rows(case)
    # One slot too few for all that the row wants: its last missing block must go without.
    facts[1] = replace(facts[1], num_slots=SINK + RECENT + max(0, min(facts[1].budget, case.count // 2) - 1))
    # All of it resident: slot and block are the same, and nothing is planned.
    facts.append(
        RowFacts(table_row=1, first=1, last=5, budget=9, position=7 * BLOCK, num_slots=8, resident=True, use_tail=False)
    )
    # The first request's next tokens: one that leaves out what it misses, and one that looks ahead.
    facts.append(replace(facts[0], fetches=False))
    facts.append(replace(facts[0], probe=True, reach=max(1, case.count // 2), limit=max(1, case.count // 5)))
    return facts


def _copy_plan(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    facts = _plan_rows(case)
    rows = Rows.of(facts, BLOCK, case.device)
    max_blocks, max_slots, tick = case.count + 9, facts[0].num_slots, 40
    kind = torch.int16 if case.head_dim == 64 else torch.int32
    host_table, block_table = _host_table(make, 4, max_blocks), _host_table(make, 4, max_slots)
    shape = (4, case.num_heads)
    tables = [torch.full((*shape, size), -1, dtype=kind) for size in (max_slots, max_blocks)]
    tables.append(make.integers(20, tick, *shape, max_slots, dtype=torch.int32).cpu())
    tables.append(make.integers(-1, 2, *shape, max_slots, dtype=torch.int32).cpu() * 30)
    chosen, wanted = (
        torch.full((len(facts), case.num_heads, size), -1, dtype=torch.int32)
        for size in (rows.bounds.max_chosen, rows.bounds.max_reach)
    )
    filled = set()
    for i, row in enumerate(facts):
        pinned = [*range(row.first), *range(row.last, row.position // BLOCK + 1)]
        for head in range(case.num_heads):
            count, reach = min(row.budget, row.last - row.first), min(row.reach, row.last - row.first)
            chosen[i, head, :count] = make.permutation(row.last - row.first).cpu()[:count].sort().values
            wanted[i, head, :reach] = make.permutation(row.last - row.first).cpu()[:reach]
            if row.resident or (row.table_row, head) in filled:
                continue
            filled.add((row.table_row, head))
            others = (row.first + make.permutation(row.last - row.first).cpu()).tolist()
            present = pinned + others[: max(0, row.num_slots - len(pinned) - head)]
            for slot, block in zip(make.permutation(row.num_slots).tolist(), present, strict=False):
                tables[0][row.table_row, head, slot], tables[1][row.table_row, head, block] = block, slot
    tables[3][tables[0] < 0] = -1
    on_device = copy_plan.Tables(*(x.clone().to(case.device) for x in tables))
    counts = torch.ones(len(facts), case.num_heads, 3, dtype=torch.int32, device=case.device)
    common = (rows, host_table, block_table, on_device, torch.tensor([tick], dtype=torch.int32, device=case.device))
    plan = copy_plan.plan_copies(chosen.to(case.device), *common, counts, BLOCK)
    ahead = copy_plan.plan_ahead(wanted.to(case.device), *common, counts)

    def copied(row: RowFacts, copies: list[tuple[int, int]]) -> torch.Tensor:
        """(host block, page) of (block, slot)."""
        pairs = [(int(host_table[row.table_row, b]), int(block_table[row.table_row, s])) for b, s in copies]
        return torch.tensor(pairs).view(-1, 2)

    for i, row in enumerate(facts):
        for head in range(case.num_heads):
            at = (row.table_row, head)
            count, reach = min(row.budget, row.last - row.first), min(row.reach, row.last - row.first)
            slots = list(range(row.position // BLOCK + 1))
            copies: list[tuple[int, int]] = []
            coming: list[tuple[int, int]] = []
            came = 0
            if not row.resident:
                lists = reference.Slots(*(x[at].tolist() for x in tables))
                slots, copies, came = reference.plan_copies(
                    chosen[i, head, :count].tolist(), row.first, row.last, row.position, row.num_slots, BLOCK,
                    lists, tick, fetches=row.fetches, probe=row.probe,
                )  # fmt: skip
                coming = reference.plan_ahead(
                    wanted[i, head, :reach].tolist(), row.first, row.last, row.num_slots, row.limit, lists, tick
                )
                new = (lists.block_in_slot, lists.slot_of_block, lists.last_selected, lists.fetched)
                for x, values in zip(tables, new, strict=True):
                    x[at] = torch.tensor(values)
            pages = [int(block_table[row.table_row, slot]) if slot >= 0 else -1 for slot in slots]
            pages += [-1] * (rows.bounds.max_attended - len(pages))
            yield "pages", plan.pages[i, head].cpu(), torch.tensor(pages)
            missing, number = len(copies) + slots.count(-1), len(copies)
            fetching = missing if row.fetches and not row.probe else 0
            yield "missing", plan.num_missing[i, head].cpu(), torch.tensor(fetching)
            got = torch.stack((plan.sources[i, head, :number], plan.targets[i, head, :number]), 1).cpu()
            yield "copies", got, copied(row, copies)
            without = plan.targets[i, head, number:fetching].cpu()
            yield "without", without, torch.full_like(without, -1)
            number = int(ahead.num_fetched[i, head])
            got = torch.stack((ahead.sources[i, head, :number], ahead.targets[i, head, :number]), 1).cpu()
            yield "ahead", got, copied(row, coming)
            counted = torch.tensor([1 + (0 if row.probe else missing), 1 + len(coming), 1 + came])
            yield "counts", counts[i, head].cpu(), counted
            tokens = (len(slots) - 1) * BLOCK + row.position % BLOCK + 1
            yield "tokens", plan.num_tokens[i, head].cpu(), torch.tensor(tokens)
    after = (on_device.block_in_slot, on_device.slot_of_block, on_device.last_selected, on_device.fetched)
    for name, table, want in zip(("held", "home", "stamps", "fetched"), after, tables, strict=True):
        yield name, table.cpu(), want


def _gather(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    heads, n = case.num_heads, min(case.count, 70)
    host = make.normal(heads, n + 5, 2, BLOCK, case.head_dim).cpu()
    kv = make.normal(n + 3, heads, 2, BLOCK, case.head_dim)
    if case.device.type == "cuda":
        host = host.pin_memory()
    sources = torch.stack([make.permutation(n + 5)[:n] for _ in range(heads)]).int()[None].contiguous()
    targets = torch.stack([make.permutation(n + 3)[:n] for _ in range(heads)]).int()[None].contiguous()
    targets[0, 0, 0] = -1
    counts = torch.tensor([[n - n // 4, n]], dtype=torch.int32, device=case.device)[:, :heads].contiguous()
    want, want_host, before = kv.cpu().clone(), host.clone(), kv.clone()
    gather.gather(host, kv, sources, targets, counts)
    for head in range(heads):
        for i in range(int(counts[0, head])):
            if targets[0, head, i] >= 0:
                want[targets[0, head, i].cpu(), head] = host[head, sources[0, head, i].cpu()]
    yield "pages", kv.cpu().clone(), want
    beside = before.clone()
    with patch.object(gather, "BESIDE", 1):  # one program goes from head to head
        gather.gather(host, beside, sources, targets, counts, beside=True)
    yield "beside the compute", beside.cpu(), want
    kv.neg_()
    gather.write_back(kv, host, targets, sources, counts)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    for head in range(heads):
        for i in range(int(counts[0, head])):
            if targets[0, head, i] >= 0:
                want_host[head, sources[0, head, i].cpu()] = -want[targets[0, head, i].cpu(), head]
    yield "host", host, want_host


def _pages(make: Source, case: Case, num_rows: int, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """kv with poisoned pages that no list names, and page lists [row, head, n]."""
    length = -(-max_tokens // BLOCK)
    kv = make.normal(num_rows * length + 2, case.num_heads, 2, BLOCK, case.head_dim)
    kv[-2:] = math.nan
    lists = torch.stack([make.permutation(num_rows * length).int().view(num_rows, length) for _ in range(2)], 1)
    return kv, lists[:, : case.num_heads].contiguous()


def _read(kv: torch.Tensor, pages: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v [head, T, D] and hidden [head, T] of one row's page lists [head, n]."""
    heads = pages.shape[0]
    blocks = torch.stack([kv[pages[h].long().clamp(min=0), h] for h in range(heads)])  # [head, n, K|V, B, D]
    hidden = (pages < 0).repeat_interleave(BLOCK, 1)[:, :num_tokens]
    k, v = (blocks[:, :, i].flatten(1, 2)[:, :num_tokens] for i in (0, 1))
    return k, v, hidden


def _attention(case: Case) -> Iterator[Comparison]:
    """Lists alone: a full one, half of one with every third page absent, and one with no page at all."""
    make = Source(case)
    lengths = (case.count, case.count // 2 + 1, case.count)
    kv, pages = _pages(make, case, 3, case.count)
    pages[1, :, ::3] = -1
    pages[1, :, 0] = pages[0, :, 0]
    pages[2] = -1
    tokens = torch.tensor(lengths, dtype=torch.int32)[:, None].repeat(1, case.num_heads).to(case.device)
    # Behind a list's last token: what must not be read.
    for i in range(2):
        for head in range(case.num_heads):
            page, used = int(pages[i, head, (lengths[i] - 1) // BLOCK]), (lengths[i] - 1) % BLOCK + 1
            if i == 0 and page >= 0 and page not in pages[1, head].tolist():
                kv[page, head, :, used:] = math.nan
    q = make.normal(3, case.num_heads, case.group, case.head_dim)
    facts = [
        RowFacts(table_row=i, first=0, last=0, budget=0, position=0, num_slots=1, resident=False, use_tail=False)
        for i in range(3)
    ]
    rows = Rows.of(facts, BLOCK, case.device)
    splits = attention.num_splits(pages.shape[2])
    states = torch.empty(3, case.num_heads, case.group, splits, case.head_dim, device=case.device)
    lse = torch.empty(3, case.num_heads, case.group, splits, device=case.device)
    attention.sparse_attention(q, kv, pages, tokens, states, lse)
    out, out_lse, missed = merge_states.merge_states(states, lse, splits, rows, case.dtype)
    for i, length in enumerate(lengths[:2]):
        k, v, hidden = _read(kv.cpu(), pages[i].cpu(), length)
        yield "output", out[i].cpu(), reference.attend(q[i].cpu(), k, v, hidden=hidden)[0]
    yield "nothing", out[2].cpu(), torch.zeros(out[2].shape)
    yield "nothing's mass", out_lse[2].cpu(), torch.full(out_lse[2].shape, -math.inf)
    yield "missed", missed.cpu(), torch.zeros(missed.shape)


def _tail(case: Case) -> Iterator[Comparison]:
    """Lists with the tail, for rows that use it and one that only counts it."""
    make = Source(case)
    facts, rows = _rows(case)
    table = _host_table(make, 4, case.count + 4)
    _, _, means, mean_scales = _random_sketch(make, case, table.numel())
    shape = (len(facts), case.num_heads, case.group)
    logits = 3 * make.normal(*shape, rows.bounds.max_candidates, dtype=FP32)
    logits[:, 0, :, ::3] = -math.inf
    for i, row in enumerate(facts):
        logits[i, :, :, row.last - row.first :] = -math.inf
    kv, pages = _pages(make, case, len(facts), 40)
    tokens = torch.full((len(facts), case.num_heads), 37, dtype=torch.int32, device=case.device)
    q = make.normal(*shape, case.head_dim)
    splits, tails = attention.num_splits(pages.shape[2]), tail_attention.num_splits(rows.bounds.max_candidates)
    states = torch.empty(*shape, splits + tails, case.head_dim, device=case.device)
    lse = torch.empty(*shape, splits + tails, device=case.device)
    attention.sparse_attention(q, kv, pages, tokens, states, lse)
    tail_attention.tail_attention(logits, table, rows, means, mean_scales, states, lse, splits, case.dtype)
    out, _, missed = merge_states.merge_states(states, lse, splits, rows, case.dtype)
    for i, row in enumerate(facts):
        k, v, _ = _read(kv.cpu(), pages[i].cpu(), 37)
        n = row.last - row.first
        homes = table[row.table_row, row.first : row.last].cpu().long()
        values = reference.tail(q[i].cpu(), means.cpu()[homes].double(), mean_scales.cpu()[homes].double(), BLOCK)[1]
        want, want_missed = reference.attend(
            q[i].cpu(), k, v, logits[i, :, :, :n].cpu().double(), values, use_tail=row.use_tail
        )
        yield "output", out[i].cpu(), want
        yield "missed", missed[i].cpu(), want_missed


def _merge_states(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    facts, rows = _rows(case)
    shape, count = (len(facts), case.num_heads, case.group), min(case.count, 70)
    states = make.normal(*shape, count, case.head_dim, dtype=FP32)
    lse = 20 * make.normal(*shape, count, dtype=FP32)
    lse[:, 0, :, ::2] = -math.inf
    states[:, 0, :, ::2] = math.nan  # an empty state's values are not read
    lse[0, -1] = -math.inf
    attended = count - count // 3
    # A tail that outweighs everything: it must not drown what a row without it attends.
    lse[1, -1, :, attended:] = 500.0
    out, out_lse, missed = merge_states.merge_states(states, lse, attended, rows, case.dtype)
    for i, row in enumerate(facts):
        end = count if row.use_tail else attended
        for head in range(case.num_heads):
            for member in range(case.group):
                at = (i, head, member)
                want, mass = reference.merge_states(states[at][:end].cpu(), lse[at][:end].cpu())
                yield "output", out[at].cpu(), want
                yield "mass", out_lse[at].cpu().double() / 20, torch.tensor(mass, dtype=torch.float64) / 20
                everything = reference.merge_states(states[at].cpu(), lse[at].cpu())[1]
                tail = reference.merge_states(states[at][attended:].cpu(), lse[at][attended:].cpu())[1]
                share = math.exp(tail - everything) if tail > -math.inf else 0.0
                yield "missed", missed[at].cpu(), torch.tensor(share, dtype=torch.float64)


def _rms_norm(case: Case) -> Iterator[Comparison]:
    make = Source(case)
    x, residual, weight = make.normal(3, case.count), make.normal(3, case.count), make.normal(case.count)
    yield "plain", rms_norm.rms_norm(x, weight, 1e-5).cpu(), reference.rms_norm(x.cpu(), weight.cpu(), 1e-5)
    summed = (x.float() + residual.float()).to(case.dtype).cpu()
    got = rms_norm.rms_norm(x, weight, 1e-5, residual)
    yield "residual", residual.cpu(), summed
    yield "added", got.cpu(), reference.rms_norm(summed, weight.cpu(), 1e-5)


def _silu_mul(case: Case) -> Iterator[Comparison]:
    gate_up = Source(case).normal(3, 2 * case.count)
    yield "product", silu_mul.silu_mul(gate_up).cpu(), reference.silu_mul(gate_up.cpu())


CASES: dict[str, Callable[[Case], Iterator[Comparison]]] = {
    "rope_store": _rope_store,
    "rotate": _rotate,
    "seal": _seal,
    "score": _score,
    "score_bounds": _score_bounds,
    "group_scores": _group_scores,
    "top_blocks": _top_blocks,
    "copy_plan": _copy_plan,
    "gather": _gather,
    "attention": _attention,
    "tail": _tail,
    "merge_states": _merge_states,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
}
