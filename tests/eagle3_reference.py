"""EAGLE-3 as its paper and its published checkpoints describe it, written plainly: no cache, no batch, loops.

The tiny heads of tests/tiny.py: 4 query and 2 KV heads of 32, rope theta 10,000, rms epsilon 1e-5.
"""

import math

import torch

Tensors = dict[str, torch.Tensor]
EPS, THETA, HEAD_DIM = 1e-5, 10000.0, 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [heads, 32] turned to its position; dimension i turns with i + 16."""
    angles = position / THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    a, b = x[:, : HEAD_DIM // 2], x[:, HEAD_DIM // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def head_states(
    w: Tensors,
    embedding: torch.Tensor,
    next_tokens: list[int],
    features: torch.Tensor,
    *,
    norm_before_residual: bool = False,
) -> torch.Tensor:
    """The head's outputs [T, hidden]; `next_tokens[i]` follows position i, features [T, 3 hidden] or [T, hidden].

    Features of width 3 hidden are the target's and go through fc; those of width hidden are the head's own outputs.
    """
    hidden = embedding.shape[1]
    fused = features @ w["fc.weight"].T if features.shape[1] == 3 * hidden else features
    return torch.stack(_layer(w, embedding, next_tokens, list(fused), norm_before_residual))


def drafts(w: Tensors, embedding: torch.Tensor, tokens: list[int], features: torch.Tensor, count: int) -> list[int]:
    """What the head proposes after `tokens`, given the features [n - 1, 3 hidden] of all but the last."""
    hidden = list(features @ w["fc.weight"].T)
    following = tokens[1:]
    proposed: list[int] = []
    while len(proposed) < count:
        state = _layer(w, embedding, following, hidden, False)[-1]
        proposed.append(next_token(w, state))
        hidden.append(state)
        following = [*following, proposed[-1]]
    return proposed


def next_token(w: Tensors, state: torch.Tensor) -> int:
    best = int((w["lm_head.weight"] @ rms_norm(state, w["norm.weight"])).argmax())
    return best + int(w["d2t"][best])


def _layer(
    w: Tensors, embedding: torch.Tensor, next_tokens: list[int], fused: list[torch.Tensor], norm_before_residual: bool
) -> list[torch.Tensor]:
    w = {name.removeprefix("midlayer."): tensor for name, tensor in w.items()}
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    states = []
    for position, (token, feature) in enumerate(zip(next_tokens, fused, strict=True)):
        embedded = rms_norm(embedding[token], w["input_layernorm.weight"])
        normed = rms_norm(feature, w["hidden_norm.weight"])
        both = torch.cat([embedded, normed])
        q, k, v = ((w[f"self_attn.{n}_proj.weight"] @ both).view(-1, HEAD_DIM) for n in "qkv")
        keys.append(rotate(k, position))
        values.append(v)
        heads = []
        for head, query in enumerate(rotate(q, position)):
            kv_head = head // (q.shape[0] // k.shape[0])
            logits = torch.stack([query @ key[kv_head] for key in keys]) / math.sqrt(HEAD_DIM)
            heads.append(sum(p * value[kv_head] for p, value in zip(torch.softmax(logits, 0), values, strict=True)))
        x = (normed if norm_before_residual else feature) + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        y = rms_norm(x, w["post_attention_layernorm.weight"])
        gate = w["mlp.gate_proj.weight"] @ y
        states.append(x + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ y)))
    return states
