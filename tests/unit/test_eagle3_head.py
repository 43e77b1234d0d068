"""The EAGLE-3 head: names and shapes of public checkpoints, refusals, and its maths as published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oasis_tp.comm import TpGroup
from oasis_tp.draft.eagle3_head import Eagle3Head, HeadConfig, load_head, load_head_config
from oasis_tp.models.registry import load_arch
from oasis_tp.nn.ops import Place
from tests.eagle3_reference import head_states, next_token
from tests.tiny import make_tiny, make_tiny_eagle3

CPU = torch.device("cpu")

# config.json and weights as published, for Llama-3.1-8B-Instruct and for Qwen3-8B.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 128256, "draft_vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"], "intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1000000, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "attention_bias": False,
    "rope_scaling": None, "draft_vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
PUBLISHED = {
    "fc.weight": (4096, 12288),
    "lm_head.weight": (32000, 4096),
    "norm.weight": (4096,),
    "midlayer.hidden_norm.weight": (4096,),
    "midlayer.input_layernorm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096),
    "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
}


def make_head(config: HeadConfig, hidden: int, device: torch.device = CPU) -> Eagle3Head:
    return Eagle3Head(
        config, hidden, lambda ids: torch.zeros(len(ids), hidden), TpGroup.single(device),
        Place(torch.float32, device), max_model_len=64,
    )  # fmt: skip


def target_arch(path: Path, family: str, **config: Any) -> Any:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [family], **config}))
    return load_arch(path)


@pytest.mark.parametrize(
    ("published", "family", "layers"), [(LLAMA, "LlamaForCausalLM", 32), (QWEN, "Qwen3ForCausalLM", 36)]
)
def test_names_and_shapes_of_public_heads(tmp_path: Path, published: dict[str, Any], family: str, layers: int) -> None:
    target = target_arch(
        tmp_path / "target", family,
        **(published | {"architectures": [family], "num_hidden_layers": layers, "max_position_embeddings": 40960}),
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_head_config(tmp_path, target)
    assert config.feature_layers == {32: (2, 16, 29), 36: (2, 18, 33)}[layers]
    head = make_head(config, 4096, torch.device("meta"))
    width = published["intermediate_size"]
    expected = {n: tuple(width if size == 14336 else size for size in shape) for n, shape in PUBLISHED.items()}
    assert {name: tuple(tensor.shape) for name, tensor in head.weights().items()} == expected


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=7)


def load(path: Path, target: Path) -> Eagle3Head:
    head = make_head(load_head_config(path, load_arch(target)), 144)
    load_head(head, path)
    return head


def test_every_way_a_head_is_stored(target: Path, tmp_path: Path) -> None:
    """safetensors and pickled weights, `midlayer` and `layers.0`, with and without `model.`."""
    plain = make_tiny_eagle3(target, tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    expected = load(plain, target)
    for name, renamed in (
        ("pickled", tensors),
        ("layers", {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}),
        (
            "prefixed",
            {f"model.{key}" if key.startswith(("mid", "fc", "norm")) else key: tensors[key] for key in tensors},
        ),
    ):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text((plain / "config.json").read_text())
        if name == "pickled":
            torch.save(renamed, path / "pytorch_model.bin")
        else:
            save_file(renamed, path / "model.safetensors")
        got = load(path, target)
        for key, tensor in expected.weights().items():
            assert torch.equal(got.weights()[key], tensor) and torch.equal(tensor, tensors[key])
        assert torch.equal(got.to_target, tensors["d2t"] + torch.arange(60))


def test_a_head_with_an_embedding_of_its_own_uses_it(target: Path, tmp_path: Path) -> None:
    path = make_tiny_eagle3(target, tmp_path / "head")
    tensors = load_file(path / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.randn(311, 144)
    save_file(tensors, path / "model.safetensors")
    head = load(path, target)
    assert torch.equal(head.embed(torch.tensor([3, 310])), tensors["embed_tokens.weight"][[3, 310]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE-3 head for this model has 1"),
        ({"vocab_size": 400}, "vocab_size is 400; an EAGLE-3 head for this model has 311"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128; an EAGLE-3 head for this model has 144"),
        ({"norm_before_fc": True}, "norm_before_fc = True is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"features of layers \[1, 2\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, r"features of layers \[2, 3, 7\]"),
    ],
)
def test_heads_of_other_models_are_refused(target: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = make_tiny_eagle3(target, tmp_path / "head", **change)
    with pytest.raises(ValueError, match=f"--spec-model .*{message}"):
        load_head_config(path, load_arch(target))


def test_feature_layers_that_a_checkpoint_names(target: Path, tmp_path: Path) -> None:
    arch = load_arch(target)
    for index, (change, layers) in enumerate(
        (
            ({}, (2, 3, 4)),
            ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, (2, 4, 6)),
        )
    ):
        path = make_tiny_eagle3(target, tmp_path / str(index), **change)
        assert load_head_config(path, arch).feature_layers == layers


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fc.weight", None, "missing weights of an EAGLE-3 head: fc.weight"),
        ("midlayer.self_attn.q_norm.weight", torch.ones(32), "unknown weights .*q_norm"),
        ("norm.weight", torch.ones(7), r"norm.weight has shape \[7\], an EAGLE-3 head for this model has \[144\]"),
        ("d2t", None, "no d2t, and 60 draft tokens stand for 311"),
        ("d2t", torch.full((60,), 300), "d2t names tokens outside"),
        ("t2d", torch.ones(311, dtype=torch.bool), "d2t and t2d name different tokens"),
    ],
)
def test_broken_heads_are_refused(
    target: Path, tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    path = make_tiny_eagle3(target, tmp_path / "head")
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"--spec-model .*{message}"):
        load(path, target)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_head_equals_its_published_description(target: Path, tmp_path: Path, norm_before_residual: bool) -> None:
    path = make_tiny_eagle3(target, tmp_path / "head", norm_before_residual=norm_before_residual)
    tensors = load_file(path / "model.safetensors")
    head = load(path, target)
    table = torch.randn(311, 144)
    head.embedding = table
    torch.manual_seed(5)
    tokens, features = torch.randint(0, 311, (13,)), torch.randn(13, 3 * 144)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        return out.transpose(0, 1)

    got = head.forward(tokens, head.fc(features), torch.arange(13), attend)
    expected = head_states(tensors, table, tokens.tolist(), features, norm_before_residual=norm_before_residual)
    assert torch.allclose(got, expected, atol=1e-4)
    drafts = head.draft(got).tolist()
    assert drafts == [next_token(tensors, state) for state in expected]
    assert len(set(drafts)) > 5
