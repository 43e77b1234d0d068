"""The whole engine against transformers on tiny random models of every family: prefill in chunks, then decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams
from tests.dist.ranks import run_on_ranks
from tests.tiny import FAMILIES, make_tiny

NUM_TOKENS = 64
PROMPT = [3 + (17 * i * i + 5 * i) % 300 for i in range(75)]
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "llama31": ("llama", {"rope_parameters": ROPE_LLAMA3, "tie_word_embeddings": True}),
    "one_kv_head": ("qwen3", {"num_key_value_heads": 1}),
}
# Ranks that share a KV head run dense only.
CASES = [
    (name, mode, size)
    for name in MODELS
    for mode in ("dense", "resolve")
    for size in (1, 2, 3)
    if size == 1 or mode == "dense" or name != "one_kv_head"
]
MODES: dict[str, dict[str, Any]] = {"dense": {"attention": "dense"}, "resolve": {"budget_tokens": 512}}


def run_engine(model_dir: Path, mode: str) -> dict[str, Any]:
    llm = LLM(str(model_dir), max_num_seqs=2, max_num_batched_tokens=34, **MODES[mode])
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    output = llm.generate(PROMPT, sampling)[0].outputs[0]
    return {"ids": output.token_ids, "logprobs": [token.logprob for token in output.logprobs]}


def run_rank(rank: int, size: int, root: Path) -> None:
    for name, mode, wanted in CASES:
        if wanted == size:
            (root / f"{name}-{mode}-{size}-{rank}.json").write_text(json.dumps(run_engine(root / name, mode)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what 2 and 3 ranks made of them."""
    root = tmp_path_factory.mktemp("models")
    for name, (family, overrides) in MODELS.items():
        make_tiny(family, root / name, seed=3, **overrides)
    for size in (2, 3):
        run_on_ranks(size, root / f"store{size}", run_rank, size, root)
    return root


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, dict[str, Any]]:
    """transformers' greedy tokens and their logprobs."""
    from transformers import AutoModelForCausalLM

    result = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            logprobs = torch.log_softmax(model(whole).logits[0, len(PROMPT) - 1 : -1].float(), -1)
        ids = whole[0, len(PROMPT) :]
        assert ids.unique().numel() >= 20
        result[name] = {"ids": ids.tolist(), "logprobs": logprobs.gather(1, ids[:, None])[:, 0].tolist()}
    return result


@pytest.mark.parametrize(("name", "mode", "size"), CASES)
def test_greedy_tokens_and_logprobs_of_transformers(
    name: str, mode: str, size: int, root: Path, expected: dict[str, dict[str, Any]]
) -> None:
    if size == 1:
        got = run_engine(root / name, mode)
    else:
        got = json.loads((root / f"{name}-{mode}-{size}-0.json").read_text())
    assert got["ids"] == expected[name]["ids"]
    assert got["logprobs"] == pytest.approx(expected[name]["logprobs"], abs=1e-4)


def refused(rank: int, model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"--attention resolve: 2 ranks share 1 KV heads.*--attention dense"):
        LLM(str(model_dir), comm="gloo")


def test_resolve_is_refused_where_ranks_share_a_kv_head(root: Path, tmp_path: Path) -> None:
    run_on_ranks(2, tmp_path / "store", refused, root / "one_kv_head")
