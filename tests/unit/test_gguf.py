"""GGUF conversion: a checkpoint written as llama.cpp writes it comes back as it was."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oasis_tp.models.gguf_convert import LAYER_NAMES, WHOLE_NAMES, convert_gguf
from oasis_tp.models.gguf_tokenizer import SPLITTINGS, build_bpe
from oasis_tp.models.registry import load_arch
from oasis_tp.models.tokenizer import load_tokenizer
from tests.tiny import make_tiny

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
F32, F16, BF16, Q8_0 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0"))


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head's first half goes to 2 i, of its second half to 2 i + 1, as llama.cpp's rope wants it."""
    head_dim = weight.shape[0] // num_heads
    order = [
        h * head_dim + half * head_dim // 2 + i
        for h in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def gguf_name(name: str) -> str:
    parts, suffix = name.rsplit(".", 1)
    if parts.startswith("model.layers."):
        index, rest = parts.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}." + {v: k for k, v in LAYER_NAMES.items()}[rest] + "." + suffix
    return {v: k for k, v in WHOLE_NAMES.items()}[parts] + "." + suffix


def write_gguf(
    source: Path,
    path: Path,
    *,
    quantisation: gguf.GGMLQuantizationType = F32,
    pre: str = "gpt-2",
    model: str = "gpt2",
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A checkpoint of tests.tiny as a GGUF file; `extra` are further keys of the architecture's section."""
    arch = load_arch(source)
    section = arch.architecture.removesuffix("ForCausalLM").lower().replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, section)
    writer.add_context_length(512)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_block_count(arch.num_layers)
    writer.add_feed_forward_length(arch.intermediate_size)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_rope_freq_base(arch.rope.theta)
    writer.add_layer_norm_rms_eps(arch.rms_norm_eps)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{section}.{key}", value)
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        for kind, heads in (("q_proj", arch.num_heads), ("k_proj", arch.num_kv_heads)):
            if section == "llama" and kind in name:
                values = interleave(values, heads)
        kind = quantisation if values.ndim > 1 else F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> Path:
    target = path.with_suffix("")
    target.mkdir()
    convert_gguf(path, target)
    return target


