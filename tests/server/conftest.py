"""A real HTTP server on a free port, over an engine without a model."""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from oasis_tp.config import Config, ModelConfig, ServerConfig
from oasis_tp.request import FinishReason
from oasis_tp.serve import HttpServer, bind, url_of
from oasis_tp.server.app import create_app
from oasis_tp.server.bridge import EngineBridge


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    return _load(FAKE_ENGINE)


class Served:
    """A running server, its engine, and clients for it."""

    def __init__(self, fake: ModuleType, api_keys: tuple[str, ...] = (), **options: Any) -> None:
        self.engine: Any = fake.FakeEngine()
        server = ServerConfig(port=0, **options)
        config = Config(model=ModelConfig(served_model_name=("tiny", "alias")), server=server)
        sock = bind(config.server)
        self.bridge = EngineBridge(self.engine)
        self.url = url_of(sock)
        self._server = HttpServer(create_app(self.bridge, self.engine.tokenizer, config, api_keys), sock, "warning")
        self._engine_thread = threading.Thread(target=self.engine.run, daemon=True)
        self._server.start()
        self._engine_thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.engine.stop()
        self._engine_thread.join()
        self.bridge.shut_down(FinishReason.ABORT, "shutting down")
        self._server.join()
        assert not self.bridge._streams, "a stream was left open"


@pytest.fixture
def served(fake: ModuleType) -> Iterator[Served]:
    server = Served(fake)
    yield server
    server.close()


@pytest.fixture
def serve_with(fake: ModuleType) -> Iterator[Callable[..., Served]]:
    """Start a server with options of its own."""
    servers: list[Served] = []

    def start(**options: Any) -> Served:
        servers.append(Served(fake, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
