"""API keys: who may use the server."""

import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from oasis_tp.config import ServerConfig
from oasis_tp.server.protocol import ApiError

OPEN = {"/health", "/metrics", "/version"}
"""For probes and scrapers, which have no key."""


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of --api-key and those of --api-key-file, one a line; none: everybody may.

    Raises:
        ValueError: the file cannot be read or holds no key.
    """
    if config.api_key_file is None:
        return config.api_key
    try:
        lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {config.api_key_file}: {error}") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise ValueError(f"--api-key-file {config.api_key_file}: no key in it; one per line is expected")
    return config.api_key + found


class KeyCheck:
    """ASGI middleware: every path but those of `OPEN` needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "missing or wrong API key (Authorization: Bearer KEY)", code="invalid_api_key")
        reply = JSONResponse(error.body(), status_code=401, headers={"WWW-Authenticate": "Bearer"})
        await reply(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # the bytes as they came
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
