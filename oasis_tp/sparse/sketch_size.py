"""How many bytes a sketch costs. Pure Python: capacity planning asks before any tensor exists."""

from oasis_tp.config import SketchKind

CODE_BITS: dict[SketchKind, int] = {"2bit": 2, "1bit": 1}
"""Bits per residual channel of the sketches that code tokens; `minmax` does not."""


def sketch_bytes_per_block(kind: SketchKind, head_dim: int, block_size: int) -> int:
    """Device bytes of one block's sketch, per layer and local KV head.

    minmax: two bf16 per channel, 4·D. 2bit and 1bit: int8 mean key and mean value with one fp16 scale each, codes of
    2 or 1 bits per channel and one fp16 scale per token: 2·D + B·D·bits/8 + 2·B + 4, that is 6·D + 36 and 4·D + 36
    bytes at 16 tokens per block.

    Raises:
        ValueError: a head_dim whose codes do not fill whole bytes.
    """
    if kind == "minmax":
        return 4 * head_dim
    bits = CODE_BITS[kind]
    if head_dim * bits % 8:
        raise ValueError(
            f"--sketch {kind}: the model's head_dim is {head_dim}; it must be a multiple of {8 // bits}. "
            "Use --sketch minmax"
        )
    return 2 * head_dim + block_size * head_dim * bits // 8 + 2 * block_size + 4
