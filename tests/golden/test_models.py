"""Our decoder against transformers on tiny random models and on SmolLM2, in float32, at several tensor-parallel sizes.

Greedy tokens are checked by teacher forcing: if the argmax after every prefix of transformers' greedy text is its next
token, greedy decoding gives the same text.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from oasis_tp.comm import TpGroup
from oasis_tp.config import ParallelConfig
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.registry import load_arch
from oasis_tp.models.tokenizer import load_tokenizer
from oasis_tp.models.weights import load_weights
from oasis_tp.nn.ops import Place
from tests.dist.ranks import run_on_ranks
from tests.tiny import make_tiny

TOLERANCE = 1e-4  # float32 sums in another order; logits of the tiny models reach about 15
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 24, 64
MODEL_DIRS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-one-kv-head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-two-kv-heads": (
        "qwen3",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


class DenseCache:
    """Causal dense attention over all it was given so far."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        if layer in self.kv:
            k, v = torch.cat((self.kv[layer][0], k)), torch.cat((self.kv[layer][1], v))
        self.kv[layer] = k, v
        group, past = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(past)
        return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask).transpose(0, 1)


def load_model(model_dir: Path, tp: TpGroup) -> LlamaModel:
    model = LlamaModel(load_arch(model_dir), tp, Place(torch.float32, torch.device("cpu")), max_model_len=512)
    load_weights(model, model_dir)
    return model


def run_whole(model: LlamaModel, token_ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model.forward(token_ids, torch.arange(len(token_ids)), DenseCache().attend))


def reference(model_dir: Path, prompt: torch.Tensor, num_new_tokens: int) -> dict[str, torch.Tensor]:
    """transformers' greedy text after `prompt`, and its logits at every position of it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        token_ids = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=num_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return {"token_ids": token_ids[0], "logits": model(token_ids).logits[0]}


def assert_same(logits: torch.Tensor, expected: dict[str, torch.Tensor], num_prompt_tokens: int) -> None:
    torch.testing.assert_close(logits, expected["logits"], atol=TOLERANCE, rtol=0.0)
    assert logits[num_prompt_tokens - 1 : -1].argmax(-1).tolist() == expected["token_ids"][num_prompt_tokens:].tolist()


def run_rank(rank: int, size: int, root: Path) -> None:
    """All models on one of `size` ranks; rank 0 keeps the logits."""
    tp = TpGroup.connect(ParallelConfig(device="cpu", comm="gloo"))
    with torch.inference_mode():
        for name in MODEL_DIRS:
            model = load_model(root / name, tp)
            shard = run_whole(model, torch.load(root / name / "expected.pt")["token_ids"])
            whole = tp.gather_logits(shard, model.vocab_ranges)
            if whole is not None:
                torch.save(whole, root / name / f"tp{size}.pt")


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(7)
    for name, (family, overrides) in MODEL_DIRS.items():
        make_tiny(family, root / name, **overrides)
        prompt = torch.randint(0, 311, (NUM_PROMPT_TOKENS,), generator=generator)
        torch.save(reference(root / name, prompt, NUM_NEW_TOKENS), root / name / "expected.pt")
    return root


@pytest.fixture(scope="module")
def ranks_done(model_root: Path) -> Path:
    for size in (2, 3):
        run_on_ranks(size, model_root / f"store{size}", run_rank, size, model_root)
    return model_root


@pytest.mark.parametrize("name", MODEL_DIRS)
@torch.inference_mode()
def test_logits_and_greedy_tokens_of_transformers(name: str, model_root: Path) -> None:
    expected: dict[str, torch.Tensor] = torch.load(model_root / name / "expected.pt")
    new_tokens = expected["token_ids"][NUM_PROMPT_TOKENS:].tolist()
    assert len(set(new_tokens)) >= 20, "the text is too dull for the comparison to mean anything"
    model = load_model(model_root / name, TpGroup.single(torch.device("cpu")))
    assert_same(run_whole(model, expected["token_ids"]), expected, NUM_PROMPT_TOKENS)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODEL_DIRS)
def test_logits_and_greedy_tokens_of_transformers_over_ranks(name: str, size: int, ranks_done: Path) -> None:
    """Uneven heads (9/3 at TP 2), odd vocabulary and width, and more ranks than KV heads (1 and 2 of them)."""
    logits = torch.load(ranks_done / name / f"tp{size}.pt")
    assert_same(logits, torch.load(ranks_done / name / "expected.pt"), NUM_PROMPT_TOKENS)


@torch.inference_mode()
def test_chunks_and_single_tokens_give_the_logits_of_one_pass(model_root: Path) -> None:
    token_ids = torch.load(model_root / "qwen3" / "expected.pt")["token_ids"][:40]
    model = load_model(model_root / "qwen3", TpGroup.single(torch.device("cpu")))
    cache, logits, start = DenseCache(), [], 0
    for length in (16, 15, 1, 1, 7):
        positions = torch.arange(start, start + length)
        logits.append(model.logits(model.forward(token_ids[positions], positions, cache.attend)))
        start += length
    torch.testing.assert_close(torch.cat(logits), run_whole(model, token_ids), atol=TOLERANCE, rtol=0.0)


@torch.inference_mode()
def test_smollm2_gives_the_logits_and_greedy_tokens_of_transformers() -> None:
    model_dir = resolve_model("smollm2")
    tokenizer = load_tokenizer(model_dir)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = torch.tensor(tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False))
    expected = reference(model_dir, prompt, 24)
    model = load_model(model_dir, TpGroup.single(torch.device("cpu")))
    assert_same(run_whole(model, expected["token_ids"]), expected, len(prompt))
    answer = tokenizer.decode(expected["token_ids"][len(prompt) :].tolist())
    assert answer.startswith("The capital of France is Paris.")
