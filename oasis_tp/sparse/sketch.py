"""Sketch: the compact stand-in of sealed KV blocks that stays on the device and that the selection scores.

Residual coding (`2bit`, `1bit`): a block's mean key in int8; per token the residual (key minus that mean), rotated by a
fixed random-sign Hadamard matrix so that its channels look alike, in 2-bit Lloyd-Max or 1-bit codes with one scale;
and the mean value in int8 for the tail estimate. It depends on nothing but the block's own keys and values, to the bit:
neither on chunking nor on what is sealed beside it. The scale makes <r, r̂> = <r, r>, which leaves the estimate of
q·r unbiased along r (the rule of RaBitQ, Gao and Long, SIGMOD 2024).

`minmax`: per-channel bounds of a block's keys (Quest, Tang et al., ICML 2024, section 3.3).
"""

import math
from itertools import pairwise

import torch

from oasis_tp.config import SketchKind
from oasis_tp.sparse.sketch_size import CODE_BITS, sketch_bytes_per_block

LEVELS: dict[int, tuple[int, ...]] = {1: (-1, 1), 2: (-10, -3, 3, 10)}
"""Bits -> level of each code: signs, or the Lloyd-Max levels of a normal distribution (±0.453, ±1.510 times its rms).
These stand as 3 : 10, so small integers hold them exactly."""

_RMS_PER_LEVEL = 0.151  # of the 2-bit levels; the 1-bit threshold is 0 in any unit

MAX_ABS = 65504.0
"""Keys, values and scales are clamped to fp16's range, so that nothing stored is ever infinite."""

_SCORE_CHUNK_BLOCKS = {"cpu": 64, "cuda": 4096}  # bounds a scan's dequantised workspace; on the CPU it fits the cache


