"""Which rotary embedding a model uses. Imports no torch."""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` one of ROPE_KINDS; the other fields matter only to the kinds that use them.

    Positions are in tokens. Sources: RoFormer (default), position interpolation (linear), Llama 3.1 (llama3),
    YaRN (yarn).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
