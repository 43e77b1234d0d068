"""A batch at rank 0: keeps the engine supplied with requests and writes each answer as it ends."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from oasis_tp.batch.lines import BadLineError, BatchLine
from oasis_tp.batch.progress import Progress
from oasis_tp.batch.results import ErrorFile, ResultFile, StatusFile
from oasis_tp.config import Config, SparsityConfig
from oasis_tp.engine.engine import Engine
from oasis_tp.models.tokenizer import Tokenizer
from oasis_tp.request import RequestSpec, SamplingParams, TokenOutput
from oasis_tp.server.bridge import request_specs
from oasis_tp.server.generation import Assembler, echoes, join_deltas
from oasis_tp.server.protocol import ApiError, ChatRequest, ChoiceDelta, CompletionRequest, response_head, usage
from oasis_tp.validation import validate_sparsity

AHEAD = 2
"""Requests in the engine, in units of --max-num-seqs: enough that a row never waits for the next one."""
IDS_PER_LINE = 2**20
"""Request ids belong to lines, so that draws without a seed are the same in a resumed job."""
STATUS_EVERY_S = 1.0


@dataclass(slots=True)
class _Open:
    """A request that is in the engine."""

    line: BatchLine
    num_prompt_tokens: int
    reported: bool
    assembler: Assembler
    ids: list[int]
    parts: list[list[ChoiceDelta]] = field(default_factory=list)


class BatchJob:
    """Runs the requests of a batch through an engine. Every method belongs to the engine loop's thread.

    `Engine.run` is the loop: `start` submits the first requests, each answer makes room for the next, and the engine
    is told to stop when there is nothing left.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: Config,
        lines: Iterator[BatchLine | BadLineError],
        results: ResultFile,
        errors: ErrorFile,
        status: StatusFile,
        progress: Progress,
    ) -> None:
        self.finished = False
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._lines, self._results, self._errors = lines, results, errors
        self._status, self._progress = status, progress
        self._strangers = len(results.done) - progress.resumed  # answers there to requests that are not in the input
        self._room = AHEAD * config.batching.max_num_seqs
        self._stopping = False
        self._open: dict[int, tuple[_Open, int]] = {}  # request id -> its request, its choice
        self._status_time = 0.0

    def start(self) -> None:
        """Take the engine's outputs from now on and submit the first requests."""
        self._engine.on_output = self._receive
        self._refill()

    def stop(self) -> None:
        """Leave what is open unanswered and end the loop before its next step. Safe in a signal handler."""
        self._stopping = True
        self._engine.stop()

    def write_status(self, state: str) -> None:
        """See `StatusFile.write`."""
        self._status_time = time.monotonic()
        self._status.write(state, completed=len(self._results.done) - self._strangers, failed=self._errors.count)

    def _refill(self) -> None:
        """Submit until the engine has enough. A line that is refused makes no use of its place."""
        while len(self._open) < self._room and not self._stopping:
            line = next(self._lines, None)
            if line is None:
                break
            if isinstance(line, BadLineError):
                self._fail(line.number, line.custom_id, line.error)
                continue
            try:
                self._submit(line)
            except ApiError as error:
                self._fail(line.number, line.custom_id, error)
        if not self._open and not self._stopping:
            self.finished = True
            self._engine.stop()

    def _submit(self, line: BatchLine) -> None:
        body = line.body
        sampling = body.sampling()
        sparsity = self._sparsity(body)
        prompts = self._encode(body)
        first = line.number * IDS_PER_LINE
        num_choices = len(prompts) * sampling.n
        if num_choices > IDS_PER_LINE:
            raise ApiError(400, f"{num_choices} outputs in one request; allowed: {IDS_PER_LINE}", "prompt")
        specs: list[RequestSpec] = []
        for index, prompt in enumerate(prompts):
            start = first + index * sampling.n
            specs += request_specs(range(start, start + sampling.n), tuple(prompt), sampling, sparsity)
        ids = [spec.request_id for spec in specs]
        request = _Open(
            line=line,
            num_prompt_tokens=sum(map(len, prompts)),
            reported=sampling.logprobs is not None,
            assembler=self._assembler(body, sampling, ids, prompts),
            ids=ids,
            parts=[[] for _ in ids],
        )
        try:
            for spec in specs:
                self._engine.submit(spec, limit_queue=False)  # the file is the queue
        except ValueError as error:
            for request_id in ids:
                self._engine.abort(request_id)
            raise ApiError(400, str(error)) from error
        self._open |= {request_id: (request, choice) for choice, request_id in enumerate(ids)}

    def _sparsity(self, body: CompletionRequest | ChatRequest) -> SparsityConfig | None:
        sparsity = body.sparsity_over(self._config.sparsity)
        if sparsity is not None:
            try:
                validate_sparsity(sparsity, self._config.memory.block_size, lambda name: f"sparsity.{name}")
            except ValueError as error:
                raise ApiError(400, str(error), "sparsity") from error
        return sparsity

    def _encode(self, body: CompletionRequest | ChatRequest) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            try:
                text = self._tokenizer.apply_chat_template(body.plain_messages(), add_generation_prompt=True)
            except ValueError as error:
                raise ApiError(400, str(error), "messages") from error
            return [self._tokenizer.encode(text, add_special_tokens=False)]
        return [self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts()]

    def _assembler(
        self,
        body: CompletionRequest | ChatRequest,
        sampling: SamplingParams,
        ids: list[int],
        prompts: list[list[int]],
    ) -> Assembler:
        return Assembler(
            self._tokenizer.backend,
            sampling,
            len(ids),
            return_kv_stats=body.return_kv_stats,
            abort=lambda choice: self._engine.abort(ids[choice]),
            echoes=echoes(body, prompts, self._tokenizer.backend),
        )

    def _receive(self, outputs: list[TokenOutput]) -> None:
        """After each step. Aborts at the very end (the job was told to stop) leave their requests unanswered."""
        for output in outputs:
            request, choice = self._open.get(output.request_id, (None, 0))
            if request is None:
                continue
            try:
                delta = request.assembler.push(choice, output)
            except ApiError as error:
                self._close(request)
                self._fail(request.line.number, request.line.custom_id, error)
                continue
            request.parts[choice].append(delta)
            if delta.finish_reason == "abort":
                self._close(request)
            elif request.assembler.ended:
                self._close(request)
                self._answer(request)
        if not self._stopping:
            self._refill()
        if time.monotonic() - self._status_time >= STATUS_EVERY_S:
            self.write_status("running")

    def _close(self, request: _Open) -> None:
        """The request leaves the engine, with whatever of it still runs."""
        for request_id in request.ids:
            if self._open.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _answer(self, request: _Open) -> None:
        line = request.line
        is_chat = isinstance(line.body, ChatRequest)
        head = (
            response_head("chatcmpl-", "chat.completion", line.model)
            if is_chat
            else response_head("cmpl-", "text_completion", line.model)
        )
        shape: Callable[[ChoiceDelta], dict[str, Any]] = ChoiceDelta.chat if is_chat else ChoiceDelta.completion
        choices = [shape(delta) for delta in join_deltas(request.parts, request.reported)]
        counts = usage(request.num_prompt_tokens, request.assembler.num_completion_tokens)
        self._results.append(_entry(line.custom_id, 200, head | {"choices": choices, "usage": counts}))
        self._progress.advance()

    def _fail(self, number: int, custom_id: str | None, error: ApiError) -> None:
        self._errors.append(_entry(custom_id, error.status, error.body()) | {"line": number})
        self._progress.advance()


def _entry(custom_id: str | None, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A line of OpenAI's output or error file."""
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body},
        "error": None,
    }
