"""Score every row's candidates against the sketch, for all query heads of a KV head at once."""

import math

import torch
import triton
import triton.language as tl

from oasis_tp.kernels.launch import FLOATS, check, check_head_dim, padded_group
from oasis_tp.kernels.rows import FIRST, LAST, NUM_FACTS, TABLE_ROW, Rows

CHUNK_TOKENS = 128
"""Candidates' tokens per program: with twice as many, sums no longer fit a thread's registers (head_dim 128, sm_90)."""
BOUNDS_CHUNK = 16
"""Candidates per program of `score_bounds`."""


@triton.jit
def score_kernel(
    q: tl.tensor,
    q_rotated: tl.tensor,
    host_table: tl.tensor,
    facts: tl.tensor,
    codes: tl.tensor,
    token_scales: tl.tensor,
    means: tl.tensor,
    mean_scales: tl.tensor,
    scores: tl.tensor,
    tail_logits: tl.tensor,
    table_stride: int,
    max_candidates: int,
    scale: float,
    log_block: float,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    BYTES_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    first = tl.load(facts + row * NUM_FACTS + FIRST)
    num_candidates = tl.load(facts + row * NUM_FACTS + LAST) - first
    table = host_table + tl.load(facts + row * NUM_FACTS + TABLE_ROW).to(tl.int64) * table_stride + first
    member = tl.arange(0, GROUP_PAD)
    candidate = chunk * CHUNK + tl.arange(0, CHUNK)
    pair = row * num_heads + head
    out = (pair * GROUP + member[:, None]) * max_candidates + candidate[None, :]
    wanted = (member < GROUP)[:, None] & (candidate < max_candidates)[None, :]
    if chunk * CHUNK >= num_candidates:
        nothing = tl.full((GROUP_PAD, CHUNK), float("-inf"), tl.float32)
        tl.store(scores + out, nothing, mask=wanted)
        tl.store(tail_logits + out, nothing, mask=wanted)
        return

    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = D // PER_BYTE
    column = tl.arange(0, CHUNK * B)  # the chunk's tokens
    column_alive = chunk * CHUNK + column // B < num_candidates
    column_home = tl.load(table + chunk * CHUNK + column // B, mask=column_alive, other=0).to(tl.int64)
    token = (column_home * num_heads + head) * B + column % B
    byte = tl.arange(0, BYTES_PAD)
    packed = tl.load(
        codes + token[None, :] * BYTES + byte[:, None], mask=column_alive[None, :] & (byte < BYTES)[:, None], other=0
    ).to(tl.int32)
    rows = (pair * GROUP + member[:, None]) * D
    members = (member < GROUP)[:, None]
    # A byte holds neighbouring channels: one product for each place in the byte, against every PER_BYTE-th channel.
    residual = tl.zeros((GROUP_PAD, CHUNK * B), tl.float32)
    for place in tl.static_range(PER_BYTE):
        code = (packed >> (place * BITS)) & (2**BITS - 1)
        if BITS == 2:  # noqa: SIM108 (the branch is taken at compile time)
            level = tl.where(code >= 2, 1, -1) * tl.where((code == 1) | (code == 2), 3, 10)
        else:
            level = 2 * code - 1
        query = tl.load(
            q_rotated + rows + byte[None, :] * PER_BYTE + place, mask=members & (byte < BYTES)[None, :], other=0
        )
        residual = tl.dot(query, level.to(query.dtype), residual, input_precision="ieee")
    step = tl.load(token_scales + token, mask=column_alive, other=0).to(tl.float32) * scale
    logits = tl.reshape(residual * step[None, :], (GROUP_PAD, CHUNK, B))
    highest = tl.max(logits, 2)
    spread = highest + tl.log(tl.sum(tl.exp(logits - tl.reshape(highest, (GROUP_PAD, CHUNK, 1))), 2))

    alive = candidate < num_candidates
    home = tl.load(table + candidate, mask=alive, other=0).to(tl.int64) * num_heads + head
    channel = tl.arange(0, D)
    mean = tl.load(means + home[None, :] * 2 * D + channel[:, None], mask=alive[None, :], other=0)
    query = tl.load(q + rows + channel[None, :], mask=members, other=0)
    mean_scale = tl.load(mean_scales + home * 2, mask=alive, other=0).to(tl.float32) * scale
    coarse = tl.dot(query, mean.to(query.dtype), input_precision="ieee") * mean_scale[None, :]
    tl.store(scores + out, tl.where(alive[None, :], coarse + spread, float("-inf")), mask=wanted)
    tl.store(tail_logits + out, tl.where(alive[None, :], coarse + log_block, float("-inf")), mask=wanted)


@triton.jit
def score_bounds_kernel(
    q: tl.tensor,
    host_table: tl.tensor,
    facts: tl.tensor,
    bounds: tl.tensor,
    scores: tl.tensor,
    table_stride: int,
    max_candidates: int,
    scale: float,
    log_block: float,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(1)
    first = tl.load(facts + row * NUM_FACTS + FIRST)
    num_candidates = tl.load(facts + row * NUM_FACTS + LAST) - first
    table = host_table + tl.load(facts + row * NUM_FACTS + TABLE_ROW).to(tl.int64) * table_stride + first
    member, channel = tl.arange(0, GROUP_PAD), tl.arange(0, D)
    candidate = chunk * CHUNK + tl.arange(0, CHUNK)
    alive = candidate < num_candidates
    pair = row * num_heads + head
    home = (tl.load(table + candidate, mask=alive, other=0).to(tl.int64) * num_heads + head) * 2 * D
    # Products in fp32: a bound may round up past what fp16 holds.
    query = tl.load(
        q + (pair * GROUP + member[:, None]) * D + channel[None, :], mask=(member < GROUP)[:, None], other=0
    ).to(tl.float32)
    high = tl.load(bounds + home[None, :] + channel[:, None], mask=alive[None, :], other=0).to(tl.float32)
    low = tl.load(bounds + home[None, :] + D + channel[:, None], mask=alive[None, :], other=0).to(tl.float32)
    bound = tl.dot(tl.maximum(query, 0.0), high, input_precision="ieee")
    bound = tl.dot(tl.minimum(query, 0.0), low, bound, input_precision="ieee")
    out = (pair * GROUP + member[:, None]) * max_candidates + candidate[None, :]
    wanted = (member < GROUP)[:, None] & (candidate < max_candidates)[None, :]
    tl.store(scores + out, tl.where(alive[None, :], bound * scale + log_block, float("-inf")), mask=wanted)


def score(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    host_table: torch.Tensor,
    rows: Rows,
    codes: torch.Tensor,
    token_scales: torch.Tensor,
    means: torch.Tensor,
    mean_scales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimated log mass of each candidate block by query head, and its mean-key logit for the tail.

    Args:
        q, q_rotated: [row, kv_head, group, D], roped, and the same by `rotate`.
        host_table: [table_row, max_blocks] int32, block -> row of the sketch.
        codes, token_scales, means, mean_scales: one layer's, as `seal` writes them.

    Returns:
        scores and tail logits, both [row, kv_head, group, max_candidates] fp32; -inf past a row's candidates.

    Raises:
        ValueError: D is no power of two.
    """
    num_rows, num_heads, group, head_dim = q.shape
    num_blocks, _, block_size, num_bytes = codes.shape
    check_head_dim(head_dim)
    _check_query(q, host_table, rows)
    check(q_rotated, tuple(q.shape), q.dtype, like=q)
    bits = 8 * num_bytes // head_dim
    assert bits in (1, 2), bits
    check(codes, (num_blocks, num_heads, block_size, head_dim * bits // 8), torch.uint8, like=q)
    check(token_scales, (num_blocks, num_heads, block_size), torch.float16, like=q)
    check(means, (num_blocks, num_heads, 2, head_dim), torch.int8, like=q)
    check(mean_scales, (num_blocks, num_heads, 2), torch.float16, like=q)
    shape = (num_rows, num_heads, group, rows.bounds.max_candidates)
    chunk = max(1, CHUNK_TOKENS // block_size)
    scores = torch.empty(shape, dtype=torch.float32, device=q.device)
    tail_logits = torch.empty(shape, dtype=torch.float32, device=q.device)
    score_kernel[(triton.cdiv(rows.bounds.max_candidates, chunk), num_heads, num_rows)](
        q, q_rotated, host_table, rows.facts, codes, token_scales, means, mean_scales, scores, tail_logits,
        host_table.shape[1], rows.bounds.max_candidates, 1 / math.sqrt(head_dim), math.log(block_size),
        GROUP=group, GROUP_PAD=padded_group(group), B=block_size, D=head_dim, BITS=bits,
        BYTES_PAD=max(16, num_bytes), CHUNK=chunk,
    )  # fmt: skip
    return scores, tail_logits


def score_bounds(
    q: torch.Tensor, host_table: torch.Tensor, rows: Rows, bounds: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Quest's upper bound of every token's logit, plus log block_size, for bounds as `seal_bounds` writes them.

    Arguments, result and errors are those of `score`.
    """
    num_rows, num_heads, group, head_dim = q.shape
    check_head_dim(head_dim)
    _check_query(q, host_table, rows)
    check(bounds, (bounds.shape[0], num_heads, 2, head_dim), torch.bfloat16, like=q)
    chunk = BOUNDS_CHUNK
    scores = torch.empty(num_rows, num_heads, group, rows.bounds.max_candidates, dtype=torch.float32, device=q.device)
    score_bounds_kernel[(triton.cdiv(rows.bounds.max_candidates, chunk), num_heads, num_rows)](
        q, host_table, rows.facts, bounds, scores,
        host_table.shape[1], rows.bounds.max_candidates, 1 / math.sqrt(head_dim), math.log(block_size),
        GROUP=group, GROUP_PAD=padded_group(group), D=head_dim, CHUNK=chunk,
    )  # fmt: skip
    return scores


def _check_query(q: torch.Tensor, host_table: torch.Tensor, rows: Rows) -> None:
    check(q, (rows.num_rows, *q.shape[1:]), *FLOATS, like=q)
    check(host_table, tuple(host_table.shape), torch.int32, like=q)
    check(rows.facts, (rows.num_rows, NUM_FACTS.value), torch.int32, like=q)
