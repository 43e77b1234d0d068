"""`oasis_tp.serve`: the OpenAI-compatible HTTP server, one process per rank."""

import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from oasis_tp.cli import parse_config
from oasis_tp.config import Config, ServerConfig
from oasis_tp.lifetime import Watchdog, exit_with_parent
from oasis_tp.models.tokenizer import Tokenizer, load_tokenizer, read_template
from oasis_tp.request import FinishReason
from oasis_tp.server.app import create_app
from oasis_tp.server.auth import read_keys
from oasis_tp.server.bridge import EngineBridge
from oasis_tp.server.busy_log import BusyLog
from oasis_tp.server.logs import set_up_logs

if TYPE_CHECKING:
    from oasis_tp.engine.engine import Engine

PROG = "oasis-tp serve"
LEAVE = (signal.SIGTERM, signal.SIGINT)
FAREWELL_S = 2.0
"""How long a server whose engine is dead goes on answering 503, so that whoever probes it sees why."""
GOODBYE_S = 5
"""How long open connections get to read their last event at the end."""

logger = logging.getLogger(__name__)


class HttpServer:
    """uvicorn in a thread of its own, so that the main thread can run the engine.

    The socket is bound by the caller, before the model is loaded: a port in use is found at once.
    """

    def __init__(self, app: FastAPI, sock: socket.socket, log_level: str) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GOODBYE_S,
        )
        self._server = _Listener(config)
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="http", daemon=True)

    def start(self) -> None:
        """Returns once connections are accepted. Raises: RuntimeError: the server could not start."""
        self._thread.start()
        self._server.tried.wait()
        if not self._server.started:
            raise RuntimeError("the HTTP server could not start; its log has the cause")

    def stop_accepting(self) -> None:
        """Close the listening socket and let open requests end. Safe in a signal handler."""
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until open requests have ended, but no longer than they are given."""
        self.stop_accepting()
        self._thread.join(GOODBYE_S + 1)


class _Listener(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.tried = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.tried.set()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self.tried.set()


def bind(config: ServerConfig) -> socket.socket:
    """The server's socket, not listening yet.

    Raises:
        ValueError: the address is not this machine's, or the port is in use or not allowed.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ValueError(f"--host {config.host} --port {config.port}: {error.strerror or error}") from error
    return sock


def _bind_unix(path: str) -> socket.socket:
    """A socket file that nobody listens on any more is replaced."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            try:
                sock.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ValueError(f"--uds {path}: {error.strerror or error}") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """What a client is to be told; `unix:` and the path where there is no port."""
    if sock.family is socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    engine: "Engine", tokenizer: Tokenizer, config: Config, sock: socket.socket, api_keys: Sequence[str] = ()
) -> None:
    """Rank 0: serve until SIGTERM or SIGINT. Open requests then have --shutdown-timeout to finish; what is open after
    that, or at a second signal, ends with finish reason `abort`.

    Raises whatever ended the engine, after every open request was told.
    """
    bridge = EngineBridge(engine)
    server = HttpServer(create_app(bridge, tokenizer, config, api_keys), sock, config.server.log_level)

    def drain() -> None:
        if not bridge.drain(config.server.shutdown_timeout, "the server is shutting down"):
            logger.warning("requests are still open after %s s: aborted", config.server.shutdown_timeout)
        engine.stop()

    def leave(signum: int, _: FrameType | None) -> None:
        for number in LEAVE:
            signal.signal(number, signal.SIG_DFL)  # the second one does not wait
        threading.Thread(target=drain, name="drain", daemon=True).start()

    def tell_hang() -> None:
        bridge.shut_down(FinishReason.ERROR, "the engine hangs; the server is shutting down")
        time.sleep(FAREWELL_S)
        server.join()

    server.start()
    for signum in LEAVE:
        signal.signal(signum, leave)
    name = (config.model.served_model_name or (config.model.model,))[0]
    print(f"oasis_tp ready: {url_of(sock)} model {name}, max_model_len {engine.max_model_len:,}", flush=True)
    watchdog = _watchdog(engine, config, tell_hang)
    busy = BusyLog(bridge.stats)
    busy.start()
    try:
        engine.run()
        bridge.shut_down(FinishReason.ABORT, "the server is shutting down")
    except BaseException:
        bridge.shut_down(FinishReason.ERROR, "the engine has failed; the server is shutting down")
        time.sleep(FAREWELL_S)
        raise
    finally:
        watchdog.stop()
        busy.stop()
        server.join()
        if config.server.uds is not None:
            os.unlink(config.server.uds)


def _watchdog(engine: "Engine", config: Config, on_hang: Callable[[], None]) -> Watchdog:
    watchdog = Watchdog(config.server.watchdog_timeout, lambda: engine.stats().last_step_time, on_hang)
    watchdog.start()
    return watchdog


def _wake(server_pid: int) -> None:
    """On a rank whose engine hangs: a server that was stopped (SIGSTOP) must go on, or it could tell nobody.

    Its own watchdog then finds out at once. Harmless in all other cases, and useless for a server on another host.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.kill(server_pid, signal.SIGCONT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank of the server. 0: told to stop; 1: the engine failed; 2: it cannot start as asked."""
    config, _ = parse_config(argv, PROG, "Serve a model over an OpenAI-compatible HTTP API.")
    from oasis_tp.comm import discover_ranks  # torch takes seconds: not before the command line is known to be right

    try:
        ranks = discover_ranks()
        rank = ranks.rank
        set_up_logs(config.server.log_level, config.server.log_format, rank)
        if ranks.size > 1:
            exit_with_parent()
        api_keys = read_keys(config.server)
        template = read_template(config.model.chat_template)
        sock = bind(config.server) if rank == 0 else None
        from oasis_tp.engine.engine import Engine

        engine = Engine.create(config)
        tokenizer = load_tokenizer(engine.model_dir, template)
        server_pid = engine.tp.max_over_ranks([os.getpid() if rank == 0 else 0])[0] if ranks.size > 1 else 0
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr, flush=True)
        return 2
    try:
        if sock is not None:
            serve(engine, tokenizer, config, sock, api_keys)
        else:
            # The launcher signals every rank; this one leaves when rank 0 says so.
            for signum in LEAVE:
                signal.signal(signum, signal.SIG_IGN)
            watchdog = _watchdog(engine, config, lambda: _wake(server_pid))
            engine.run()
            watchdog.stop()
    except Exception:
        logger.exception("rank %d: the engine failed at step %d", rank, engine.stats().steps)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
