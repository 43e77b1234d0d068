"""Eagle3Head: the draft head of EAGLE-3 (Li et al., 2025) in the format of its public checkpoints.

One decoder layer. Its input at position i is the embedding of token i + 1 beside the target's features at i: hidden
states of a low, a middle and a high layer through one matrix `fc`. Further ahead, where the target has computed
nothing yet, the head's own output takes the features' place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from oasis_tp.models.llama import Attend, Mlp
from oasis_tp.models.registry import ModelArch, load_arch, read_json
from oasis_tp.nn.embedding import VocabEmbedding
from oasis_tp.nn.linear import ColumnLinear, RowLinear
from oasis_tp.nn.ops import Place
from oasis_tp.nn.rotary import RotaryTable

if TYPE_CHECKING:
    from oasis_tp.comm import TpGroup

OPTION = "--spec-model"
REFUSED = ("norm_before_fc", "fc_norm", "parallel_drafting")
"""Variations of the published head that are not built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """What a head's config.json says."""

    arch: ModelArch
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    """Target layers whose entering hidden states are the features, lowest first."""
    norm_before_residual: bool
    """The residual stream starts from the normalised features (speculators' heads)."""


def load_head_config(model_dir: Path, target: ModelArch) -> HeadConfig:
    """Read and check a head's config.json against the model it shall draft for.

    Raises:
        ValueError: the head is of another model, or of a kind that is not built.
    """
    config = read_json(model_dir / "config.json")
    arch = load_arch(model_dir, 1, read_as="LlamaForCausalLM")
    where = f"{OPTION} {model_dir}"
    wrong: dict[str, tuple[object, object]] = {
        "num_hidden_layers": (arch.num_layers, 1),
        "vocab_size": (arch.vocab_size, target.vocab_size),
        "target_hidden_size": (config.get("target_hidden_size") or arch.hidden_size, target.hidden_size),
    }
    for key, (given, needed) in wrong.items():
        if given != needed:
            raise ValueError(f"{where}: {key} is {given}; an EAGLE-3 head for this model has {needed}")
    for key in REFUSED:
        if config.get(key):
            raise ValueError(f"{where}: {key} = {config[key]!r} is not supported")
    return HeadConfig(
        arch=arch,
        draft_vocab_size=int(config.get("draft_vocab_size") or arch.vocab_size),
        feature_layers=_feature_layers(where, config, target.num_layers),
        norm_before_residual=bool(config.get("norm_before_residual")),
    )


