"""Shapes of answers as `/openapi.json` declares them. The routes build plain dicts; tests hold them to these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from oasis_tp.request import FinishReason


class _Shape(BaseModel):
    """Every field that is sent is declared."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Shape):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    """The field that is to blame, with dots between levels."""
    code: str | None


class ErrorReply(_Shape):
    error: ErrorDetail


class PromptDetails(_Shape):
    cached_tokens: int


class Usage(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(_Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    """None for a prompt's first token, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(_Shape):
    index: int
    finish_reason: FinishReason | None
    kv: dict[str, Any] | None = None
    """On request (`return_kv_stats`): what the KV tiers did."""


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class _Reply(_Shape):
    id: str
    created: int
    model: str
    usage: Usage


class CompletionReply(_Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatMessage(_Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatToken(_Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenReport(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(_Shape):
    content: list[ChatTokenReport]


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatReply(_Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(_Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Shape):
    object: Literal["list"]
    data: list[Model]


class Version(_Shape):
    version: str


class TokenizeReply(_Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(_Shape):
    prompt: str


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "What the client can mend."},
    "5XX": {"model": ErrorReply, "description": "The engine has failed, or the server is shutting down."},
}
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": EVENT}}}
"""What a request with `stream: true` gets: chunks as JSON in `data`, then `[DONE]`."""
