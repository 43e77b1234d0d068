"""The Llama decoder and its kin (Mistral, Qwen2, Qwen3), sharded by heads; attention itself is the caller's."""

from collections.abc import Callable

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.models.registry import ModelArch
from oasis_tp.nn.embedding import VocabEmbedding
from oasis_tp.nn.linear import ColumnLinear, RowLinear
from oasis_tp.nn.norm import RmsNorm
from oasis_tp.nn.ops import Place
from oasis_tp.nn.rotary import Angles, RotaryTable
from oasis_tp.sharding import HeadShard, head_shards, split_range

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) → [T, Hq, D]; heads are this rank's, q and k are roped."""


class Attention:
    """Projections around the caller's attention, for this rank's heads."""

    def __init__(self, arch: ModelArch, shard: HeadShard, tp: TpGroup, place: Place) -> None:
        self.shard, self.ops = shard, place.ops
        qkv_size = (shard.num_heads + 2 * shard.num_kv_heads) * arch.head_dim
        self.qkv = ColumnLinear(arch.hidden_size, qkv_size, place, bias=arch.attention_bias)
        self.out = RowLinear(shard.num_heads * arch.head_dim, arch.hidden_size, tp, place, bias=arch.output_bias)
        self.q_norm = self.k_norm = None
        if arch.qk_norm:
            self.q_norm = place.rms_norm(arch.head_dim, arch.rms_norm_eps)
            self.k_norm = place.rms_norm(arch.head_dim, arch.rms_norm_eps)

    def __call__(self, layer: int, x: torch.Tensor, norm: RmsNorm, angles: Angles, attend: Attend) -> torch.Tensor:
        """x + attention(norm(x))."""
        qkv = self.qkv(x, norm=norm)
        q, k, v = self.ops.split_rotated(
            qkv, self.shard.num_heads, self.shard.num_kv_heads, angles, self.q_norm, self.k_norm
        )
        return self.out(attend(layer, q, k, v).reshape(x.shape[0], -1), residual=x)


class Mlp:
    """x + down(silu(gate(norm(x))) * up(norm(x))) for this rank's part `start:stop` of the width.

    Gate and up are one matrix.
    """

    def __init__(self, arch: ModelArch, tp: TpGroup, place: Place) -> None:
        self.start, self.stop = split_range(arch.intermediate_size, tp.size, tp.rank)
        width = self.stop - self.start
        self.gate_up = ColumnLinear(arch.hidden_size, 2 * width, place, bias=False)
        self.down = RowLinear(width, arch.hidden_size, tp, place, bias=False)

    def __call__(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return self.down(self.gate_up(x, norm=norm), residual=x, gated=True)


class DecoderLayer:
    def __init__(self, arch: ModelArch, shard: HeadShard, tp: TpGroup, place: Place) -> None:
        self.input_norm = place.rms_norm(arch.hidden_size, arch.rms_norm_eps)
        self.attention = Attention(arch, shard, tp, place)
        self.mlp_norm = place.rms_norm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = Mlp(arch, tp, place)


class LlamaModel:
    """One rank's share of a decoder; weights are allocated and not set (see `models.weights.load_weights`).

    Every rank calls `forward` with the same tokens: two all-reduces per layer and one for the embedding.

    Raises:
        ValueError: more ranks than query heads.
    """

    def __init__(self, arch: ModelArch, tp: TpGroup, place: Place, *, max_model_len: int) -> None:
        self.arch, self.tp, self.place = arch, tp, place
        self.dtype, self.device = place.dtype, place.device
        self.shard = head_shards(arch.num_heads, arch.num_kv_heads, tp.size)[tp.rank]
        self.embedding = VocabEmbedding(arch.vocab_size, arch.hidden_size, tp, place)
        self.head = self.embedding
        if not arch.tie_word_embeddings:
            self.head = VocabEmbedding(arch.vocab_size, arch.hidden_size, tp, place)
        self.layers = [DecoderLayer(arch, self.shard, tp, place) for _ in range(arch.num_layers)]
        self.norm = place.rms_norm(arch.hidden_size, arch.rms_norm_eps)
        self.rotary = RotaryTable(arch.rope, arch.head_dim, max_model_len, place.device)

    @property
    def vocab_ranges(self) -> list[tuple[int, int]]:
        """Half-open ranges of token ids whose logits each rank holds, in rank order."""
        return self.head.ranges

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        features: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """token_ids and positions [T] int64 → hidden states [T, hidden] after the final norm, whole on every rank.

        Rows may belong to any mix of requests; only `attend` relates them. It gets contiguous tensors and must write
        k and v where it wants to find them again. `features` gets, for each layer index it has as a key, the hidden
        states [T, hidden] that enter that layer.
        """
        angles = self.rotary.at(positions)
        x = self.embedding.lookup(token_ids)
        for index, layer in enumerate(self.layers):
            if features is not None and index in features:
                features[index] = x.clone()
            x = layer.attention(index, x, layer.input_norm, angles, attend)
            x = layer.mlp(x, layer.mlp_norm)
        return self.place.ops.norm(x, self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] → [N, local_vocab] float32: this rank's range of `vocab_ranges`."""
        return self.head.logits(hidden)