class Eagle3Head:
    """The head's modules, whole on every rank; weights are allocated and not set (see `load_head`).

    `target_embed` looks tokens up in the target's table, [T] -> [T, hidden]: what a head without its own uses.
    """

    def __init__(
        self,
        config: HeadConfig,
        target_hidden_size: int,
        target_embed: Callable[[torch.Tensor], torch.Tensor],
        tp: "TpGroup",
        place: Place,
        *,
        max_model_len: int,
    ) -> None:
        arch, hidden = config.arch, config.arch.hidden_size
        self.arch, self.ops, self.dtype, self.device = arch, place.ops, place.dtype, place.device
        self.norm_before_residual = config.norm_before_residual
        norm = (hidden, arch.rms_norm_eps)
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.fc = ColumnLinear(3 * target_hidden_size, hidden, place, bias=False)
        self.input_norm, self.hidden_norm = place.rms_norm(*norm), place.rms_norm(*norm)
        self.qkv = ColumnLinear(2 * hidden, q_size + 2 * kv_size, place, bias=arch.attention_bias)
        self.out = RowLinear(q_size, hidden, tp, place, bias=arch.output_bias)
        self.mlp_norm, self.mlp = place.rms_norm(*norm), Mlp(arch, tp, place)
        self.norm = place.rms_norm(*norm)
        self.lm_head = VocabEmbedding(config.draft_vocab_size, hidden, tp, place)
        self.to_target = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=place.device)
        """Target id of each draft id."""
        self.embedding: torch.Tensor | None = None  # [vocab, hidden] where the checkpoint has one
        self._target_embed = target_embed
        self.rotary = RotaryTable(arch.rope, arch.head_dim, max_model_len, place.device)

    @property
    def num_bytes(self) -> int:
        own = [] if self.embedding is None else [self.embedding]
        return sum(tensor.nbytes for tensor in [*self.weights().values(), self.to_target, *own])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] target ids -> [T, hidden]. Collective where the target's table is used."""
        if self.embedding is None:
            return self._target_embed(token_ids)
        return F.embedding(token_ids, self.embedding)

    def forward(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One pass: tokens [T] that follow `positions` [T], and what is known there, hidden [T, hidden] -> like hidden.

        The result takes the features' place one position further on; `draft` reads the next token off it.
        """
        normed = self.hidden_norm(hidden)
        qkv = self.qkv(torch.cat([self.input_norm(self.embed(next_tokens)), normed], dim=-1))
        q, k, v = self.ops.split_rotated(qkv, self.arch.num_heads, self.arch.num_kv_heads, self.rotary.at(positions))
        before = normed if self.norm_before_residual else hidden
        x = self.out(attend(0, q, k, v).reshape(hidden.shape[0], -1), residual=before)
        return self.mlp(x, self.mlp_norm)

    def draft(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest next token, as the target counts them: [N, hidden] -> [N] int64."""
        return self.to_target[self.lm_head.logits(self.norm(hidden)).argmax(dim=-1)]

    def weights(self) -> dict[str, torch.Tensor]:
        """What every checkpoint has, by its published names (without d2t and t2d)."""
        arch, mlp = self.arch, self.mlp
        sizes = [heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
        gate, up = mlp.gate_up.weight.chunk(2)
        table = {
            "fc.weight": self.fc.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            "midlayer.input_layernorm.weight": self.input_norm.weight,
            "midlayer.post_attention_layernorm.weight": self.mlp_norm.weight,
            "midlayer.self_attn.o_proj.weight": self.out.weight,
            "midlayer.mlp.gate_proj.weight": gate,
            "midlayer.mlp.up_proj.weight": up,
            "midlayer.mlp.down_proj.weight": mlp.down.weight,
        }
        for kind, fused in (("weight", self.qkv.weight), ("bias", self.qkv.bias)):
            if fused is not None:
                for name, part in zip("qkv", fused.split(sizes), strict=True):
                    table[f"midlayer.self_attn.{name}_proj.{kind}"] = part
        if self.out.bias is not None:
            table["midlayer.self_attn.o_proj.bias"] = self.out.bias
        return table


def load_head(head: Eagle3Head, model_dir: Path) -> None:
    """Fill a head from safetensors files or pytorch_model.bin, cast to its dtype.

    Raises:
        ValueError: a weight missing, left over or of another shape, or a draft vocabulary that contradicts itself.
    """
    where = f"{OPTION} {model_dir}"
    tensors = _read_tensors(where, model_dir)
    head.to_target.copy_(_target_ids(where, tensors, head.to_target.numel(), head.arch.vocab_size))
    table = head.weights()
    own, vocab = "embed_tokens.weight", (head.arch.vocab_size, head.arch.hidden_size)
    if own in tensors:
        head.embedding = table[own] = torch.empty(vocab, dtype=head.dtype, device=head.device)
    elif head.fc.weight.shape[1] != 3 * head.arch.hidden_size:
        raise ValueError(f"{where}: no {own}, and the model's own embedding is of another width")
    for problem, names in (("missing", table.keys() - tensors.keys()), ("unknown", tensors.keys() - table.keys())):
        if names:
            raise ValueError(f"{where}: {problem} weights of an EAGLE-3 head: {', '.join(sorted(names))}")
    for name, target in table.items():
        if tensors[name].shape != target.shape:
            given, needed = list(tensors[name].shape), list(target.shape)
            raise ValueError(f"{where}: {name} has shape {given}, an EAGLE-3 head for this model has {needed}")
        target.copy_(tensors[name])


def _feature_layers(where: str, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The published choice is low, middle and high: what enters layers 2, L // 2 and L - 3.

    A list at the top level of config.json counts as here; one inside `eagle_config` counts layers by what leaves them.
    """
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    leaving = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers and leaving:
        layers = [layer + 1 for layer in leaving]
    chosen = tuple(layers or (2, num_layers // 2, num_layers - 3))
    if len(chosen) != 3 or not all(0 <= layer < num_layers for layer in chosen):
        raise ValueError(
            f"{where}: features of layers {list(chosen)}; three layers of the model's {num_layers} are needed"
        )
    return chosen


def _read_tensors(where: str, model_dir: Path) -> dict[str, torch.Tensor]:
    """All weights of a head under their shortest published names, from safetensors or pytorch_model.bin."""
    files = sorted(model_dir.glob("*.safetensors"))
    pickled = model_dir / "pytorch_model.bin"
    if not files and not pickled.is_file():
        raise ValueError(f"{where}: neither *.safetensors nor pytorch_model.bin is there")
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            found |= load_file(file)
        if not files:
            found = torch.load(pickled, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{where} cannot be read, it may be truncated or damaged: {error}") from error
    return {name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): found[name] for name in found}


def _target_ids(where: str, tensors: dict[str, torch.Tensor], draft_vocab_size: int, vocab_size: int) -> torch.Tensor:
    """Target id of every draft id [draft_vocab] int64, from `d2t` (differences); takes `d2t` and `t2d` out."""
    offsets, is_drafted = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = torch.arange(draft_vocab_size)
    if offsets is None:
        if draft_vocab_size != vocab_size:
            raise ValueError(f"{where}: no d2t, and {draft_vocab_size} draft tokens stand for {vocab_size}")
        return ids
    if offsets.shape != (draft_vocab_size,):
        raise ValueError(f"{where}: d2t has shape {list(offsets.shape)}, draft_vocab_size is {draft_vocab_size}")
    ids = ids + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"{where}: d2t names tokens outside the model's {vocab_size}")
    if is_drafted is not None and not torch.equal(is_drafted.bool().nonzero().flatten(), ids.sort().values):
        raise ValueError(f"{where}: d2t and t2d name different tokens")
    return ids
