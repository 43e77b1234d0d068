"""LLM: the engine for offline Python, alone or under torchrun (every rank makes the same calls)."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any

from oasis_tp.cli import speculative_options
from oasis_tp.config import Config, SketchKind, SparsityConfig
from oasis_tp.engine.engine import STUCK, Engine
from oasis_tp.models.tokenizer import empty_tokenizer, load_tokenizer, read_template
from oasis_tp.request import FinishReason, KvStats, RequestSpec, SamplingParams, TokenLogprobs, TokenOutput
from oasis_tp.server.detokenizer import Detokenizer
from oasis_tp.validation import validate

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One choice. `logprobs` and `prompt_logprobs` (of all prompt tokens but the first) are filled at rank 0 when they
    were asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    kv: KvStats | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` choices."""

    prompt_token_ids: list[int]
    outputs: list[Completion]


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """A prefilled prompt that forks start from."""

    request_id: int
    prompt_token_ids: tuple[int, ...]


def make_config(**options: Any) -> Config:
    """A Config from flag names with underscores: `make_config(model="smollm2", budget_tokens=512)`.

    `speculative_config` may stand for the speculation options, as a dict with vLLM's names.

    Raises:
        ValueError: an unknown name, or a value outside its range.
    """
    if "speculative_config" in options:
        spread = speculative_options(options.pop("speculative_config"))
        twice = sorted(spread.keys() & options.keys())
        if twice:
            raise ValueError(f"given twice, also in speculative_config: {', '.join(twice)}")
        options |= spread
    sections = {}
    for section in fields(Config):
        kind: Any = section.default_factory
        mine = {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}
        sections[section.name] = kind(**mine)
    if options:
        raise ValueError(f"unknown options: {', '.join(sorted(options))}")
    config = Config(**sections)
    validate(config)
    return config


