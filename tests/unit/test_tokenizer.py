"""Tokenizer files, chat templates, and the tokenizer rebuilt from SmolLM2's GGUF file."""

import json
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.bench.agreement import model_dir
from oasis_tp.llm import LLM
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.tokenizer import Tokenizer, load_tokenizer
from oasis_tp.request import SamplingParams
from tests.tiny import make_tiny

TEXTS = ["the dog", " leading and trailing ", "12345 and 6.7\n\n\tx", "naïve café — 東京 🦊", "", "<|im_end|>\r\n"]
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))


def change_config(source: Path, target: Path, **changes: Any) -> Path:
    """The tokenizer of `source` without its template file, with changes to tokenizer_config.json."""
    config = json.loads((source / "tokenizer_config.json").read_text()) | changes
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tiny_dir: Path, smollm2: Tokenizer, text: str) -> None:
    for tokenizer in (load_tokenizer(tiny_dir), smollm2):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert all(0 <= index < tokenizer.vocab_size for index in ids)


def test_special_tokens_are_single_ids_and_can_be_skipped(smollm2: Tokenizer) -> None:
    assert [smollm2.encode(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.vocab_size == 49152
    assert smollm2.decode(smollm2.encode("a<|im_end|>b")) == "ab"


def test_smollm2_cuts_numbers_into_digits_and_words_at_spaces(smollm2: Tokenizer) -> None:
    pieces = [smollm2.decode([index]) for index in smollm2.encode("The number is 40712.")]
    assert pieces == ["The", " number", " is", " ", "4", "0", "7", "1", "2", "."]


def test_smollm2_chat_template(smollm2: Tokenizer) -> None:
    assert smollm2.apply_chat_template(MESSAGES) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.apply_chat_template(MESSAGES, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_template_is_found_in_each_place(tiny_dir: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tiny_dir).apply_chat_template(MESSAGES).startswith("<|im_start|>system\nBe kind.")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert load_tokenizer(change_config(tiny_dir, tmp_path, chat_template=named)).chat_template == "yes"
    assert load_tokenizer(change_config(tiny_dir, tmp_path, chat_template="text")).chat_template == "text"
    assert load_tokenizer(tmp_path, chat_template="given").chat_template == "given"
    none = load_tokenizer(change_config(tiny_dir, tmp_path, chat_template=None))
    with pytest.raises(ValueError, match="no chat template; give one with --chat-template"):
        none.apply_chat_template(MESSAGES)


def test_template_helpers(tiny_dir: Path, tmp_path: Path) -> None:
    """What models' templates use: loop controls, tojson that does not escape, dates, the special tokens."""
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    special = {"bos_token": {"content": "<|endoftext|>", "lstrip": False}, "chat_template": template}
    tokenizer = load_tokenizer(change_config(tiny_dir, tmp_path, **special))
    messages = [{"role": "system", "content": "<é>"}, MESSAGES[1]]
    expected = '<|endoftext|>{"role": "system", "content": "<é>"}4<|im_end|>'
    assert tokenizer.apply_chat_template(messages) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template fails"),
        ("{{ messages.append(1) }}", "chat template fails"),
        ("{{ ().__class__.__bases__[0].__subclasses__() }}", "chat template fails"),
        ("{{ messages[0]['content'] + 1 }}", "chat template fails"),
    ],
)
def test_a_template_that_refuses_breaks_or_escapes_is_an_error(tiny_dir: Path, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tiny_dir, chat_template=template).apply_chat_template(MESSAGES)


def test_missing_and_broken_files(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    change_config(tiny_dir, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_random_weights_need_no_tokenizer_where_prompts_are_token_ids() -> None:
    with model_dir() as directory:
        llm = LLM(str(directory), load_format="dummy", device_kv_gb=0.01, host_kv_gb=0.02, max_num_seqs=1)
    output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0.0))[0].outputs[0]
    assert (len(output.token_ids), output.text) == (3, "")
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate("text", SamplingParams(max_tokens=3))
    llm.close()
