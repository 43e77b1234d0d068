"""Rotary embedding against transformers' frequencies, and its defining property."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oasis_tp.nn.rope_config import RopeConfig
from oasis_tp.nn.rotary import RotaryTable, apply_rotary, inverse_frequencies

CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear", "theta": 1e4, "factor": 4.0},
    "llama3.1": {"kind": "llama3", "theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama3.2": {"kind": "llama3", "theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": {"kind": "yarn", "theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-mscale": {
        "kind": "yarn",
        "theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn-attention-factor": {
        "kind": "yarn",
        "theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "yarn-step": {"kind": "yarn", "theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name: str, head_dim: int) -> None:
    rope = RopeConfig(**CONFIGS[name])
    parameters = {key: value for key, value in CONFIGS[name].items() if key not in ("kind", "theta")}
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters |= {"rope_type": rope.kind, "rope_theta": rope.theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=dict(parameters)
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    inv_freq, factor = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0.0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 32), torch.randn(1, 2, 32)
    table = RotaryTable(RopeConfig(theta=1e4), 32, 200, torch.device("cpu"))

    def scores(q_position: int, k_position: int) -> torch.Tensor:
        turned_q = apply_rotary(q, *table.at(torch.tensor([q_position])))
        turned_k = apply_rotary(k, *table.at(torch.tensor([k_position])))
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(scores(7, 3), scores(190, 186), atol=1e-4, rtol=0.0)
    assert not torch.allclose(scores(7, 3), scores(7, 4), atol=1e-2)


def test_position_zero_changes_nothing_and_type_is_kept() -> None:
    x = torch.randn(1, 3, 16).to(torch.bfloat16)
    table = RotaryTable(RopeConfig(theta=1e4), 16, 4, torch.device("cpu"))
    assert torch.equal(apply_rotary(x, *table.at(torch.tensor([0]))), x)
