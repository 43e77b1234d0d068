"""Routes to the model's tokenizer: text to ids, ids to text, and what a remote user of it must know."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from oasis_tp.models.tokenizer import Tokenizer
from oasis_tp.server.protocol import ApiError, Message, StrictModel, TokenId, check_model, plain_messages
from oasis_tp.server.schemas import DetokenizeReply, TokenizeReply


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages to be put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages (a chat template brings its own)."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenizer_routes(tokenizer: Tokenizer, names: Sequence[str], max_model_len: int) -> APIRouter:
    """The routes, in the shapes that vLLM gave them (lm-eval's remote tokenizer speaks these)."""
    router = APIRouter()

    @router.post("/tokenize", response_model=TokenizeReply)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_model(body.model, names)
        text, special = body.prompt, True
        if body.messages is not None:
            try:
                text = tokenizer.apply_chat_template(plain_messages(body.messages), body.add_generation_prompt)
            except ValueError as error:
                raise ApiError(400, str(error), param="messages") from error
            special = False
        special = special if body.add_special_tokens is None else body.add_special_tokens
        assert text is not None
        ids = await asyncio.to_thread(tokenizer.encode, text, special)
        names_of_ids = [tokenizer.backend.id_to_token(token) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names_of_ids}

    @router.post("/detokenize", response_model=DetokenizeReply)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(body.model, names)
        unknown = [token for token in body.tokens if tokenizer.backend.id_to_token(token) is None]
        if unknown:
            raise ApiError(400, f"token id {unknown[0]} is not in the vocabulary", "tokens")
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        eos = [tokenizer.backend.id_to_token(token) for token in tokenizer.eos_token_ids]
        special = {"bos_token": None, "pad_token": None, "unk_token": None, "eos_token": eos[0] if eos else None}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": max_model_len,
            "chat_template": tokenizer.chat_template,
            **special,
            **tokenizer.template_tokens,
        }

    return router
