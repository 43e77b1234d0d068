"""What a checkpoint's config.json says, in one form for every supported family. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasis_tp.nn.rope_config import ROPE_KINDS, RopeConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArch:
    """The shape of one decoder; sizes are the whole model's, not a rank's."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    """Biases on the q, k and v projections."""
    output_bias: bool
    """A bias on the attention's output projection."""
    qk_norm: bool
    """RMS norm over head_dim on q and k, before rope."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    """The model's window in tokens; with yarn the extended one."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Union of config.json and generation_config.json, in that order."""
    torch_dtype: str
    """The checkpoint's own type, one of DTYPES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Where the families differ. `qkv_bias` and `output_bias`: fixed, or None = as config key `attention_bias` says."""

    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool = False
    sliding_window: str
    """never: the key is not used; always: whenever it is set; switched: when `use_sliding_window` is true."""
    head_dim: int | None = None
    """Default where config.json names none. None: hidden_size / num_heads."""


FAMILIES = {
    "LlamaForCausalLM": _Family(qkv_bias=None, output_bias=None, sliding_window="never"),
    "MistralForCausalLM": _Family(qkv_bias=False, output_bias=False, sliding_window="always"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False, sliding_window="switched"),
    "Qwen3ForCausalLM": _Family(qkv_bias=None, output_bias=None, qk_norm=True, sliding_window="switched", head_dim=128),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-text ids named by config.json and generation_config.json, without repeats; empty if neither names one."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = model_dir / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def load_arch(model_dir: Path, max_model_len: int | None = None, *, read_as: str | None = None) -> ModelArch:
    """Read `model_dir/config.json` as older checkpoints and as transformers 5 write it.

    `max_model_len` is the longest sequence that will be run, in tokens (None: the model's own window); a sliding
    window no shorter than that changes nothing and is accepted. `read_as` is an architecture that counts in place of
    the one config.json names (draft heads name themselves in many ways).

    Raises:
        ValueError: an architecture, rope type, sliding window or other feature that is not supported; a key missing.
    """
    path = model_dir / "config.json"
    config = read_json(path)

    def need(key: str) -> int:
        if config.get(key) is None:
            raise ValueError(f"{path} has no {key!r}")
        return int(config[key])

    architecture = read_as or (config.get("architectures") or [f"model_type {config.get('model_type')}"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ValueError(f"{path}: architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    refused = {
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "mlp_bias": not config.get("mlp_bias"),
        "quantization_config": not config.get("quantization_config"),
        "partial_rotary_factor": (config.get("partial_rotary_factor") or 1.0) == 1.0,
    }
    for key, ok in refused.items():
        if not ok:
            raise ValueError(f"{path}: {key} = {config[key]!r} is not supported")

    hidden_size, num_heads, num_layers = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or family.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"{path}: {num_heads} query heads, {num_kv_heads} KV heads, head_dim {head_dim}; query heads must be a "
            "multiple of KV heads, and head_dim even"
        )
    rope = _read_rope(path, config, need("max_position_embeddings"))
    window = need("max_position_embeddings")
    if rope.kind == "yarn":
        window = max(window, int(rope.original_max_position_embeddings * rope.factor))
    _check_sliding_window(path, config, family, num_layers, max_model_len or window)
    attention_bias = bool(config.get("attention_bias"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return ModelArch(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=window,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=read_eos_token_ids(model_dir),
        torch_dtype=dtype,
    )


def _read_rope(path: Path, config: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (older)."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, dict) for value in found.values()):
        raise ValueError(f"{path}: rope {found!r} is not supported; supported types: {', '.join(ROPE_KINDS)}")
    if (found.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"{path}: rope on a part of head_dim is not supported: {found!r}")
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = int(
        config.get("original_max_position_embeddings")
        or found.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}[kind]
    missing = [key for key in required if found.get(key) is None]
    if missing:
        raise ValueError(f"{path}: rope type {kind!r} needs {', '.join(missing)}; found {found!r}")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
    given = {key: float(found[key]) for key in (*optional, "mscale_all_dim") if found.get(key) is not None}
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(found.get("factor") or max_position_embeddings / original),
        original_max_position_embeddings=original,
        truncate=bool(found.get("truncate", True)),
        **given,
    )


def _check_sliding_window(
    path: Path, config: dict[str, Any], family: _Family, num_layers: int, max_model_len: int
) -> None:
    window = config.get("sliding_window")
    if family.sliding_window == "never" or not window:
        return
    if family.sliding_window == "switched":
        if not config.get("use_sliding_window", False):
            return
        kinds = config.get("layer_types")
        first_sliding = config.get("max_window_layers", 28)
        if "sliding_attention" not in kinds if kinds else first_sliding >= num_layers:
            return
    if window < max_model_len:
        raise ValueError(
            f"{path}: the model attends a sliding window of {window} tokens, which is not supported for sequences up "
            f"to {max_model_len} tokens; --max-model-len {window} or less is allowed"
        )
