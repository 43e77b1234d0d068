"""No body larger than what a request can need is read: one client must not fill the server's memory."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oasis_tp.server.protocol import ApiError

MAX_BODY_BYTES = 16 * 2**20
"""Two million tokens as ids, or three as text."""


class BodyLimit:
    """ASGI middleware: 413 for a body that says it is too long, and for one that turns out to be."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._too_long = f"the body is longer than {max_bytes} bytes, the most that a request may have"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if length.isdecimal() and int(length) > self._max_bytes:
            reply = JSONResponse(ApiError(413, self._too_long).body(), 413, {"Connection": "close"})
            await reply(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._too_long)
            return message

        await self._app(scope, counted, send)
