"""Rotary position embedding with the half-split pairing of Hugging Face checkpoints: dimension i turns with i + D/2."""

import math

import torch

from oasis_tp.nn.rope_config import RopeConfig

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [T, 1, head_dim / 2] float32 of each row's position."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per token for each pair of dimensions, [head_dim / 2] float32, and the factor on cos and sin.

    Sources: RoFormer; position interpolation (Chen et al., 2023) for `linear`; the Llama 3.1 release for `llama3`;
    YaRN (Peng et al., 2023), sections 3.2 to 3.4, for `yarn`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return inv_freq, 1.0
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original window
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return inv_freq * (keep + (1.0 - keep) / rope.factor), 1.0
    assert rope.kind == "yarn", rope.kind

    def pair_with_turns(turns: float) -> float:
        """Index of the (fractional) pair that turns this often within the original window."""
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step in place of a ramp
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (1.0 - stretch) + inv_freq / rope.factor * stretch, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class RotaryTable:
    """cos and sin of every position up to `max_model_len`, computed once in float32 (angles as transformers does)."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> None:
        inv_freq, scale = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq
        self.cos = (angles.cos() * scale).to(device)  # [max_model_len, head_dim / 2] float32
        self.sin = (angles.sin() * scale).to(device)  # likewise

    def at(self, positions: torch.Tensor) -> Angles:
        """For positions [T] int64 below max_model_len."""
        return self.cos[positions, None], self.sin[positions, None]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, heads, head_dim] by `Angles`; float32 inside, a new contiguous tensor out."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
