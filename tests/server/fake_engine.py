"""An engine without a model: it answers every prompt with one fixed text, a token per step.

Run as a script, it stands in for the real engine under `oasis_tp.serve`.
"""

import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from oasis_tp.models.tokenizer import Tokenizer
from oasis_tp.request import FinishReason, KvStats, QueueFullError, RequestSpec, TokenLogprobs, TokenOutput

ANSWER = "Grüße, 😀 world! END of story"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
KV = KvStats(
    mode="resolve", budget_tokens=64, context_tokens=10, hot_kv_bytes=1, sketch_bytes=2, host_kv_bytes=3,
    dense_kv_bytes=4, selected_blocks=10, missed_blocks=1, hit_rate=0.9, missed_mass=0.01, attended_share=0.5,
)  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """Every byte a token, and an end token."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(backend, eos_token_ids=(256,), chat_template=TEMPLATE, template_tokens={})


@dataclass
class FakeStats:
    num_running: int = 0
    num_waiting: int = 0
    kv_pages_used: int = 1
    kv_pages_total: int = 4
    host_blocks_used: int = 1
    host_blocks_total: int = 2
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 1
    draft_tokens: int = 4
    accepted_tokens: int = 2
    selected_blocks: int = 10
    missed_blocks: int = 3
    corrupted_requests: int = 0
    prefetch_used: int = 6
    prefetch_late: int = 1
    prefetch_wasted: int = 2
    exposed_wait_ns: int = 500_000_000
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    steps: int = 0
    last_step_time: float = field(default_factory=time.monotonic)
    dead: str | None = None


class FakeEngine:
    """Has the engine's interface at rank 0. `answering` cleared: requests stay in prefill for ever.

    `fail_with` ends the loop with that exception at the next step.
    """

    model_dir = Path()
    max_model_len = 64
    vocab_size = 257
    eos_token_ids = (256,)

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.answer = [*self.tokenizer.encode(ANSWER), 256]
        self.answering = True
        self.endless = False
        self.hanging = False
        self.fail_with: Exception | None = None
        self.on_output: Callable[[list[TokenOutput]], None] = lambda outputs: None
        self.specs: list[RequestSpec] = []
        self.aborted: set[int] = set()
        self.counts = FakeStats()
        self._live: dict[int, int] = {}  # request id -> tokens given
        self._ended: list[TokenOutput] = []
        self._change = threading.Condition()
        self._stopped = False

    @classmethod
    def create(cls, config: Any) -> "FakeEngine":
        if config.model.model == "missing":
            raise ValueError("--model missing: no such directory")
        engine = cls()
        engine.answering = config.model.model != "silent"
        engine.hanging = config.model.model == "hanging"
        if config.model.model == "broken":
            engine.fail_with = RuntimeError("a kernel fell over")
        return engine

    def submit(self, spec: RequestSpec) -> None:
        if not spec.prompt_ids:
            raise ValueError("prompt is empty")
        if len(spec.prompt_ids) >= self.max_model_len:
            raise ValueError(f"prompt has {len(spec.prompt_ids)} tokens; max_model_len is {self.max_model_len}")
        if not all(0 <= token < self.vocab_size for token in spec.prompt_ids):
            raise ValueError("prompt has a token id outside the vocabulary")
        with self._change:
            if len(self._live) >= 8:
                raise QueueFullError("8 requests are waiting")
            self.specs.append(spec)
            self._live[spec.request_id] = 0
            self._change.notify_all()

    def check_num_outputs(self, count: int) -> None:
        if count > 1024:
            raise ValueError(f"{count} outputs are asked for at once")

    def abort(self, request_id: int) -> None:
        with self._change:
            if self._live.pop(request_id, None) is not None:
                self.aborted.add(request_id)
                self._ended.append(TokenOutput(request_id=request_id, finish_reason=FinishReason.ABORT, kv=KV))
                self._change.notify_all()

    def stop(self) -> None:
        self._stopped = True

    def stats(self) -> FakeStats:
        self.counts.num_running = len(self._live)
        return self.counts

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._change:
            assert self._change.wait_for(condition, timeout=10)

    def run(self) -> None:
        while not self._stopped:
            with self._change:
                self._change.wait_for(lambda: self._ended or (self._live and self.answering), timeout=0.02)
                if self.fail_with is not None and self._live:
                    self.counts.dead = "the engine has failed"
                    raise self.fail_with
                if self.hanging and self._live:
                    threading.Event().wait()
                aborted, self._ended = self._ended, []
                outputs = [self._next(request_id) for request_id in self._live] if self.answering else []
                for output in outputs:
                    if output.finish_reason is not None:
                        del self._live[output.request_id]
                self._change.notify_all()
            self.counts.steps += 1
            self.counts.last_step_time = time.monotonic()
            self.on_output(aborted + outputs)
            if self.endless:
                time.sleep(0.001)

    def _next(self, request_id: int) -> TokenOutput:
        spec = next(spec for spec in self.specs if spec.request_id == request_id)
        token = self.answer[self._live[request_id] % (len(self.answer) - 1 if self.endless else len(self.answer))]
        self._live[request_id] += 1
        self.counts.generation_tokens += 1
        finish = None
        if token in self.eos_token_ids or token in spec.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif self._live[request_id] == spec.sampling.max_tokens:
            finish = FinishReason.LENGTH
        logprobs = None
        if spec.sampling.logprobs is not None:
            top = ((token, -0.5), (65, float("-inf")), (200, -3.0))[: spec.sampling.logprobs]
            logprobs = TokenLogprobs(logprob=-0.5, top=top)
        scores = None
        if spec.sampling.prompt_logprobs is not None and self._live[request_id] == 1:
            scores = tuple(
                TokenLogprobs(logprob=-0.25, top=((token, -0.25), (65, -2.0))[: spec.sampling.prompt_logprobs])
                for token in spec.prompt_ids[1:]
            )
        if spec.sampling.max_tokens == 0:
            token, logprobs, finish = None, None, FinishReason.LENGTH
        return TokenOutput(
            request_id=request_id,
            token_id=token,
            logprobs=logprobs,
            prompt_logprobs=scores,
            finish_reason=finish,
            kv=None if finish is None else KV,
        )


if __name__ == "__main__":
    stand_in = types.ModuleType("oasis_tp.engine.engine")
    stand_in.Engine = FakeEngine  # type: ignore[attr-defined]
    sys.modules["oasis_tp.engine.engine"] = stand_in
    from oasis_tp import serve

    serve.load_tokenizer = lambda model_dir, template: byte_tokenizer()
    sys.exit(serve.main())
