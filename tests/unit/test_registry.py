"""Reading config.json: both formats, defaults, and every refusal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.models.registry import load_arch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write(path: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_older_format_and_defaults(tmp_path: Path) -> None:
    arch = load_arch(write(tmp_path))
    assert (arch.head_dim, arch.rope.theta, arch.torch_dtype, arch.tie_word_embeddings) == (
        16,
        1000.0,
        "bfloat16",
        False,
    )
    assert (arch.attention_bias, arch.output_bias, arch.qk_norm, arch.rope.kind) == (False, False, False, "default")
    assert load_arch(write(tmp_path, num_key_value_heads="absent")).num_kv_heads == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": "absent", "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    ],
)
def test_rope_in_both_formats(tmp_path: Path, changes: dict[str, Any]) -> None:
    rope = load_arch(write(tmp_path, **changes)).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 1000.0)


def test_yarn_extends_the_window(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert load_arch(write(tmp_path, rope_scaling=scaling)).max_position_embeddings == 16384


def test_families_differ_where_they_should(tmp_path: Path) -> None:
    qwen2 = load_arch(write(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = load_arch(write(tmp_path, architectures=["Qwen3ForCausalLM"]))
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_end_tokens_of_both_files_are_joined(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[7, 2])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_arch(tmp_path).eos_token_ids == (7, 2, 9)
    assert load_arch(write(tmp_path, eos_token_id=None)).eos_token_ids == (2, 9)


SLIDING = {"sliding_window": 1024}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}


@pytest.mark.parametrize(
    ("changes", "max_model_len"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, None),
        ({"architectures": ["MistralForCausalLM"], **SLIDING}, 1024),
        (SLIDING, None),
        (QWEN2, None),
        (QWEN2 | {"use_sliding_window": False}, None),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
    ],
)
def test_a_sliding_window_out_of_force_is_accepted(
    tmp_path: Path, changes: dict[str, Any], max_model_len: int | None
) -> None:
    load_arch(write(tmp_path, **changes), max_model_len)


@pytest.mark.parametrize(
    ("changes", "max_model_len"),
    [
        ({"architectures": ["MistralForCausalLM"], **SLIDING}, None),
        ({"architectures": ["MistralForCausalLM"], **SLIDING}, 1025),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, None),
    ],
)
def test_a_sliding_window_in_force_is_refused_with_the_length_that_is_allowed(
    tmp_path: Path, changes: dict[str, Any], max_model_len: int | None
) -> None:
    with pytest.raises(ValueError, match="--max-model-len 1024 or less"):
        load_arch(write(tmp_path, **changes), max_model_len)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": "absent", "model_type": "mamba"}, "model_type mamba"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*supported types: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of head_dim"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"vocab_size": "absent"}, "has no 'vocab_size'"),
        ({"num_key_value_heads": 3}, "4 query heads, 3 KV heads"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn.*supported: float32"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_arch(write(tmp_path, **changes))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_arch(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        load_arch(tmp_path)


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, oasis_tp.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
