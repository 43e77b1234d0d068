"""Attention over gathered keys and values: a prompt chunk over its prefix, a decoded row over its blocks."""

import math

import torch
import torch.nn.functional as F


def causal_mask(start: int, stop: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask [stop - start, stop] for tokens [start, stop) over tokens [0, stop)."""
    mask = torch.zeros(stop - start, stop, dtype=dtype, device=device)
    later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=device).triu(1)
    mask[:, start:].masked_fill_(later, float("-inf"))
    return mask


def attend_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Dense attention of a chunk: q [T, num_heads, D] over k, v [num_kv_heads, S, D] under `mask` [T, S] -> like q."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_heads // num_kv_heads
    # KV heads as the batch and their query group as heads: keys and values are shared by stride, not copied.
    grouped = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, group, *k.shape[1:])
    out = F.scaled_dot_product_attention(
        grouped, k[:, None].expand(shared), v[:, None].expand(shared), attn_mask=mask[None, None]
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tail_logits: torch.Tensor | None = None,
    tail_values: torch.Tensor | None = None,
    use_tail: bool = False,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One row over the tokens of its blocks, in fp32, with the estimate for the blocks left out (engine tail).

    Args:
        q: [head, group, D]; k, v: [head, T, D], tokens in ascending position.
        tail_logits: [head, group, n] log-mass estimates, -inf for attended blocks; tail_values: [head, n, D].
        use_tail: let the left-out blocks contribute their mean values; without it they are only accounted for.
        hidden: [head, T] bool, True where a token must not be read.

    Returns:
        The output [head, group, D] in q's dtype, and the estimated share of attention mass outside the attended
        tokens [head, group] (None without tail_logits).
    """
    logits = torch.matmul(q.float(), k.float().mT) * (1.0 / math.sqrt(q.shape[-1]))  # [head, group, T]
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, :], float("-inf"))
    if tail_logits is None or tail_values is None:
        return torch.matmul(torch.softmax(logits, -1), v.float()).to(q.dtype), None
    num_tokens = logits.shape[-1]
    share = torch.softmax(torch.cat([logits, tail_logits], -1), -1)
    inside, outside = share[..., :num_tokens], share[..., num_tokens:]
    missed = outside.sum(-1)
    if use_tail:
        out = torch.matmul(inside, v.float()) + torch.matmul(outside, tail_values)
    else:
        out = torch.matmul(torch.softmax(logits, -1), v.float())
    return out.to(q.dtype), missed
