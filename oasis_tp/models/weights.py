"""Weights from safetensors files into one rank's model: each rank reads only its slices. Or random ones."""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.registry import read_json

IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes: its slice from `start` along `dim` fills `target`; `shape` is the whole's."""

    name: str
    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


def weight_table(model: LlamaModel) -> list[WeightSlot]:
    """One slot for every tensor this rank's model takes from a checkpoint, with Hugging Face names."""
    arch, shard = model.arch, model.shard
    hidden, head_dim, width = arch.hidden_size, arch.head_dim, arch.intermediate_size
    vocab = (arch.vocab_size, hidden)
    table = [
        WeightSlot("model.embed_tokens.weight", model.embedding.weight, vocab, 0, model.embedding.start),
        WeightSlot("model.norm.weight", model.norm.weight, (hidden,)),
    ]
    if model.head is not model.embedding:
        table.append(WeightSlot("lm_head.weight", model.head.weight, vocab, 0, model.head.start))
    q_rows, kv_rows = shard.num_heads * head_dim, shard.num_kv_heads * head_dim
    q_all, kv_all = arch.num_heads * head_dim, arch.num_kv_heads * head_dim
    q_start, kv_start = shard.q_start * head_dim, shard.kv_start * head_dim
    for index, layer in enumerate(model.layers):
        attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{index}."
        table += [
            WeightSlot(prefix + "input_layernorm.weight", layer.input_norm.weight, (hidden,)),
            WeightSlot(prefix + "post_attention_layernorm.weight", layer.mlp_norm.weight, (hidden,)),
            WeightSlot(prefix + "self_attn.o_proj.weight", attention.out.weight, (hidden, q_all), 1, q_start),
            WeightSlot(prefix + "mlp.down_proj.weight", mlp.down.weight, (hidden, width), 1, mlp.start),
        ]
        for kind, fused in (("weight", attention.qkv.weight), ("bias", attention.qkv.bias)):
            if fused is not None:
                inputs = fused.shape[1:]
                q, k, v = fused.split((q_rows, kv_rows, kv_rows))
                table += [
                    WeightSlot(f"{prefix}self_attn.q_proj.{kind}", q, (q_all, *inputs), 0, q_start),
                    WeightSlot(f"{prefix}self_attn.k_proj.{kind}", k, (kv_all, *inputs), 0, kv_start),
                    WeightSlot(f"{prefix}self_attn.v_proj.{kind}", v, (kv_all, *inputs), 0, kv_start),
                ]
        gate, up = mlp.gate_up.weight.chunk(2)
        table += [
            WeightSlot(prefix + "mlp.gate_proj.weight", gate, (width, hidden), 0, mlp.start),
            WeightSlot(prefix + "mlp.up_proj.weight", up, (width, hidden), 0, mlp.start),
        ]
        if attention.out.bias is not None:
            table.append(WeightSlot(prefix + "self_attn.o_proj.bias", attention.out.bias, (hidden,)))
        if attention.q_norm is not None and attention.k_norm is not None:
            table += [
                WeightSlot(prefix + "self_attn.q_norm.weight", attention.q_norm.weight, (head_dim,)),
                WeightSlot(prefix + "self_attn.k_norm.weight", attention.k_norm.weight, (head_dim,)),
            ]
    return table


def weight_bytes(model: LlamaModel) -> int:
    """Bytes of this rank's weights (the rotary table not counted)."""
    return sum(slot.target.nbytes for slot in weight_table(model))


def load_weights(model: LlamaModel, model_dir: Path, progress: bool = False) -> None:
    """Fill the model from the safetensors files in `model_dir`, cast to the model's dtype.

    `progress` shows a bar over files on stderr.

    Raises:
        ValueError: a file missing, truncated or unreadable; a tensor missing, left over or of another shape than
            config.json promises. The model is then partly filled and must not be used.
    """
    slots = {slot.name: slot for slot in weight_table(model)}
    seen: set[str] = set()
    left_over: dict[str, Path] = {}
    for file in _progress_bar(_weight_files(model_dir)) if progress else _weight_files(model_dir):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    slot = slots.get(name)
                    if slot is None:
                        left_over[name] = file
                        continue
                    part = tensors.get_slice(name)
                    shape = tuple(part.get_shape())
                    if shape != slot.shape:
                        raise ValueError(
                            f"{file}: tensor {name} has shape {list(shape)}, config.json asks for {list(slot.shape)}"
                        )
                    size = slot.target.shape[slot.dim]
                    rows = slice(slot.start, slot.start + size)
                    slot.target.copy_(part[rows] if slot.dim == 0 else part[:, rows])
                    seen.add(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read, it may be truncated or damaged: {error}") from error
    missing = sorted(slots.keys() - seen)
    if missing:
        raise ValueError(f"{model_dir}: {len(missing)} tensors are missing: {_some(missing)}")
    for name in list(left_over):
        if name.endswith(IGNORED_SUFFIX) or (name == "lm_head.weight" and model.arch.tie_word_embeddings):
            del left_over[name]
    if left_over:
        named = [f"{name} (in {file.name})" for name, file in sorted(left_over.items())]
        raise ValueError(
            f"{model_dir}: {len(named)} tensors have no place in {model.arch.architecture}: {_some(named)}"
        )


def fill_weights(model: LlamaModel, seed: int) -> None:
    """Random weights: matrices keep the variance of what they multiply, norms are 1 and biases 0.

    A rank's share is cut from the whole, so the model is the same on any number of ranks of one kind of device.
    """
    generator = torch.Generator(model.device)
    for slot in weight_table(model):
        if len(slot.shape) == 1:
            slot.target.fill_(float(slot.name.endswith("weight")))
            continue
        generator.manual_seed(zlib.crc32(f"{seed} {slot.name}".encode()))
        whole = torch.empty(slot.shape, dtype=model.dtype, device=model.device)
        whole.normal_(0.0, slot.shape[1] ** -0.5, generator=generator)
        slot.target.copy_(whole.narrow(slot.dim, slot.start, slot.target.shape[slot.dim]))


def _weight_files(model_dir: Path) -> list[Path]:
    """The files an index names, else model.safetensors, else every safetensors file."""
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        files = [model_dir / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_dir} has no .safetensors files; other weight formats are not read")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, {index.name} names it")
    return files


def _progress_bar(files: Iterable[Path]) -> Iterator[Path]:
    from tqdm import tqdm

    yield from tqdm(files, desc="loading weights", unit="file")


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