class Sketch:
    """The sketches of all host blocks of one rank: one kind, every layer and local KV head.

    Reads and writes are ordinary operations on the caller's current stream. A block may be scored after it was sealed;
    what unsealed blocks hold is undefined and never read by others' scores.
    """

    def __init__(
        self,
        kind: SketchKind,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate; sketch_bytes_per_block(...) · num_layers · num_blocks · num_kv_heads bytes.

        Raises:
            ValueError: head_dim does not suit the kind.
        """
        sketch_bytes_per_block(kind, head_dim, block_size)
        self.kind: SketchKind = kind
        self.has_tail = kind in CODE_BITS
        self.head_dim = head_dim
        self.block_size = block_size

        def store(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_layers, num_blocks, num_kv_heads, *shape, dtype=dtype, device=device)

        if not self.has_tail:
            self.bounds = store(2, head_dim, dtype=torch.bfloat16)  # [layer, block, kv_head, max|min, D]
            return
        self.bits = CODE_BITS[kind]
        per_byte = 8 // self.bits
        # Channel d's code stands in byte d // per_byte, lowest bits first.
        self.codes = store(block_size, head_dim // per_byte, dtype=torch.uint8)  # [layer, block, kv_head, B, bytes]
        self.token_scales = store(block_size, dtype=torch.float16)  # [layer, block, kv_head, B]
        self.means = store(2, head_dim, dtype=torch.int8)  # [layer, block, kv_head, K|V, D]
        self.mean_scales = store(2, dtype=torch.float16)  # [layer, block, kv_head, K|V]
        self.rotation = rotate(torch.eye(head_dim, dtype=torch.float32)).to(device)  # [D, D], x @ rotation = rotate(x)
        self.shifts = torch.arange(per_byte, dtype=torch.uint8, device=device) * self.bits  # [per_byte]
        levels = torch.tensor(LEVELS[self.bits], dtype=torch.int8, device=device)
        every_byte = torch.arange(256, device=device)[:, None] >> self.shifts & (2**self.bits - 1)
        # The levels of a byte's codes, int8 each, packed in one integer: the lookup moves one word per byte.
        self.levels_of_byte = levels[every_byte].view(torch.int32 if per_byte == 4 else torch.int64).flatten()  # [256]

    def tensors(self) -> list[torch.Tensor]:
        """What is stored per block, each [layer, block, kv_head, ...]."""
        if not self.has_tail:
            return [self.bounds]
        return [self.codes, self.token_scales, self.means, self.mean_scales]

    def seal(self, layer: int, block_ids: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sketch full blocks, computed in fp32.

        Args:
            block_ids: [n] int64, without duplicates.
            k: [n, H, B, D] roped keys, any float dtype.
            v: [n, H, B, D] values.
        """
        for store, rows in zip(self.tensors(), self._sketch(k, v), strict=True):
            store[layer].index_copy_(0, block_ids, rows)

    def seal_block(self, block_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sketch one block in all layers: k and v [layer, H, B, D], as for `seal`."""
        for store, rows in zip(self.tensors(), self._sketch(k, v), strict=True):
            store[:, block_id] = rows

    def _sketch(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Rows [n, H, ...] for each of `tensors`, of k and v [n, H, B, D]."""
        k = k.float().clamp(-MAX_ABS, MAX_ABS)
        if not self.has_tail:
            return [torch.stack((k.amax(2), k.amin(2)), 2).bfloat16()]
        v = v.float().clamp(-MAX_ABS, MAX_ABS)
        means, mean_scales = _quantise_int8(torch.stack((k.mean(2), v.mean(2)), 2))
        dequantised_mean = means[:, :, :1].float() * mean_scales[:, :, :1, None].float()
        codes, token_scales = self._encode(rotate(k - dequantised_mean))
        return [codes, token_scales, means, mean_scales]

    def score(self, layer: int, block_ids: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Estimated log of each block's attention mass under one row's queries.

        2bit, 1bit: logsumexp over the block's tokens of the estimated q·k / sqrt(D). minmax: Quest's upper bound of
        every token's logit, plus log B: the mass if all tokens met the bound.

        Args:
            block_ids: [n] int64, sealed blocks.
            q: [H, G, D] roped queries of one row, by KV head and position in its group.

        Returns:
            [H, G, n] fp32.
        """
        q = q.float() / math.sqrt(self.head_dim)
        chunk = _SCORE_CHUNK_BLOCKS[q.device.type]
        chunk_scores = self._score_tokens if self.has_tail else self._score_bounds
        return torch.cat([chunk_scores(layer, ids, q) for ids in block_ids.split(chunk)], -1)

    def tail(self, layer: int, block_ids: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What blocks contribute when they are not attended: all tokens at the mean key, with the mean value.

        Args:
            block_ids: [n] int64, sealed blocks.
            q: [H, G, D] roped queries of one row.

        Returns:
            logits [H, G, n] fp32, q·mean key / sqrt(D) + log B, and mean values [H, n, D] fp32.
        """
        assert self.has_tail, self.kind
        means = self._means(layer, block_ids)
        logits = q.float() / math.sqrt(self.head_dim) @ means[:, :, 0].mT + math.log(self.block_size)
        return logits, means[:, :, 1]

    @staticmethod
    def group_scores(block_scores: torch.Tensor) -> torch.Tensor:
        """One score per block and KV head: the largest share of the candidates' mass that any query head gives it.

        Args:
            block_scores: [H, G, n] as `score` returns them, over all candidates of the row.

        Returns:
            [H, n] fp32 in the log domain, so that small shares keep their order.
        """
        return torch.log_softmax(block_scores, -1).amax(1)

    def _score_bounds(self, layer: int, block_ids: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        bounds = self.bounds[layer].index_select(0, block_ids).transpose(0, 1).flatten(2).float()  # [H, n, 2 D]
        q_of_bound = torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)  # a positive channel meets the maximum
        return q_of_bound @ bounds.mT + math.log(self.block_size)

    def _score_tokens(self, layer: int, block_ids: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        num_kv_heads, group, head_dim = q.shape
        num_blocks = block_ids.shape[0]
        codes = self.codes[layer].index_select(0, block_ids).transpose(0, 1)  # [H, n, B, bytes]
        scales = self.token_scales[layer].index_select(0, block_ids).transpose(0, 1).float()  # [H, n, B]
        levels = self._levels(codes).view(num_kv_heads, -1, head_dim).float()  # [H, n B, D]
        residual = (q @ self.rotation @ levels.mT).view(num_kv_heads, group, num_blocks, self.block_size)
        coarse = q @ self._means(layer, block_ids)[:, :, 0].mT  # [H, G, n]
        return coarse + torch.logsumexp(residual * scales[:, None], -1)

    def _means(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Dequantised means [H, n, K|V, D] fp32."""
        means = self.means[layer].index_select(0, block_ids).transpose(0, 1).float()
        return means * self.mean_scales[layer].index_select(0, block_ids).transpose(0, 1).float()[..., None]

    def _levels(self, codes: torch.Tensor) -> torch.Tensor:
        """Levels, int8, of packed codes: [number of codes]."""
        return self.levels_of_byte.index_select(0, codes.flatten().int()).view(torch.int8)

    def _encode(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [..., D / per_byte] uint8 and scales [...] fp16 of rotated residuals [..., D] fp32."""
        levels = LEVELS[self.bits]
        rms = residual.square().mean(-1, keepdim=True).sqrt()
        index = torch.zeros_like(residual, dtype=torch.uint8)
        for low, high in pairwise(levels):
            index += residual > (low + high) / 2 * _RMS_PER_LEVEL * rms
        codes = (index.unflatten(-1, (-1, self.shifts.numel())) << self.shifts).sum(-1, dtype=torch.uint8)
        projection = (residual * self._levels(codes).view(residual.shape)).sum(-1)
        scale = torch.where(projection > 0, residual.square().sum(-1) / projection, 0.0)  # 0: a residual of zeros
        return codes, scale.clamp(max=MAX_ABS).half()


def top_blocks(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k best candidates per KV head, ascending; all of them when there are no more than k.

    Equal scores go to the lower position, so the choice is total: the same on every device.

    Args:
        scores: [H, n], candidates in ascending block order.

    Returns:
        [H, min(k, n)] int64.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :k].sort(-1).values


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] fp32 times the fixed orthonormal rotation: random signs, then a Hadamard transform.

    Block-diagonal in descending powers of two where D is no power of two (80 = 64 + 16). Sums run in butterflies, in
    one order, so a row's bits do not depend on how many rows are rotated with it, as those of a matrix product may.
    """
    head_dim = x.shape[-1]
    x = x * torch.tensor(_signs(head_dim), dtype=torch.float32, device=x.device)
    widths = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    return torch.cat([_hadamard(part) for part in x.split(widths, -1)], -1)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, a power of two (Pease's constant-geometry form)."""
    width = x.shape[-1]
    for _ in range(width.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat((even + odd, even - odd), -1)
    return x / math.sqrt(width)


def _signs(count: int) -> list[int]:
    """Fixed signs by integer arithmetic alone (a 32-bit xorshift): the same on every rank, device and version."""
    state, signs = 0x9E3779B9, []
    for _ in range(count):
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
        signs.append(1 if state & 0x10000 else -1)
    return signs


def _quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values [..., D] and fp16 scales [...]: rounded to the scale as it is stored."""
    scale = (x.abs().amax(-1) / 127).half()
    steps = torch.where(scale > 0, scale, 1).float()[..., None]
    return (x / steps).round().clamp(-127, 127).to(torch.int8), scale
