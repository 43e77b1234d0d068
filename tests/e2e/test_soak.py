"""500 requests of mixed length, every third client gone early: memory and pools are flat, and /health stays quick."""

import asyncio
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.served import served
from tests.tiny import make_tiny

NUM_REQUESTS = 500
WARM_UP = 150
"""Requests after which every lazily made buffer exists."""
CONCURRENCY = 16
HEALTH_WITHIN_S = 1.0
GROWTH_BYTES = 24 * 2**20
"""What an allocator may keep or give back by chance; a leaked prompt or stream per request would be more."""


@dataclass
class Load:
    """What the clients saw."""

    finished: int = 0
    left: int = 0
    slowest_health_s: float = 0.0
    num_health: int = 0
    rss: list[int] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, number: int, load: Load) -> None:
    """One request; every third client leaves: before the first byte, or after a few events of a stream."""
    rng = random.Random(number)
    body = {
        "prompt": [rng.randrange(3, 311) for _ in range(rng.choice((5, 40, 150, 400)))],
        "max_tokens": rng.choice((1, 2, 8, 20)),
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    if number % 3 == 0:
        body["max_tokens"] = 3000  # it would still run long after the end, were it not aborted
        leave_after_s = rng.choice((0.0, 0.05, 0.3))
        try:
            async with (
                asyncio.timeout(leave_after_s + 0.01),
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                async for _ in reply.aiter_lines():
                    pass
        except TimeoutError:
            load.left += 1
        return
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    if body["stream"]:
        assert reply.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in reply.text
    else:
        assert json.loads(reply.text)["usage"]["completion_tokens"] == body["max_tokens"]
    load.finished += 1


def watch_health(url: str, load: Load, stopped: threading.Event) -> None:
    """In a thread of its own: the load's event loop is busy."""
    with httpx.Client(base_url=url, timeout=30) as client:
        while not stopped.wait(0.05):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            load.slowest_health_s = max(load.slowest_health_s, time.monotonic() - started)
            load.num_health += 1


async def run_load(url: str, process: psutil.Process, load: Load) -> None:
    places = asyncio.Semaphore(CONCURRENCY)

    async def place(number: int) -> None:
        async with places:
            await ask(client, number, load)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for numbers in (range(WARM_UP), range(WARM_UP, NUM_REQUESTS)):
            await asyncio.gather(*(place(number) for number in numbers))
            load.rss.append(process.memory_info().rss)


def gauges(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^oasis_tp:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.M)}


@pytest.mark.timeout(300)
def test_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model", num_hidden_layers=1, max_position_embeddings=4096)
    options = ["--max-num-seqs", "8", "--budget-tokens", "64", "--recent-tokens", "16"]
    with served(model, *options, log=tmp_path / "log") as (process, url):
        load, stopped = Load(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            health = pool.submit(watch_health, url, load, stopped)
            try:
                asyncio.run(run_load(url, psutil.Process(process.pid), load))
            finally:
                stopped.set()
            health.result()
        end = time.monotonic() + 20
        while (counts := gauges(url))["num_requests_running"] and time.monotonic() < end:
            time.sleep(0.05)
    assert load.finished + load.left >= NUM_REQUESTS - NUM_REQUESTS // 20 and load.left >= NUM_REQUESTS // 4
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "host_kv_usage_perc"):
        assert counts[name] == 0, name
    assert load.num_health > 20 and load.slowest_health_s < HEALTH_WITHIN_S
    warm, final = load.rss
    assert final - warm < GROWTH_BYTES, f"{(final - warm) >> 20} MiB in {NUM_REQUESTS - WARM_UP} requests"
