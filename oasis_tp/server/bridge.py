"""The server's only way to the engine: requests in from the event loop, outputs back from the engine thread."""

import asyncio
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oasis_tp.config import SparsityConfig
from oasis_tp.request import FinishReason, RequestSpec, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from oasis_tp.engine.engine import Engine, EngineStats


class EngineDeadError(RuntimeError):
    """The engine takes no requests any more."""


class OutputStream:
    """The outputs of one HTTP request: every choice of every prompt, as they come.

    Iterating yields `(choice, output)` and ends when every choice has ended, or after `close`. Belongs to the event
    loop's thread. Whoever opens a stream closes it: what is still running is then aborted.
    """

    def __init__(self, bridge: "EngineBridge", choice_of: dict[int, int]) -> None:
        self._bridge = bridge
        self._choice_of = choice_of  # request id -> choice, of the requests that have not ended
        self._ready: deque[tuple[int, TokenOutput]] = deque()
        self._wake = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None
        """Whoever waits for the client to go away; kept here for as long as the stream."""

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> tuple[int, TokenOutput]:
        while not self._ready:
            if not self._choice_of:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()

    def abort(self, choice: int) -> None:
        """End one choice early; its last output, with an abort, still comes, and perhaps a token before it."""
        for request_id, index in self._choice_of.items():
            if index == choice:
                self._bridge._abort(request_id)

    def close(self) -> None:
        """Abort whatever has not ended; harmless when everything has."""
        for request_id in self._choice_of:
            self._bridge._forget(request_id)
        self._choice_of.clear()
        self._ready.clear()
        self._wake.set()

    def _receive(self, output: TokenOutput) -> None:
        choice = self._choice_of.get(output.request_id)
        if choice is None:
            return
        if output.finish_reason is not None:
            del self._choice_of[output.request_id]
        self._ready.append((choice, output))
        self._wake.set()


class EngineBridge:
    """Hands requests to the engine and outputs to the event loop.

    The engine thread wakes the loop once per step, not once per token. Request ids come from a counter here.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._ids = itertools.count(1)
        self._streams: dict[int, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: str | None = None
        self._draining = False
        self._drained = threading.Event()

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def stats(self) -> "EngineStats":
        return self._engine.stats()

    @property
    def dead(self) -> str | None:
        """Why no request can be served any more; None while they can."""
        return self._closed or self._engine.stats().dead

    def attach(self) -> None:
        """Start to receive outputs in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.on_output = self._on_output

    def open(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, sparsity: SparsityConfig | None = None
    ) -> OutputStream:
        """Submit `sampling.n` requests per prompt; choice `p * n + i` is output i of prompt p.

        Outputs of one prompt are forks of its first, with seeds `seed`, `seed + 1`, … when there is a seed.

        Raises:
            ValueError: the engine refuses one of them; none is left running.
            EngineDeadError: the engine has ended.
        """
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        # Before anything is built: a small body may ask for millions of outputs, and they could never queue up.
        self._engine.check_num_outputs(len(prompts) * sampling.n)
        specs = [
            spec
            for prompt in prompts
            for spec in request_specs([next(self._ids) for _ in range(sampling.n)], tuple(prompt), sampling, sparsity)
        ]
        stream = OutputStream(self, {spec.request_id: choice for choice, spec in enumerate(specs)})
        self._streams |= {spec.request_id: stream for spec in specs}
        try:
            for spec in specs:
                self._engine.submit(spec)
        except BaseException:
            stream.close()
            raise
        return stream

    def shut_down(self, reason: FinishReason, message: str) -> None:
        """End every open request with `reason` and refuse new ones. From any thread; `message` is shown to users."""
        self._closed = message
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_all, reason, message)

    def drain(self, timeout_s: float, message: str) -> bool:
        """Refuse new requests and wait until the open ones have ended; false when `timeout_s` was not enough.

        From any thread but the event loop's. `message` is what refused clients read.
        """
        self._closed = message
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_drain)
        return self._drained.wait(timeout_s)

    def _begin_drain(self) -> None:
        self._draining = True
        self._check_drained()

    def _check_drained(self) -> None:
        if self._draining and not self._streams:
            self._drained.set()

    def _abort(self, request_id: int) -> None:
        if request_id in self._streams:
            self._engine.abort(request_id)

    def _forget(self, request_id: int) -> None:
        self._abort(request_id)
        self._streams.pop(request_id, None)
        self._check_drained()

    def _on_output(self, outputs: list[TokenOutput]) -> None:
        """On the engine thread, after each step. A loop that is gone has no one left to tell."""
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream._receive(output)
        self._check_drained()

    def _end_all(self, reason: FinishReason, message: str) -> None:
        error = message if reason is FinishReason.ERROR else None
        self._deliver(
            [TokenOutput(request_id=request_id, finish_reason=reason, error=error) for request_id in self._streams]
        )


def request_specs(
    ids: Sequence[int], prompt: tuple[int, ...], sampling: SamplingParams, sparsity: SparsityConfig | None
) -> list[RequestSpec]:
    """One spec per choice of a prompt: the first and its forks, with seeds `seed`, `seed + 1`, … when there is one.

    Args:
        ids: `sampling.n` request ids.
    """
    assert len(ids) == sampling.n
    return [
        RequestSpec(
            request_id=request_id,
            prompt_ids=prompt,
            sampling=dataclasses.replace(sampling, n=1, seed=_shifted(sampling.seed, index)),
            sparsity=sparsity,
            fork_of=ids[0] if index else None,
        )
        for index, request_id in enumerate(ids)
    ]


def _shifted(seed: int | None, index: int) -> int | None:
    """`seed + index`, kept a signed 64-bit number."""
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63
