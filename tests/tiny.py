"""Tiny random checkpoints of every family, with a usable tokenizer, written as transformers writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# transformers is imported where it is used: spawned ranks import test modules too, and it takes seconds to load.

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog; the magic number is 12345, and the dog is not amused. "


def make_tiny(family: str, path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a tiny random model of `family` (see FAMILIES) with its tokenizer to `path`, and return `path`.

    9 query and 3 KV heads of 16, odd vocabulary and MLP width, 3 layers, a window of 512 tokens; `overrides` are
    config.json keys and win. Weights are large enough that greedy output does not settle on one token at once.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": 311,
        "hidden_size": 144,
        "intermediate_size": 203,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    config = AutoConfig.for_model(family, **(settings | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.normal_(1.5, 0.2)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
    model.to(dtype).save_pretrained(path)
    _write_tokenizer(config.vocab_size, path)
    return path


def _write_tokenizer(vocab_size: int, path: Path) -> None:
    """A byte-level BPE of at most `vocab_size` tokens (at least 259), the special ones first."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)


def make_tiny_eagle3(target: Path, path: Path, *, draft_vocab_size: int = 60, seed: int = 0, **overrides: Any) -> Path:
    """Write a random EAGLE-3 head for the tiny model in `target`, named and shaped as the published heads are.

    4 query and 2 KV heads of 32, so that nothing has the target's shape by accident; `overrides` are config.json keys.
    """
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 101,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": 311,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | overrides
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (draft_vocab_size, hidden),
        "norm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (128, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (64, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (64, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, 128),
        "midlayer.mlp.gate_proj.weight": (101, hidden),
        "midlayer.mlp.up_proj.weight": (101, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 101),
    }
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=rng) * (0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    chosen = torch.randperm(311, generator=rng)[:draft_vocab_size].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(311, dtype=torch.bool).index_fill_(0, chosen, True)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
