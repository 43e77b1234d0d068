"""A Hugging Face checkpoint as a float32 GGUF file without a tokenizer: for timing llama.cpp on the same weights."""

import json
from pathlib import Path

import torch

from oasis_tp.models.gguf_convert import ARCHITECTURES, LAYER_NAMES, WHOLE_NAMES
from oasis_tp.models.registry import load_arch


def export_gguf(model_dir: Path, target: Path) -> None:
    """Write the model of `model_dir` to the file `target`.

    Raises:
        ValueError: llama.cpp's file has no place for the model's architecture, rope or a tensor of it.
    """
    from gguf import GGUFWriter
    from safetensors import safe_open

    arch, config = load_arch(model_dir, None), json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    family = {of: name for name, of in ARCHITECTURES.items()} | {"MistralForCausalLM": "llama"}
    architecture = family.get(config["architectures"][0])
    if architecture is None or arch.rope.kind != "default":
        raise ValueError(f"no GGUF of {config['architectures'][0]} with rope scaling {arch.rope.kind}")
    writer = GGUFWriter(target, architecture)
    writer.add_context_length(arch.max_position_embeddings)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_block_count(arch.num_layers)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_rope_freq_base(arch.rope.theta)
    writer.add_layer_norm_rms_eps(arch.rms_norm_eps)
    writer.add_vocab_size(arch.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(0)  # everything in float32
    heads = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads} if architecture == "llama" else {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name == "lm_head.weight" and arch.tie_word_embeddings:
                    continue
                own_name, kind = _gguf_name(name)
                values = file.get_tensor(name).float()
                if kind in heads:
                    values = permute(values, heads[kind])
                writer.add_tensor(own_name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> tuple[str, str]:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight` and `attn_q`."""
    stem, _, suffix = name.rpartition(".")
    layer = ""
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
    for kind, known in (LAYER_NAMES if layer else WHOLE_NAMES).items():
        if known == stem:
            return (f"blk.{layer}." if layer else "") + f"{kind}.{suffix}", kind
    raise ValueError(f"tensor {name} has no place in a GGUF file")


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves apart (Hugging Face's rope) to pairs side by side (llama.cpp's).

    `weight` [num_heads * head_dim, ...] → the same shape.
    """
    halves = weight.view(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
