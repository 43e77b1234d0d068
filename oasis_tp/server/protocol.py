"""OpenAI's request and response shapes, with ours beside them: limits, errors, and what is refused by name."""

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from oasis_tp.config import SparsityConfig
from oasis_tp.request import FinishReason, SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat answer may fill the window."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields not supported yet, with the values that ask for nothing: those are accepted, all others refused."""


UNION_FIELDS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "content": 'a string, or a list of {"type": "text", "text": …} parts',
    "stop": "a string, or a list of at most 32 strings",
}
"""Fields of several types: what they allow, said at once instead of type by type."""


class ApiError(Exception):
    """An error for the client, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = headers
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": kind, "param": param, "code": self.code}}


def _printable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which JSON can name and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


class StrictModel(BaseModel):
    """Strict types, no unknown fields, no NaN; a null is an absent field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @field_validator("*")
    @classmethod
    def _refuse_surrogates(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and _printable(text) != text for text in texts):
            raise ValueError("holds half of a surrogate pair, which is not text")
        return value


def _sparsity_model() -> type[BaseModel]:
    """Every field of `SparsityConfig`, optional; the hot factor is fixed at start (it sizes the pools)."""
    hints = get_type_hints(SparsityConfig)
    del hints["hot_factor"]
    optional: dict[str, Any] = {name: (Int32 if hint is int else hint, None) for name, hint in hints.items()}
    return create_model("SparsityOverride", __base__=StrictModel, **optional)


SparsityOverride = _sparsity_model()


class StreamOptions(StrictModel):
    include_usage: bool = False


class _Request(StrictModel):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: Int32 | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] = Field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: str | Annotated[list[str], Field(max_length=32)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_kv_stats: bool = False
    sparsity: SparsityOverride | None = None  # type: ignore[valid-type]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in sorted(data.keys() & NEUTRAL.keys()):
            if data[name] is not None and data[name] not in NEUTRAL[name]:
                raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
        return {name: value for name, value in data.items() if name not in NEUTRAL}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """Raises: ApiError: a value outside its range."""
        try:
            return SamplingParams(
                max_tokens=self._max_tokens(),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self._bias(),
                seed=self.seed,
                n=self.n,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                logprobs=self._logprobs(),
                prompt_logprobs=self._prompt_logprobs(),
            )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).split()[0]) from error

    def _bias(self) -> tuple[tuple[int, float], ...]:
        """JSON's keys are strings: token ids, here."""
        for key in self.logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"logit_bias has the key {key!r}; allowed: token ids")
        return tuple((int(key), bias) for key, bias in self.logit_bias.items())

    def sparsity_over(self, base: SparsityConfig) -> SparsityConfig | None:
        """The server's sparsity with this request's changes; None when it brings none."""
        if self.sparsity is None:
            return None
        return dataclasses.replace(base, **self.sparsity.model_dump(exclude_unset=True))

    def _max_tokens(self) -> int | None:
        raise NotImplementedError

    def _logprobs(self) -> int | None:
        raise NotImplementedError

    def _prompt_logprobs(self) -> int | None:
        return None


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    logprobs: int | None = None
    echo: bool = False

    def prompts(self) -> Sequence[str | list[int]]:
        """One entry per prompt. Raises: ApiError: there is none, or one is empty."""
        prompt: Any = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts or not all(prompts):
            raise ApiError(400, "prompt is empty; at least one token is needed", param="prompt")
        return prompts

    def _max_tokens(self) -> int | None:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; allowed: a whole number from 1, or 0 with echo")
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _logprobs(self) -> int | None:
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates want them: content is one string."""
    return [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else "".join(part.text for part in message.content),
        }
        for message in messages
    ]


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def plain_messages(self) -> list[dict[str, str]]:
        """See the function of this name."""
        return plain_messages(self.messages)

    def _max_tokens(self) -> int | None:
        """Both names, the newer one first; each is refused by its own name."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None:
                if value < 1:
                    raise ValueError(f"{name} is {value}; allowed: a whole number from 1")
                return value
        return None

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if not 0 <= (self.top_logprobs or 0) <= 20:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; allowed: 0 to 20")
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenText:
    """One token's text and logprob, in words; `raw` is None when its bytes are no text by themselves.

    A prompt's first token has no logprob: nothing predicted it.
    """

    text: str
    logprob: float | None
    raw: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenReport:
    """A token with its alternatives, most likely first; `offset` counts characters of the choice's text before it."""

    token: TokenText
    top: tuple[TokenText, ...]
    offset: int