class LLM:
    """A model ready to generate.

    With load_format="dummy" config.json is enough for prompts of token ids; their answers then have no text.

    `LLM("smollm2", budget_tokens=512)` takes the options of the command line with underscores for dashes. Under
    torchrun every rank constructs it and makes the same calls, and every rank gets the same answers.
    """

    def __init__(self, model: str = "smollm2", *, extra_sketches: Sequence[SketchKind] = (), **options: Any) -> None:
        self._start(make_config(model=model, **options), extra_sketches)

    @classmethod
    def from_config(cls, config: Config, *, extra_sketches: Sequence[SketchKind] = ()) -> "LLM":
        """The same from a parsed command line."""
        llm = cls.__new__(cls)
        llm._start(config, extra_sketches)
        return llm

    def _start(self, config: Config, extra_sketches: Sequence[SketchKind]) -> None:
        template = read_template(config.model.chat_template)
        self.engine = Engine.create(config, extra_sketches=extra_sketches)
        model_dir = self.engine.model_dir
        needs_none = config.model.load_format == "dummy" and not (model_dir / "tokenizer.json").is_file()
        self.tokenizer = empty_tokenizer(model_dir) if needs_none else load_tokenizer(model_dir, template)
        self._ids = count()
        self._open: dict[int, tuple[Completion, Detokenizer]] = {}
        self.engine.on_output = self._receive

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        sparsity: SparsityConfig | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts (strings or lists of token ids), batched; in the order given.

        Raises:
            ValueError: a prompt or parameter that cannot be served; nothing was started then.
        """
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)  # type: ignore[arg-type, list-item]
        encoded = [self._encode(prompt) for prompt in listed]
        return self._run([(ids, None) for ids in encoded], sampling or SamplingParams(), sparsity)

    @contextmanager
    def hold(self, prompt: Prompt) -> Iterator[HeldPrompt]:
        """Prefill a prompt once and keep its KV in the host tier; `generate_from` forks it as often as wanted."""
        held = HeldPrompt(next(self._ids), tuple(self._encode(prompt)))
        spec = RequestSpec(
            request_id=held.request_id, prompt_ids=held.prompt_token_ids, sampling=SamplingParams(), hold=True
        )
        self.engine.submit(spec, limit_queue=False)
        self.engine.step()
        while self.engine.has_work:
            self.engine.step()
        if not self.engine.scheduler.is_held(held.request_id):
            raise ValueError(STUCK)
        try:
            yield held
        finally:
            self.engine.abort(held.request_id)
            self.engine.step()
            while self.engine.has_work:
                self.engine.step()

    def generate_from(
        self, held: HeldPrompt, sampling: SamplingParams | None = None, *, sparsity: SparsityConfig | None = None
    ) -> RequestOutput:
        """Answer a held prompt without computing it again."""
        return self._run([(list(held.prompt_token_ids), held.request_id)], sampling or SamplingParams(), sparsity)[0]

    def generate_from_each(
        self, held: HeldPrompt, sampling: SamplingParams, sparsities: Sequence[SparsityConfig]
    ) -> list[RequestOutput]:
        """Answer a held prompt once with each of these sparsities, batched; in the order given."""
        forks: list[tuple[list[int], int | None]] = [(list(held.prompt_token_ids), held.request_id)] * len(sparsities)
        return self._run(forks, sampling, sparsities)

    def close(self) -> None:
        """Leave the group of ranks."""
        self.engine.close()

    def _run(
        self,
        prompts: list[tuple[list[int], int | None]],
        sampling: SamplingParams,
        sparsity: SparsityConfig | Sequence[SparsityConfig] | None,
    ) -> list[RequestOutput]:
        """`sparsity`: for all prompts, or one for each."""
        outputs, specs = [], []
        each = list(sparsity) if isinstance(sparsity, Sequence) else [sparsity] * len(prompts)
        for (ids, held), own_sparsity in zip(prompts, each, strict=True):
            output = RequestOutput(ids, [])
            first = None
            for index in range(sampling.n):
                request_id = next(self._ids)
                parent = held if held is not None else first
                seed = sampling.seed
                if seed is not None:
                    seed = (seed + index + 2**63) % 2**64 - 2**63  # stays a signed 64-bit number
                own = replace(sampling, n=1, seed=seed)
                spec = RequestSpec(
                    request_id=request_id, prompt_ids=tuple(ids), sampling=own, sparsity=own_sparsity, fork_of=parent
                )
                first = request_id if first is None else first
                specs.append(spec)
                completion = Completion()
                output.outputs.append(completion)
                self._open[request_id] = (completion, Detokenizer(self.tokenizer.backend, sampling.stop))
            outputs.append(output)
        try:
            for spec in specs:
                self.engine.submit(spec, limit_queue=False)
        except BaseException:
            for spec in specs:
                self.engine.abort(spec.request_id)
                self._open.pop(spec.request_id)
            raise
        try:
            while self._open:
                self.engine.step()
        except BaseException:
            # An interrupt, or a failed step: the next call must not wait for what nobody will read.
            for request_id in self._open:
                self.engine.abort(request_id)
            self._open.clear()
            raise
        return outputs

    def _receive(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.request_id not in self._open:
                continue
            completion, text = self._open[output.request_id]
            completion.prompt_logprobs += output.prompt_logprobs or ()
            # A step with drafts may bring more tokens after the one that completed a stop string.
            if not text.stopped:
                if output.token_id is not None:
                    completion.token_ids.append(output.token_id)
                    if output.finish_reason != FinishReason.STOP:
                        completion.text += text.push(output.token_id)
                if output.logprobs is not None:
                    completion.logprobs.append(output.logprobs)
                if text.stopped and output.finish_reason is None:
                    self.engine.abort(output.request_id)
            completion.kv, completion.error = output.kv, output.error
            if output.finish_reason is not None:
                completion.finish_reason = FinishReason.STOP if text.stopped else output.finish_reason
                completion.text += text.finish()
                del self._open[output.request_id]

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt is a string or a list of whole token ids, not {prompt!r:.80}") from error


def _is_ids(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
