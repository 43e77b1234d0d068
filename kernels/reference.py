"""The slow truth: what every kernel and fast path must agree with. Loops are welcome, float64 throughout.

Imports nothing of oasis_tp.
"""

import math
from dataclasses import dataclass

import torch

# Sketches. A sealed block has B tokens; `n` blocks, H KV heads, G query heads per KV head, D channels.

TWO_BIT_LEVELS = (-10, -3, 3, 10)  # in units of 0.151 rms: Lloyd-Max's -1.510, -0.453, 0.453, 1.510
ONE_BIT_LEVELS = (-1, 1)
FP16_MAX = 65504.0


def rotation(signs: list[int]) -> torch.Tensor:
    """[D, D] float64, so that x @ rotation is the rotated x: random signs, then Hadamard blocks in descending powers
    of two; H[i, j] = (-1)^popcount(i & j) / sqrt(width)."""
    head_dim = len(signs)
    matrix = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    start = 0
    while start < head_dim:
        width = 1
        while start + 2 * width <= head_dim:
            width *= 2
        for i in range(width):
            for j in range(width):
                matrix[start + i, start + j] = (-1) ** (i & j).bit_count() / math.sqrt(width) * signs[start + i]
        start += width
    return matrix


def quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [D] in -127..127 and one scale that fp16 holds, for x [D]; zeros stay zeros."""
    scale = (x.abs().max() / 127).half().double()
    if scale == 0:
        return torch.zeros_like(x), scale
    return (x / scale).round().clamp(-127, 127), scale


def encode_residual(residual: torch.Tensor, levels: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of `levels` for each channel of a rotated residual [D], and the scale (fp16) of <r, r̂> = <r, r>."""
    rms = residual.square().mean().sqrt()
    unit = 0.151 * rms if levels == TWO_BIT_LEVELS else rms
    chosen = torch.zeros_like(residual)
    for channel, value in enumerate(residual):
        chosen[channel] = min(levels, key=lambda level: (abs(value - level * unit), level))
    projection = residual @ chosen
    if projection == 0:
        return chosen, torch.zeros((), dtype=torch.float64)
    return chosen, (residual.square().sum() / projection).clamp(max=FP16_MAX).half().double()


