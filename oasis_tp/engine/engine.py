"""Engine: the loop that every rank runs. Exchange, plan, run, commit; then draft for the next step."""

import json
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from oasis_tp.config import Config, SketchKind, SparsityConfig
from oasis_tp.engine.drafting import draft, learn
from oasis_tp.engine.plan import StepPlan
from oasis_tp.engine.report import EngineStats, add_ended, kv_stats
from oasis_tp.engine.sampler import Sampled
from oasis_tp.engine.scheduler import Scheduler
from oasis_tp.engine.startup import Started, start
from oasis_tp.kv.layout import RUN_BLOCKS
from oasis_tp.request import FinishReason, QueueFullError, Request, RequestSpec, SamplingParams, TokenOutput
from oasis_tp.validation import validate_sparsity

IDLE_SECONDS = 0.5
"""An idle rank 0 exchanges at least this often, so that waiting ranks know it lives."""

STUCK = "held prompts leave the host tier too little room for this request: release them, or raise --host-kv-gb"


class Engine:
    """One rank's engine. Every rank constructs it and runs the same loop; rank 0 takes requests in and gives text out.

    `submit`, `abort`, `stop` and `stats` may be called from any thread; `on_output` is called on the loop's thread
    after each step that produced something, on every rank with the same events (logprobs at rank 0 only).
    """

    def __init__(self, config: Config, started: Started) -> None:
        limits = started.limits
        self.config = config
        self.runner = started.runner
        self.drafter = started.drafter
        self.tp = started.runner.tp
        self.model_dir = started.model_dir
        self.scheduler = Scheduler(limits)
        self.max_model_len = limits.max_model_len
        self.vocab_size = self.runner.model.arch.vocab_size
        self.eos_token_ids = tuple(sorted(limits.eos_token_ids))
        self.on_output: Callable[[list[TokenOutput]], None] = lambda outputs: None
        self._inbox: queue.SimpleQueue[RequestSpec | int | None] = queue.SimpleQueue()
        # Requests in the inbox: one counter is written by whoever submits, the other by the loop.
        self._num_submitted = self._num_taken = 0
        self._stopping = False
        self._stats = EngineStats(kv_pages_total=limits.num_pages, host_blocks_total=limits.num_host_blocks)

    @classmethod
    def create(cls, config: Config, *, extra_sketches: Sequence[SketchKind] = ()) -> "Engine":
        """Join the ranks, load the model, plan memory and print what fits (see engine/startup.py). Collective."""
        return cls(config, start(config, tuple(extra_sketches)))

    def submit(self, spec: RequestSpec, *, limit_queue: bool = True) -> None:
        """Queue a request. What rank 0 queues counts; on the other ranks this only checks it.

        `limit_queue` False is for callers that bring all their work at once and wait for it.

        Raises:
            ValueError: it could never run; the message is fit for the user.
            QueueFullError: too many are waiting.
        """
        outside = [token for token in spec.prompt_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"prompt has token id {outside[0]}; this model's ids are 0 to {self.vocab_size - 1}")
        biased = [token for token, _ in spec.sampling.logit_bias if not 0 <= token < self.vocab_size]
        if biased:
            raise ValueError(f"logit_bias has token id {biased[0]}; this model's ids are 0 to {self.vocab_size - 1}")
        if spec.sparsity is not None:
            validate_sparsity(spec.sparsity, self.config.memory.block_size, lambda name: f"sparsity.{name}")
        request = self.scheduler.make_request(spec)
        wanted = request.sparsity
        if wanted.attention != "dense" and wanted.sketch not in self.runner.cache.sketches:
            kept = ", ".join(self.runner.cache.sketches) or "none"
            raise ValueError(
                f"attention {wanted.attention} with sketch {wanted.sketch}: this engine keeps {kept}; start it with "
                f"--attention {wanted.attention} --sketch {wanted.sketch}"
            )
        limit = self.config.batching.max_num_queued_reqs
        num_waiting = len(self.scheduler.waiting) + self._num_submitted - self._num_taken
        if limit_queue and num_waiting >= limit:
            raise QueueFullError(f"{limit} requests are waiting (--max-num-queued-reqs); try again later")
        if self.tp.rank == 0:
            self._num_submitted += 1
            self._inbox.put(spec)

    def check_num_outputs(self, count: int) -> None:
        """Refuse at once what the queue could never hold, even empty.

        Raises:
            ValueError: more outputs than --max-num-queued-reqs.
        """
        limit = self.config.batching.max_num_queued_reqs
        if count > limit:
            raise ValueError(
                f"{count} outputs are asked for at once (prompts times n); at most {limit} may queue up "
                "(--max-num-queued-reqs)"
            )

    def abort(self, request_id: int) -> None:
        """End a request, or the hold on a prompt, before the next step. Unknown ids are ignored."""
        if self.tp.rank == 0:
            self._inbox.put(request_id)

    def stop(self) -> None:
        """Leave `run` before the next step, on every rank (rank 0)."""
        self._stopping = True
        self._inbox.put(None)

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def has_work(self) -> bool:
        """Requests wait or run; the same on every rank between steps."""
        return self.scheduler.has_work

    def run(self) -> None:
        """Step until `stop`; then every open request ends with an abort."""
        try:
            while self.step(wait=True):
                pass
            open_requests = [*self.scheduler.running.values(), *self.scheduler.waiting]
            self._emit([TokenOutput(request_id=r.request_id, finish_reason=FinishReason.ABORT) for r in open_requests])
        except BaseException as error:
            self._stats = replace(
                self._stats, dead=f"{type(error).__name__} on rank {self.tp.rank}, step {self._stats.steps}"
            )
            raise
        finally:
            self.runner.graphs = None  # as in close: the interpreter's end may leave the group first

    def step(self, wait: bool = False) -> bool:
        """One step on every rank; False once rank 0 asked to stop. With `wait` an idle rank 0 waits for requests."""
        news, stopping = self._exchange(wait)
        outputs = self._take(news)
        if stopping:
            self._emit(outputs)
            return False
        plan = self.scheduler.plan()
        num_tokens = 0
        if not plan.is_empty:
            if self.config.parallel.check_ranks:
                self._compare_plans(plan)
            sampled = self.runner.run(plan, self.scheduler)
            ended = self.scheduler.commit(plan, sampled.token_ids)
            outputs += self._report(plan, sampled, ended)
            self._draft(plan, sampled)
            num_tokens = sum(output.token_id is not None for output in outputs)
        elif (refused := self.scheduler.refuse_stuck()) is not None:
            outputs.append(TokenOutput(request_id=refused, finish_reason=FinishReason.ERROR, error=STUCK))
        self._count(plan, num_tokens)
        self._emit(outputs)
        return True

    def close(self) -> None:
        """Leave the ranks' group. Recorded steps hold its communicators, and leaving would wait for them."""
        self.runner.graphs = None
        self.tp.close()

    def check_integrity(self) -> None:
        """Every pool and table is consistent. Call between steps."""
        self.scheduler.check_integrity()
        for state in self.runner.states.values():
            if not state.resident:
                self.runner.cache.residency.check_row(state.row)

    def _draft(self, plan: StepPlan, sampled: Sampled) -> None:
        """Drafts for the requests that decode next."""
        if self.drafter is None:
            return
        for row in plan.released_rows:
            self.drafter.release(row)
        if self.drafter.feature_layers:
            learn(self.drafter, plan, self.runner.features, sampled.token_ids)
        draft(self.drafter, self.tp, self.scheduler.wanted_drafts())

    def _exchange(self, wait: bool) -> tuple[list[RequestSpec | int], bool]:
        """Rank 0's news to every rank: requests, and ids to abort, in order. A fixed header, a payload if any."""
        payload = b""
        if self.tp.rank == 0:
            news = self._drain(wait and not self.has_work and not self._stopping)
            if news:
                payload = json.dumps(news, default=_as_object).encode()
        if self.tp.size == 1:
            return _decode(payload), self._stopping
        header = self.tp.broadcast(torch.tensor([len(payload), int(self._stopping)], dtype=torch.int64))
        num_bytes, stopping = header.tolist()
        if num_bytes:
            data = torch.frombuffer(bytearray(payload or bytes(num_bytes)), dtype=torch.uint8)
            payload = self.tp.broadcast(data).numpy().tobytes()
        return _decode(payload), bool(stopping)

    def _drain(self, wait: bool) -> list[RequestSpec | int]:
        news: list[RequestSpec | int] = []
        try:
            if wait:
                first = self._inbox.get(timeout=IDLE_SECONDS)
                news += [] if first is None else [first]
            while True:
                item = self._inbox.get_nowait()
                news += [] if item is None else [item]
        except queue.Empty:
            return news

    def _take(self, news: list[RequestSpec | int]) -> list[TokenOutput]:
        outputs = []
        for item in news:
            if isinstance(item, RequestSpec):
                self._num_taken += 1
                self.scheduler.add(item)
                continue
            for request in self.scheduler.abort(item):
                self.runner.sampler.forget(item)
                stats = kv_stats(self.runner, [request] if request.row >= 0 else [])
                self._stats = add_ended(self._stats, stats)
                kv = stats[0] if stats else None
                outputs.append(TokenOutput(request_id=item, finish_reason=FinishReason.ABORT, kv=kv))
        return outputs

    def _report(self, plan: StepPlan, sampled: Sampled, ended: list[Request]) -> list[TokenOutput]:
        """The step's events. Ranks know alike who ended, so their tier statistics can be summed here."""
        stats_of_ended = kv_stats(self.runner, ended)
        kv = {request.request_id: stats for request, stats in zip(ended, stats_of_ended, strict=True)}
        corrupted = sum(request.finish_reason is FinishReason.ERROR for request in ended)
        self._stats = replace(
            add_ended(self._stats, stats_of_ended), corrupted_requests=self._stats.corrupted_requests + corrupted
        )
        outputs = []
        logprobs = sampled.logprobs or [[None] * len(tokens) for tokens in sampled.token_ids]
        for request, tokens, of_tokens in zip(plan.sampled, sampled.token_ids, logprobs, strict=True):
            reason = request.finish_reason
            if reason is not None:
                self.runner.sampler.forget(request.request_id)
            scores = sampled.prompt_logprobs.get(request.request_id)
            silent = request.spec.sampling.max_tokens == 0
            for index, token_id in enumerate(tokens):
                last = index == len(tokens) - 1
                outputs.append(
                    TokenOutput(
                        request_id=request.request_id,
                        token_id=token_id if token_id >= 0 and not silent else None,
                        logprobs=None if silent else of_tokens[index],
                        prompt_logprobs=None if scores is None or index else tuple(scores),
                        finish_reason=reason if last else None,
                        kv=kv.get(request.request_id) if last else None,
                        error=None if token_id >= 0 else "the model's output for this request was not a finite number",
                    )
                )
        return outputs

    def _count(self, plan: StepPlan, num_tokens: int) -> None:
        scheduler, transfers, before = self.scheduler, self.runner.cache.transfers, self._stats
        self._stats = replace(
            before,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_pages_used=scheduler.pages.num_pages - scheduler.pages.num_free,
            host_blocks_used=(scheduler.runs.num_runs - scheduler.runs.num_free) * RUN_BLOCKS,
            prompt_tokens=before.prompt_tokens + sum(chunk.stop - chunk.start for chunk in plan.prefill),
            generation_tokens=before.generation_tokens + num_tokens,
            host_to_device_bytes=transfers.host_to_device_bytes if transfers else 0,
            device_to_host_bytes=transfers.device_to_host_bytes if transfers else 0,
            drafts=before.drafts + sum(map(bool, plan.drafts)),
            exposed_wait_ns=transfers.exposed_wait_ns if transfers else 0,
            steps=before.steps + (not plan.is_empty),
            last_step_time=time.monotonic(),
        )

    def _emit(self, outputs: list[TokenOutput]) -> None:
        if outputs:
            self.on_output(outputs)

    def _compare_plans(self, plan: StepPlan) -> None:
        mine = plan.fingerprint()
        if self.tp.min_over_ranks([mine]) != self.tp.max_over_ranks([mine]):
            raise RuntimeError(
                f"ranks disagree on the plan of step {self._stats.steps}; rank {self.tp.rank} has {mine:08x}"
            )


def _as_object(section: Any) -> dict[str, Any]:
    """A dataclass as JSON takes it; what is inside comes here again."""
    return {field.name: getattr(section, field.name) for field in fields(section)}


def _decode(payload: bytes) -> list[RequestSpec | int]:
    news: list[RequestSpec | int] = []
    for item in json.loads(payload) if payload else []:
        if isinstance(item, int):
            news.append(item)
            continue
        sampling = item.pop("sampling")
        for key in ("stop", "stop_token_ids"):
            sampling[key] = tuple(sampling[key])
        sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
        sparsity = item.pop("sparsity")
        news.append(
            RequestSpec(
                **{**item, "prompt_ids": tuple(item["prompt_ids"])},
                sampling=SamplingParams(**sampling),
                sparsity=SparsityConfig(**sparsity) if sparsity else None,
            )
        )
    return news
