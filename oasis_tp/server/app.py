"""The routes: OpenAI's models, completions and chat, and health, metrics and version."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from oasis_tp import __version__
from oasis_tp.config import Config
from oasis_tp.models.tokenizer import Tokenizer
from oasis_tp.request import QueueFullError
from oasis_tp.server.auth import KeyCheck
from oasis_tp.server.body_limit import BodyLimit
from oasis_tp.server.bridge import EngineBridge, EngineDeadError, OutputStream
from oasis_tp.server.generation import Generation, echoes
from oasis_tp.server.metrics import CONTENT_TYPE, Metrics
from oasis_tp.server.protocol import (
    ApiError,
    ChatRequest,
    ChoiceDelta,
    CompletionRequest,
    blamed_field,
    check_model,
    response_head,
    usage,
    validation_error,
)
from oasis_tp.server.schemas import ERRORS, STREAM, ChatReply, CompletionReply, ModelList, Version
from oasis_tp.server.tokens import tokenizer_routes
from oasis_tp.validation import validate_sparsity

RETRY_AFTER_S = 1
"""What a client is told to wait when the queue is full: requests end all the time."""


def create_app(bridge: EngineBridge, tokenizer: Tokenizer, config: Config, api_keys: Sequence[str] = ()) -> FastAPI:
    """The ASGI application over one engine. It starts to receive the engine's outputs when the server starts it.

    Calls to the tokenizer may come from any thread. `api_keys`: clients must send one of them; none: they need not.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bridge.attach()
        yield

    app = FastAPI(title="oasis_tp", version=__version__, lifespan=lifespan, responses=ERRORS)
    metrics = Metrics(bridge)
    names = config.model.served_model_name or (config.model.model,)
    started = int(time.time())
    _add_error_handlers(app)
    app.add_middleware(BodyLimit)
    if api_keys:
        app.add_middleware(KeyCheck, keys=api_keys)
    app.include_router(tokenizer_routes(tokenizer, names, bridge.max_model_len))

    def sse(chunks: AsyncGenerator[dict[str, Any], None]) -> StreamingResponse:
        lines = _lines(chunks, config.server.sse_keep_alive_interval or None)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def start(request: Request, body: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> Generation:
        """Submit a request's prompts; from here on the stream is closed by whoever comes first: end or disconnect."""
        sampling, sparsity = body.sampling(), body.sparsity_over(config.sparsity)
        try:
            if sparsity is not None:
                validate_sparsity(sparsity, config.memory.block_size, lambda name: f"sparsity.{name}")
            stream = bridge.open(prompts, sampling, sparsity)
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)}) from error
        except ValueError as error:
            raise ApiError(400, str(error), blamed_field(str(error), body)) from error
        except EngineDeadError as error:
            raise ApiError(503, str(error), code="engine_dead") from error
        stream.watcher = asyncio.create_task(_close_on_disconnect(request, stream))
        return Generation(
            stream=stream,
            tokenizer=tokenizer.backend,
            sampling=sampling,
            num_prompt_tokens=sum(map(len, prompts)),
            num_choices=len(prompts) * sampling.n,
            return_kv_stats=body.return_kv_stats,
            metrics=metrics,
            arrival=request.state.arrival,
            echoes=echoes(body, prompts, tokenizer.backend),
        )

    async def encode(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """In a worker thread: a long text must not hold up the event loop."""
        return await asyncio.to_thread(lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])

    @app.post("/v1/completions", responses={200: {"model": CompletionReply} | STREAM})
    async def completions(request: Request, body: CompletionRequest) -> Response:
        model = check_model(body.model, names)
        request.state.arrival = time.monotonic()
        prompts = body.prompts()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = await encode(texts, True) if texts else [prompt for prompt in prompts if isinstance(prompt, list)]
        generation = start(request, body, ids)
        head = response_head("cmpl-", "text_completion", model)
        if body.stream:
            return sse(_chunks(generation, head, ChoiceDelta.completion, body.include_usage, []))
        return await _whole(generation, head, ChoiceDelta.completion)

    @app.post("/v1/chat/completions", responses={200: {"model": ChatReply} | STREAM})
    async def chat(request: Request, body: ChatRequest) -> Response:
        model = check_model(body.model, names)
        request.state.arrival = time.monotonic()
        try:
            text = tokenizer.apply_chat_template(body.plain_messages(), add_generation_prompt=True)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        generation = start(request, body, await encode([text], False))
        if body.stream:
            head = response_head("chatcmpl-", "chat.completion.chunk", model)
            roles = [
                {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                for index in range(generation.num_choices)
            ]
            return sse(_chunks(generation, head, ChoiceDelta.chat_chunk, body.include_usage, roles))
        return await _whole(generation, response_head("chatcmpl-", "chat.completion", model), ChoiceDelta.chat)

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> dict[str, Any]:
        common = {"object": "model", "created": started, "owned_by": "oasis_tp", "max_model_len": bridge.max_model_len}
        return {"object": "list", "data": [{"id": name, **common} for name in names]}

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        stats = bridge.stats()
        reason = bridge.dead
        age_s = time.monotonic() - stats.last_step_time
        if reason is None and age_s > config.server.watchdog_timeout:
            reason = f"no step for {age_s:.0f} s"
        if reason is not None:
            raise ApiError(503, reason, code="engine_dead")
        return Response()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version", response_model=Version)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return app


async def _close_on_disconnect(request: Request, stream: OutputStream) -> None:
    """Runs beside the response. The server reports a disconnect when the client goes, or after the response."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.close()


async def _whole(
    generation: Generation, head: dict[str, Any], shape: Callable[[ChoiceDelta], dict[str, Any]]
) -> Response:
    choices = [shape(delta) for delta in await generation.whole()]
    counts = usage(generation.num_prompt_tokens, generation.num_completion_tokens)
    return JSONResponse(head | {"choices": choices, "usage": counts})


async def _chunks(
    generation: Generation,
    head: dict[str, Any],
    shape: Callable[[ChoiceDelta], dict[str, Any]],
    include_usage: bool,
    first: list[dict[str, Any]],
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed answer; an error in mid-answer is the last of them."""
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        for choice in first:
            yield head | {"choices": [choice]} | no_usage
        async for delta in generation.deltas():
            yield head | {"choices": [shape(delta)]} | no_usage
    except ApiError as error:
        yield error.body()
        return
    if include_usage:
        counts = usage(generation.num_prompt_tokens, generation.num_completion_tokens)
        yield head | {"choices": [], "usage": counts}


async def _lines(chunks: AsyncGenerator[dict[str, Any], None], keep_alive_s: float | None) -> AsyncIterator[str]:
    """Server-sent events, one per chunk, closed by `[DONE]`; a comment when `keep_alive_s` pass without any.

    Proxies cut connections that are silent for a minute, and a long prompt is silent for longer.
    """
    chunk: asyncio.Task[dict[str, Any] | None] | None = None
    try:
        while True:
            chunk = asyncio.ensure_future(anext(chunks, None))
            while not (await asyncio.wait({chunk}, timeout=keep_alive_s))[0]:
                yield ": keep-alive\n\n"
            data = chunk.result()
            if data is None:
                break
            yield f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
    finally:
        if chunk is not None and not chunk.done():
            chunk.cancel()
            await asyncio.wait({chunk})
        await chunks.aclose()
    yield "data: [DONE]\n\n"


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape; what a client can mend is a 400."""

    def reply(error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return reply(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return reply(validation_error(first | {"loc": first["loc"][1:]}))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return reply(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> Response:
        return reply(ApiError(500, "internal error; the server's log has the cause"))
