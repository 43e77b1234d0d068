"""Text to token ids and back, and a model's own chat template."""

import datetime
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from oasis_tp.models.registry import read_eos_token_ids, read_json


class Tokenizer:
    """A tokenizer.json with what the files beside it say. `backend` is the raw `tokenizers.Tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        template_tokens: dict[str, str],
    ) -> None:
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.template_tokens = template_tokens  # bos_token, eos_token, …: what templates may name

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` false for text that brings its own, as a rendered chat template does."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text for a conversation; encode it with `add_special_tokens=False`.

        Raises:
            ValueError: the model has no template, the template is broken, or it refuses these messages.
        """
        import jinja2

        if self.chat_template is None:
            raise ValueError("the model has no chat template; give one with --chat-template")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.template_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template fails on these messages: {error}") from error

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        assert self.chat_template is not None

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.chat_template)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As templates expect it: not escaped for HTML, unlike jinja2's own."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def read_template(path: str | None) -> str | None:
    """The text of --chat-template. Raises: ValueError: the file cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: {error}") from error


def load_tokenizer(model_dir: Path, chat_template: str | None = None) -> Tokenizer:
    """Read tokenizer.json and, where they exist, tokenizer_config.json and chat_template.jinja.

    `chat_template` (the text, not a file) takes the place of the model's own.

    Raises:
        ValueError: tokenizer.json is missing or broken.
    """
    path, config_path = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no tokenizer.json; other tokenizer formats are not read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception, nothing narrower
        raise ValueError(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = read_json(config_path) if config_path.is_file() else {}
    tokens = {key: _content(value) for key, value in config.items() if key.endswith("_token") and value}
    eos = read_eos_token_ids(model_dir)
    if "eos_token" in tokens and (own := backend.token_to_id(tokens["eos_token"])) is not None:
        eos = tuple(dict.fromkeys((*eos, own)))
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        chat_template=chat_template if chat_template is not None else _find_template(model_dir, config),
        template_tokens={key: value for key, value in tokens.items() if isinstance(value, str)},
    )


def empty_tokenizer(model_dir: Path) -> Tokenizer:
    """For programs that give and take token ids alone: it has no tokens, so no text is any, and they are no text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    eos = read_eos_token_ids(model_dir)
    return Tokenizer(backend, eos_token_ids=eos, chat_template=None, template_tokens={})


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token


def _find_template(model_dir: Path, config: dict[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name, as some repositories have
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