def completion_logprobs(reports: list[TokenReport]) -> dict[str, Any]:
    return {
        "tokens": [report.token.text for report in reports],
        "token_logprobs": [report.token.logprob for report in reports],
        "top_logprobs": [_top_by_text(report) for report in reports],
        "text_offset": [report.offset for report in reports],
    }


def _top_by_text(report: TokenReport) -> dict[str, float | None] | None:
    """Of tokens that read alike the likeliest counts."""
    if report.token.logprob is None:
        return None
    return {token.text: token.logprob for token in reversed(report.top)}


def chat_logprobs(reports: list[TokenReport]) -> dict[str, Any]:
    def entry(token: TokenText) -> dict[str, Any]:
        return {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": None if token.raw is None else list(token.raw),
        }

    return {
        "content": [
            entry(report.token) | {"top_logprobs": [entry(token) for token in report.top]} for report in reports
        ]
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one choice gained: text, reported tokens, perhaps its end. A whole choice is one large delta."""

    index: int
    text: str
    reports: list[TokenReport] | None
    finish_reason: FinishReason | None
    kv: dict[str, Any] | None

    def completion(self) -> dict[str, Any]:
        """A choice of /v1/completions, streamed or not."""
        logprobs = None if self.reports is None else completion_logprobs(self.reports)
        return self._choice({"text": self.text, "logprobs": logprobs})

    def chat(self) -> dict[str, Any]:
        """A choice of /v1/chat/completions, not streamed."""
        return self._choice(
            {
                "message": {"role": "assistant", "content": self.text, "refusal": None},
                "logprobs": self._chat_logprobs(),
            }
        )

    def chat_chunk(self) -> dict[str, Any]:
        """A choice of a streamed /v1/chat/completions."""
        delta = {"content": self.text} if self.text else {}
        return self._choice({"delta": delta, "logprobs": self._chat_logprobs()})

    def _chat_logprobs(self) -> dict[str, Any] | None:
        return None if self.reports is None else chat_logprobs(self.reports)

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self.index, **body, "finish_reason": self.finish_reason}
        return choice if self.kv is None else choice | {"kv": self.kv}


def blamed_field(message: str, body: CompletionRequest | ChatRequest) -> str | None:
    """The field of the body that a refusal of the engine begins with, under the name that this route has for it."""
    word = message.split(maxsplit=1)[0]
    name = word.split(".")[0]
    if name == "prompt" and isinstance(body, ChatRequest):
        return "messages"
    if name in SparsityOverride.model_fields:
        return f"sparsity.{name}"
    return word if name in type(body).model_fields else None


def check_model(name: str | None, served: Sequence[str]) -> str:
    """The name an answer carries. Raises: ApiError: it is not among those served."""
    if name is not None and name not in served:
        known = ", ".join(served)
        raise ApiError(404, f"model {name!r} is not served; served: {known}", "model", "model_not_found")
    return name or served[0]


def response_head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What every answer and every chunk begins with."""
    return {"id": prefix + secrets.token_hex(12), "object": kind, "created": int(time.time()), "model": model}


def validation_error(first: Mapping[str, Any]) -> ApiError:
    """One of pydantic's faults in a body, `loc` counted from the body, by the field's name."""
    place = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if not place:
        return ApiError(400, "the body must be a JSON object (Content-Type: application/json)")
    for depth, part in enumerate(place):
        if part in UNION_FIELDS and first["type"] != "value_error":
            param = ".".join(place[: depth + 1])
            return ApiError(400, f"{param} is missing or malformed; allowed: {UNION_FIELDS[part]}", param)
    param = ".".join(place)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param}", param, "unknown_parameter")
    return ApiError(400, f"{param}: {first['msg']}", param)