def tensors_of(model_dir: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in model_dir.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_every_family_comes_back_as_it_was(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    source = make_tiny(family, tmp_path / "source", **SIZES, **overrides)
    target = converted(write_gguf(source, tmp_path / "model.gguf"))
    expected, found = load_file(source / "model.safetensors"), tensors_of(target)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    arch, wanted = load_arch(target), load_arch(source)
    assert arch.eos_token_ids == (2, 1)
    assert arch.rms_norm_eps == pytest.approx(wanted.rms_norm_eps, rel=1e-6)
    same = ("num_heads", "num_kv_heads", "head_dim", "vocab_size", "attention_bias", "output_bias", "qk_norm", "rope")
    for field in (*same, "tie_word_embeddings", "max_position_embeddings", "bos_token_id", "torch_dtype"):
        assert getattr(arch, field) == getattr(wanted, field), field


@pytest.mark.parametrize(
    ("quantisation", "dtype"), [(F16, torch.float16), (BF16, torch.bfloat16), (Q8_0, torch.float32)]
)
def test_the_type_keeps_every_value_exactly(
    quantisation: gguf.GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = make_tiny("qwen3", tmp_path / "source", **SIZES)
    target = converted(write_gguf(source, tmp_path / "model.gguf", quantisation=quantisation))
    name = "model.layers.0.mlp.down_proj.weight"
    original = load_file(source / "model.safetensors")[name].numpy()
    stored = gguf.quants.dequantize(gguf.quants.quantize(original, quantisation), quantisation)
    found = tensors_of(target)
    assert found[name].dtype == dtype
    assert torch.equal(found[name].float(), torch.from_numpy(stored))
    assert found["model.norm.weight"].dtype == torch.float32
    assert load_arch(target).torch_dtype == str(dtype).removeprefix("torch.")


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oasis_tp.models.gguf_convert.SHARD_BYTES", 50_000)
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    target = converted(write_gguf(source, tmp_path / "model.gguf"))
    assert len(list(target.glob("*.safetensors"))) > 3
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == load_file(source / "model.safetensors").keys()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_read_from_its_divisors(tmp_path: Path, factor: float) -> None:
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    turns = 8192 / 10000.0 ** (np.arange(8) / 8) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    path = write_gguf(source, tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": divisors})
    rope = load_arch(converted(path)).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("llama3", factor, 8192)
    other = write_gguf(source, tmp_path / "other.gguf", extra_tensors={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ValueError, match=r"divisors in rope_freqs\.weight are not those of Llama 3"):
        converted(other)


def test_rope_scaling_and_sliding_window_keys(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    rope = load_arch(converted(write_gguf(source, tmp_path / "yarn.gguf", extra=yarn))).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    rope = load_arch(converted(write_gguf(source, tmp_path / "linear.gguf", extra=linear))).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)
    window = write_gguf(source, tmp_path / "window.gguf", extra={"attention.sliding_window": 64})
    with pytest.raises(ValueError, match="--max-model-len 64 or less"):
        load_arch(converted(window))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"rope.scaling.type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ({"extra": {"expert_count": 8}}, "mixture-of-experts"),
        ({"extra": {"attention.value_length": 8}}, "value_length 8"),
        ({"extra_tensors": {"blk.0.odd.weight": np.zeros(4, np.float32)}}, r"blk\.0\.odd\.weight has no place"),
        ({"model": "llama"}, r"'llama'.*put the model's tokenizer\.json beside the file"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of' cannot be rebuilt"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    with pytest.raises(ValueError, match=message):
        converted(write_gguf(source, tmp_path / "model.gguf", **changes))


def test_other_architectures_and_broken_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'mamba' is not supported; supported: llama, qwen2, qwen3"):
        converted(tmp_path / "other.gguf")
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    whole = write_gguf(source, tmp_path / "whole.gguf").read_bytes()
    for name, content in {"empty": b"", "noise": b"not a model" * 99, "cut": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as GGUF"):
            converted(tmp_path / f"{name}.gguf")


def test_the_rebuilt_tokenizer_gives_the_ids_of_the_original(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    target = converted(write_gguf(source, tmp_path / "model.gguf"))
    original, rebuilt = load_tokenizer(source), load_tokenizer(target)
    for text in ("the quick brown fox, 12345!", "<|im_start|>the  dog's\n\n<|im_end|>", "é 東京"):
        assert rebuilt.encode(text) == original.encode(text)
    assert rebuilt.eos_token_ids == (2, 1)
    assert rebuilt.apply_chat_template([{"role": "user", "content": "x"}]) == "<|endoftext|>x"


def test_a_tokenizer_beside_the_file_serves_where_it_cannot_be_rebuilt(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source", **SIZES)
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    target = converted(write_gguf(source, tmp_path / "model.gguf", model="llama"))
    assert load_tokenizer(target).encode("the dog") == load_tokenizer(source).encode("the dog")


SPLIT_TEXT = "I'LL pay 12345 €\n\n  now_HelloWorld"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " €", "\n\n ", " now", "_", "HelloWorld"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " €", "\n\n ", " now", "_", "HelloWorld"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " €\n\n", " ", " now", "_HelloWorld"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " €\n\n", " ", " now", "_HelloWorld"]),
        ("tekken", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " €\n\n", " ", " now", "_Hello", "World"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(pre: str, pieces: list[str]) -> None:
    tokenizer = build_bpe({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}, SPLITTINGS[pre])
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)]
    assert [SPLIT_TEXT[start:stop] for start, stop in spans] == pieces


def test_whole_pieces_and_composed_letters_where_the_kind_wants_them() -> None:
    fields = {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": []}
    assert build_bpe(fields, SPLITTINGS["gpt-2"]).encode("ab").ids == [0, 1]
    assert build_bpe(fields, SPLITTINGS["llama-bpe"]).encode("ab").ids == [2]
    normalizer = build_bpe(fields, SPLITTINGS["qwen2"]).normalizer
    assert normalizer is not None
    assert normalizer.normalize_str("e\u0301") == "\u00e9"


@pytest.mark.parametrize(("key", "expected"), [(None, [1, 0]), (True, [1, 0]), (False, [0])])
def test_the_first_token_is_added_as_the_file_or_the_kind_says(key: bool | None, expected: list[int]) -> None:
    fields: dict[str, Any] = {
        "tokenizer.ggml.tokens": ["a", "<s>"],
        "tokenizer.ggml.token_type": [1, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
    }
    if key is not None:
        fields["tokenizer.ggml.add_bos_token"] = key
    assert build_bpe(fields, SPLITTINGS["llama-bpe"]).encode("a").ids == expected
