"""GGUF files into the Hugging Face layout: config.json, tokenizer files, safetensors. Needs the `gguf` package."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oasis_tp.models.gguf_tokenizer import write_tokenizer
from oasis_tp.nn.rope_config import RopeConfig
from oasis_tp.nn.rotary import inverse_frequencies

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WHOLE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
SHARD_BYTES = 4 << 30


def convert_gguf(gguf_path: Path, target: Path) -> None:
    """Write the model in `gguf_path` to the existing directory `target`.

    Matrices keep their type where all of them are float16 or all bfloat16; otherwise everything is dequantised to
    float32, so that no value changes.

    Raises:
        ValueError: the file is no readable GGUF, or holds an architecture, rope scaling, tensor, quantisation or
            tokenizer that cannot be converted.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ValueError(f"{gguf_path} cannot be read as GGUF, it may be truncated or damaged: {error}") from error
    fields = _Fields(gguf_path, reader)
    config = _build_config(fields, reader)
    write_tokenizer(gguf_path, fields.values, target)
    _write_tensors(gguf_path, reader, config, target)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Fields:
    """The file's key-value pairs, with keys of the architecture's own section reached without their prefix."""

    def __init__(self, path: Path, reader: "GGUFReader") -> None:
        self.path = path
        self.values: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self.architecture = str(self.values.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path} has no key {self.architecture}.{key}")
        return value


def _build_config(fields: _Fields, reader: "GGUFReader") -> dict[str, Any]:
    if fields.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{fields.path}: GGUF architecture {fields.architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if fields.get("expert_count", 0):
        raise ValueError(f"{fields.path}: mixture-of-experts models are not supported")
    names = {tensor.name for tensor in reader.tensors}
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise ValueError(f"{fields.path} has no tensor token_embd.weight")
    num_heads, hidden_size = int(fields.need("attention.head_count")), int(fields.need("embedding_length"))
    head_dim = int(fields.get("attention.key_length", hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise ValueError(f"{fields.path}: {key} {fields.get(key)} unlike head_dim {head_dim} is not supported")
    architecture = ARCHITECTURES[fields.architecture]
    window = fields.get("attention.sliding_window")
    if window and fields.architecture == "llama":
        architecture = "MistralForCausalLM"  # the same tensors; the family whose window is in force
    tokens = "tokenizer.ggml."
    eos = (fields.values.get(f"{tokens}{kind}_token_id") for kind in ("eos", "eot", "eom"))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": hidden_size,
        "intermediate_size": int(fields.need("feed_forward_length")),
        "num_hidden_layers": int(fields.need("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields.get("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": int(embedding.shape[1]),
        "max_position_embeddings": int(fields.need("context_length")),
        "rms_norm_eps": float(fields.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fields.get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_output.bias" in names,
        "bos_token_id": fields.values.get(f"{tokens}bos_token_id"),
        "eos_token_id": list(dict.fromkeys(int(token) for token in eos if token is not None)),
        "torch_dtype": str(_matrix_dtype(reader)).removeprefix("torch."),
    }
    scaling = _rope_scaling(fields, reader, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if window:
        config |= {"sliding_window": int(window), "use_sliding_window": True, "max_window_layers": 0}
    return config


def _rope_scaling(fields: _Fields, reader: "GGUFReader", config: dict[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` entry, from the file's keys or (Llama 3) from its tensor of per-frequency divisors."""
    divisors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    kind = fields.get("rope.scaling.type", "none")
    factor = float(fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0)))
    original = int(fields.get("rope.scaling.original_context_length", config["max_position_embeddings"]))
    if divisors is not None:
        return _llama3_scaling(fields.path, torch.tensor(divisors.copy()), config)
    if kind == "yarn":
        if fields.get("rope.scaling.attn_factor", 1.0) != 1.0 or fields.get("rope.scaling.yarn_log_multiplier"):
            raise ValueError(f"{fields.path}: yarn with an attention factor of its own is not supported")
        betas = {key: fields.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
        given = {key: float(value) for key, value in betas.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | given
    if kind not in ("none", "linear"):
        raise ValueError(f"{fields.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _llama3_scaling(path: Path, divisors: torch.Tensor, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's parameters behind the divisors: all releases share these three, only the factor differs."""
    scaling: dict[str, Any] = {
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, head_dim = config["rope_theta"], config["head_dim"]
    rope = RopeConfig(theta=theta, kind="llama3", **scaling)
    expected = inverse_frequencies(RopeConfig(theta=theta), head_dim)[0] / inverse_frequencies(rope, head_dim)[0]
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(f"{path}: the rope divisors in {ROPE_FACTORS} are not those of Llama 3, not supported")
    return {"rope_type": "llama3"} | scaling


def _matrix_dtype(reader: "GGUFReader") -> torch.dtype:
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return {("F16",): torch.float16, ("BF16",): torch.bfloat16}.get(tuple(kinds), torch.float32)


def _write_tensors(path: Path, reader: "GGUFReader", config: dict[str, Any], target: Path) -> None:
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, target / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _tensors(path, reader, config):
        shard[name] = tensor
        if sum(part.nbytes for part in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(path: Path, reader: "GGUFReader", config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf.quants import dequantize

    matrix_dtype = getattr(torch, config["torch_dtype"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for source in reader.tensors:
        if source.name == ROPE_FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", source.name)
        names = WHOLE_NAMES if match and match[1] is None else LAYER_NAMES
        if match is None or match[2] not in names:
            raise ValueError(f"{path}: tensor {source.name} has no place in {config['architectures'][0]}")
        layer, kind, suffix = match.groups()
        try:
            values = torch.from_numpy(dequantize(source.data, source.tensor_type).copy())
        except NotImplementedError as error:
            raise ValueError(f"{path}: tensor {source.name}: {error}") from error
        shape = tuple(int(size) for size in reversed(source.shape))
        assert math.prod(shape) == values.numel(), (source.name, shape, values.shape)
        values = values.view(shape)
        if kind in heads and config["model_type"] in ("llama", "mistral"):
            values = unpermute(values, heads[kind])
        if values.ndim > 1:
            values = values.to(matrix_dtype)
        yield (f"model.layers.{layer}." if layer is not None else "") + f"{names[kind]}.{suffix}", values


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs side by side (llama.cpp's rope) to halves apart (Hugging Face's).

    `weight` [num_heads * head_dim, ...] → the same shape.
    """
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