def seal_residual(
    k: torch.Tensor, v: torch.Tensor, signs: list[int], levels: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual coding of full blocks k, v [n, H, B, D], all float64.

    Returns:
        levels [n, H, B, D], token scales [n, H, B], means [n, H, K|V, D] in steps, mean scales [n, H, K|V].
    """
    n, num_kv_heads, block_size, head_dim = k.shape
    k = k.double().clamp(-FP16_MAX, FP16_MAX)
    v = v.double().clamp(-FP16_MAX, FP16_MAX)
    rotate = rotation(signs)
    chosen = torch.full_like(k, math.nan)
    token_scales = torch.full((n, num_kv_heads, block_size), math.nan, dtype=torch.float64)
    means = torch.full((n, num_kv_heads, 2, head_dim), math.nan, dtype=torch.float64)
    mean_scales = torch.full((n, num_kv_heads, 2), math.nan, dtype=torch.float64)
    for b in range(n):
        for h in range(num_kv_heads):
            means[b, h, 0], mean_scales[b, h, 0] = quantise_int8(k[b, h].mean(0))
            means[b, h, 1], mean_scales[b, h, 1] = quantise_int8(v[b, h].mean(0))
            for t in range(block_size):
                residual = (k[b, h, t] - means[b, h, 0] * mean_scales[b, h, 0]) @ rotate
                chosen[b, h, t], token_scales[b, h, t] = encode_residual(residual, levels)
    return chosen, token_scales, means, mean_scales


def score_residual(
    q: torch.Tensor,
    chosen: torch.Tensor,
    token_scales: torch.Tensor,
    means: torch.Tensor,
    mean_scales: torch.Tensor,
    signs: list[int],
) -> torch.Tensor:
    """Logsumexp over each block's tokens of the estimated q·k / sqrt(D), for q [H, G, D] -> [H, G, n]."""
    n, num_kv_heads, block_size, head_dim = chosen.shape
    rotate = rotation(signs)
    scores = torch.full((num_kv_heads, q.shape[1], n), math.nan, dtype=torch.float64)
    for h in range(num_kv_heads):
        for g in range(q.shape[1]):
            query = q[h, g].double()
            for b in range(n):
                coarse = query @ (means[b, h, 0] * mean_scales[b, h, 0])
                logits = [
                    (coarse + (query @ rotate) @ chosen[b, h, t] * token_scales[b, h, t]) / math.sqrt(head_dim)
                    for t in range(block_size)
                ]
                scores[h, g, b] = torch.stack(logits).logsumexp(0)
    return scores


def score_minmax(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Quest's bound sum_d max(q_d min_d, q_d max_d) / sqrt(D) + log B for k [n, H, B, D], q [H, G, D] -> [H, G, n].

    Minimum and maximum are rounded to bfloat16, to nearest: the bound holds up to that rounding.
    """
    n, num_kv_heads, block_size, head_dim = k.shape
    scores = torch.full((num_kv_heads, q.shape[1], n), math.nan, dtype=torch.float64)
    for h in range(num_kv_heads):
        for g in range(q.shape[1]):
            for b in range(n):
                keys = k[b, h].float().clamp(-FP16_MAX, FP16_MAX)
                low = keys.min(0).values.bfloat16().double()
                high = keys.max(0).values.bfloat16().double()
                bound = torch.maximum(q[h, g].double() * low, q[h, g].double() * high).sum()
                scores[h, g, b] = bound / math.sqrt(head_dim) + math.log(block_size)
    return scores


def tail(
    q: torch.Tensor, means: torch.Tensor, mean_scales: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole blocks at their mean: logits q·mean key / sqrt(D) + log B [H, G, n] and mean values [H, n, D]."""
    n, num_kv_heads, _, head_dim = means.shape
    logits = torch.full((num_kv_heads, q.shape[1], n), math.nan, dtype=torch.float64)
    values = torch.full((num_kv_heads, n, head_dim), math.nan, dtype=torch.float64)
    for h in range(num_kv_heads):
        for b in range(n):
            values[h, b] = means[b, h, 1] * mean_scales[b, h, 1]
            for g in range(q.shape[1]):
                mean_key = means[b, h, 0] * mean_scales[b, h, 0]
                logits[h, g, b] = q[h, g].double() @ mean_key / math.sqrt(head_dim) + math.log(block_size)
    return logits, values


# Selection.


def group_scores(block_scores: torch.Tensor) -> torch.Tensor:
    """[H, G, n] -> [H, n]: per query head the log share of the candidates' mass, then the largest over the group."""
    num_kv_heads, group, n = block_scores.shape
    best = torch.full((num_kv_heads, n), -math.inf, dtype=torch.float64)
    for h in range(num_kv_heads):
        for g in range(group):
            scores = block_scores[h, g].double()
            best[h] = torch.maximum(best[h], scores - scores.logsumexp(0))
    return best


def top_blocks(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[H, n] -> [H, min(k, n)] int64: the k best positions, equal scores to the lower one, in ascending order."""
    rows = []
    for row in scores.tolist():
        best = sorted(range(len(row)), key=lambda position: (-row[position], position))[:k]
        rows.append(sorted(best))
    return torch.tensor(rows, dtype=torch.int64).reshape(scores.shape[0], -1)


# Attention.


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tail_logits: torch.Tensor | None = None,
    tail_values: torch.Tensor | None = None,
    use_tail: bool = False,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row over T tokens: q [H, G, D], k and v [H, T, D], hidden [H, T] -> output [H, G, D], missed mass [H, G].

    Blocks left out are one more term each of both sums of the softmax: their estimated mass exp(tail_logits [H, G, n])
    and that times their mean value tail_values [H, n, D]. Without `use_tail` they count in the missed mass alone.
    """
    num_kv_heads, group, head_dim = q.shape
    out = torch.full((num_kv_heads, group, head_dim), math.nan, dtype=torch.float64)
    missed = torch.zeros(num_kv_heads, group, dtype=torch.float64)
    for h in range(num_kv_heads):
        seen = [t for t in range(k.shape[1]) if hidden is None or not hidden[h, t]]
        for g in range(group):
            logits = {t: float(q[h, g].double() @ k[h, t].double()) / math.sqrt(head_dim) for t in seen}
            tail = [] if tail_logits is None else tail_logits[h, g].tolist()
            highest = max([*logits.values(), *tail])
            weights = {t: math.exp(logit - highest) for t, logit in logits.items()}
            outside = [math.exp(logit - highest) for logit in tail]
            total = sum(weights.values())
            missed[h, g] = sum(outside) / (total + sum(outside))
            value = torch.zeros(head_dim, dtype=torch.float64)
            for t, weight in weights.items():
                value += weight * v[h, t].double()
            if use_tail and tail_values is not None:
                for block, weight in enumerate(outside):
                    if weight > 0:
                        value += weight * tail_values[h, block].double()
                total += sum(outside)
            out[h, g] = value / total
    return out, missed


def attend_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Causal attention of tokens [start, start + T): q [T, heads, D], k and v [H, start + T, D] -> [T, heads, D]."""
    num_tokens, num_heads, head_dim = q.shape
    grouped = q.view(num_tokens, k.shape[0], num_heads // k.shape[0], head_dim)
    rows = [attend(grouped[t], k[:, : start + t + 1], v[:, : start + t + 1])[0] for t in range(num_tokens)]
    return torch.stack(rows).reshape(num_tokens, num_heads, head_dim)


# The steps of a decode, for the Triton kernels. Rows come as tables: first, last, budget and the like, one per row.


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    kv: torch.Tensor,
) -> torch.Tensor:
    """Roped q [T, heads, D]; roped k and plain v [T, H, D] into kv [page, H, K|V, B, D] at pages [T, H] (-1: not)."""

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.full((x.shape[0],), math.nan, dtype=torch.float64)
        half = x.shape[0] // 2
        for i in range(half):
            c, s = float(cos[position, i]), float(sin[position, i])
            out[i] = float(x[i]) * c - float(x[i + half]) * s
            out[i + half] = float(x[i + half]) * c + float(x[i]) * s
        return out

    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            out[t, head] = turn(q[t, head], position)
        for head in range(k.shape[1]):
            page = int(pages[t, head])
            if page >= 0:
                kv[page, head, 0, position % kv.shape[3]] = turn(k[t, head], position).to(kv.dtype)
                kv[page, head, 1, position % kv.shape[3]] = v[t, head]
    return out


def seal_bounds(k: torch.Tensor) -> torch.Tensor:
    """k [n, H, B, D] -> the largest and smallest key of each channel, rounded to bfloat16: [n, H, max|min, D]."""
    keys = k.float().clamp(-FP16_MAX, FP16_MAX)
    return torch.stack((keys.max(2).values, keys.min(2).values), 2).bfloat16()


@dataclass(slots=True)
class Slots:
    """The residency of one request in one layer and head; as in kv/residency.py."""

    block_in_slot: list[int]
    slot_of_block: list[int]
    last_selected: list[int]
    fetched: list[int]

    def victims(self, first: int, last: int, num_slots: int, tick: int) -> list[int]:
        """Slots that may go, the first to go first."""
        found = []
        for slot in range(num_slots):
            held = self.block_in_slot[slot]
            if (held < 0 or first <= held < last) and self.last_selected[slot] != tick:
                found.append((-2 if held < 0 else self.last_selected[slot], slot))
        return [slot for _, slot in sorted(found)]

    def put(self, block: int, slot: int, tick: int, fetched: int) -> None:
        if self.block_in_slot[slot] >= 0:
            self.slot_of_block[self.block_in_slot[slot]] = -1
        self.block_in_slot[slot], self.slot_of_block[block] = block, slot
        self.last_selected[slot], self.fetched[slot] = tick, fetched


def plan_copies(
    chosen: list[int],
    first: int,
    last: int,
    position: int,
    num_slots: int,
    block_size: int,
    tables: Slots,
    tick: int,
    *,
    fetches: bool = True,
    probe: bool = False,
) -> tuple[list[int], list[tuple[int, int]], int]:
    """Slots of one row's blocks in one head, (block, slot) of those to fetch, and how many had come ahead.

    The tables change in place. What does not come has slot -1.
    """
    blocks = [*range(first), *(first + c for c in chosen), *range(last, position // block_size + 1)]
    came = 0
    for block in blocks:
        slot = tables.slot_of_block[block]
        if slot < 0:
            continue
        tables.last_selected[slot] = tick
        if not probe and tables.fetched[slot] >= 0:
            came += 1
            tables.fetched[slot] = -1
    copies: list[tuple[int, int]] = []
    if fetches and not probe:
        missing = [block for block in blocks if tables.slot_of_block[block] < 0]
        copies = list(zip(missing, tables.victims(first, last, num_slots, tick), strict=False))
        for block, slot in copies:
            tables.put(block, slot, tick, -1)
    return [tables.slot_of_block[block] for block in blocks], copies, came


def plan_ahead(
    wanted: list[int], first: int, last: int, num_slots: int, limit: int, tables: Slots, tick: int
) -> list[tuple[int, int]]:
    """(block, slot) of what is brought in for the next step; `wanted` among the candidates, best first."""
    missing = [first + c for c in wanted if tables.slot_of_block[first + c] < 0][:limit]
    copies = list(zip(missing, tables.victims(first, last, num_slots, tick), strict=False))
    for block, slot in copies:
        tables.put(block, slot, tick, tick)
    return copies


def merge_states(states: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, float]:
    """One head: weighted means states [S, D] of log mass lse [S] -> the mean and log mass of all; (0, -inf) of none."""
    value = torch.zeros(states.shape[1], dtype=torch.float64)
    highest = max([float(mass) for mass in lse], default=-math.inf)
    if highest == -math.inf:
        return value, -math.inf
    weights = [math.exp(float(mass) - highest) for mass in lse]
    for weight, state in zip(weights, states, strict=True):
        if weight > 0:
            value += weight * state.double()
    return value / sum(weights), highest + math.log(sum(weights))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [row, size] / sqrt(mean square + eps) * weight [size]."""
    rows = [row.double() / math.sqrt(float(row.double().square().mean()) + eps) * weight.double() for row in x]
    return torch.stack(rows)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [row, 2 size] -> gate * sigmoid(gate) * up [row, size]."""
    gate, up = gate_up.double().chunk(2, 1)
    return gate * torch.sigmoid(gate) * up
