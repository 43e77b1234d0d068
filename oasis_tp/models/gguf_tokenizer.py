"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONTROL, USER_DEFINED = 3, 4
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_NUMBERS_REST = (
    CONTRACTIONS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How one value of `tokenizer.ggml.pre` cuts text before BPE."""

    pattern: str | None = None
    """Regular expression of one piece. None: GPT-2's own."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is itself in the vocabulary is taken whole."""
    add_bos: bool = False
    """Default where the file has no `tokenizer.ggml.add_bos_token`."""


LLAMA3 = _Splitting(WORDS_NUMBERS_REST.format(digits=r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
QWEN2 = _Splitting(WORDS_NUMBERS_REST.format(digits=r"\p{N}"), nfc=True)
SPLITTINGS = {
    "default": _Splitting(),
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": _Splitting(TEKKEN, ignore_merges=True, add_bos=True),
}


def write_tokenizer(gguf_path: Path, fields: dict[str, Any], target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) to `target`.

    Byte-level BPE is rebuilt from the file; for any other kind a tokenizer.json beside the GGUF file is taken.

    Raises:
        ValueError: the kind cannot be rebuilt and there is no tokenizer.json beside the file.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    tokens = fields.get("tokenizer.ggml.tokens") or []
    beside = gguf_path.with_name("tokenizer.json")
    if kind == "gpt2" and pre in SPLITTINGS:
        build_bpe(fields, SPLITTINGS[pre]).save(str(target / "tokenizer.json"))
    elif beside.is_file():
        shutil.copyfile(beside, target / "tokenizer.json")
    else:
        raise ValueError(
            f"{gguf_path}: tokenizer {kind!r} with pre-tokenizer {pre!r} cannot be rebuilt (only byte-level BPE with "
            f"{', '.join(SPLITTINGS)}); put the model's tokenizer.json beside the file"
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            config[f"{role}_token"] = tokens[index]
    if fields.get("tokenizer.chat_template"):
        config["chat_template"] = fields["tokenizer.chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build_bpe(fields: dict[str, Any], splitting: _Splitting) -> Tokenizer:
    """A byte-level BPE from `tokenizer.ggml.tokens`, `.token_type` and `.merges`."""
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=splitting.ignore_merges,
        )
    )
    # use_regex is GPT-2's cut: needed exactly where no pattern of its own has cut the text already
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == wanted
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", splitting.add_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
