"""From engine outputs to text: one request's choices, detokenised, counted and timed."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from oasis_tp.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from oasis_tp.server.bridge import OutputStream
from oasis_tp.server.detokenizer import REPLACEMENT, Detokenizer
from oasis_tp.server.metrics import Metrics, OutputTimer
from oasis_tp.server.protocol import ApiError, ChatRequest, ChoiceDelta, CompletionRequest, TokenReport, TokenText

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as `echo` repeats it: its text as it was given, or as its ids read."""

    text: str
    token_ids: Sequence[int]


@dataclass(slots=True)
class _Choice:
    detokenizer: Detokenizer
    timer: OutputTimer | None
    num_token_chars: int = 0
    ended: bool = False


class Assembler:
    """Turns the outputs of one request's choices into deltas of text.

    Args:
        tokenizer: the raw `tokenizers` object.
        num_choices: prompts times `sampling.n`.
        abort: ends a choice by index, when its stop string was found; its last output still comes.
        timers: makes a timer for each choice; None: nothing is timed.
        echoes: for each choice the prompt that comes before its own text; none: nothing does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        num_choices: int,
        *,
        return_kv_stats: bool,
        abort: Callable[[int], None],
        timers: Callable[[], OutputTimer] | None = None,
        echoes: Sequence[Echo] = (),
    ) -> None:
        assert len(echoes) in (0, num_choices)
        self._echoes = dict(enumerate(echoes))
        self.num_completion_tokens = 0
        self._tokenizer = tokenizer
        self._return_kv_stats = return_kv_stats
        self._abort = abort
        self._choices = [
            _Choice(Detokenizer(tokenizer, sampling.stop), timers() if timers is not None else None)
            for _ in range(num_choices)
        ]

    @property
    def ended(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.ended for choice in self._choices)

    def close(self) -> None:
        """No output will follow: choices that have not ended count as aborted."""
        for choice in self._choices:
            if not choice.ended and choice.timer is not None:
                choice.timer.finish(FinishReason.ABORT)

    def push(self, index: int, output: TokenOutput) -> ChoiceDelta:
        """What choice `index` gains by this output; nothing at all, sometimes.

        Raises:
            ApiError: the engine could not finish this choice.
        """
        choice, finish = self._choices[index], output.finish_reason
        echo = self._echoes.pop(index, None)
        text = "" if echo is None else echo.text
        reports = None
        if echo is not None and output.prompt_logprobs is not None:
            reports = self._prompt_reports(choice, echo, output.prompt_logprobs)
        was_stopped = choice.detokenizer.stopped
        if output.token_id is not None and not was_stopped:
            self.num_completion_tokens += 1
            if choice.timer is not None:
                choice.timer.token()
            if finish is not FinishReason.STOP:  # the token that means the end is not text
                text += choice.detokenizer.push(output.token_id)
            if output.logprobs is not None:
                reports = [*(reports or ()), self._report(choice, output.token_id, output.logprobs)]
        if finish is not None:
            text += choice.detokenizer.finish()
        if choice.detokenizer.stopped and finish is None and not was_stopped:
            self._abort(index)
        if choice.detokenizer.stopped and finish is FinishReason.ABORT:
            finish = FinishReason.STOP
        if finish is not None:
            choice.ended = True
            if choice.timer is not None:
                choice.timer.finish(finish, None if output.kv is None else output.kv.missed_mass)
        if finish is FinishReason.ERROR:
            raise ApiError(500, output.error or "the engine could not finish this request", code="engine_error")
        kv = dataclasses.asdict(output.kv) if self._return_kv_stats and output.kv is not None else None
        return ChoiceDelta(index=index, text=text, reports=reports, finish_reason=finish, kv=kv)

    def _prompt_reports(self, choice: _Choice, echo: Echo, logprobs: Sequence[TokenLogprobs]) -> list[TokenReport]:
        first = self._report(choice, echo.token_ids[0], None)
        rest = [self._report(choice, *pair) for pair in zip(echo.token_ids[1:], logprobs, strict=True)]
        choice.num_token_chars = len(echo.text)
        return [first, *rest]

    def _report(self, choice: _Choice, token_id: int, logprobs: TokenLogprobs | None) -> TokenReport:
        """`logprobs` None: nothing predicted this token."""
        token = self._token_text(token_id, None if logprobs is None else logprobs.logprob)
        offset = choice.num_token_chars
        choice.num_token_chars += len(token.text)
        top = () if logprobs is None else tuple(self._token_text(*pair) for pair in logprobs.top)
        return TokenReport(token, top, offset)

    def _token_text(self, token_id: int, logprob: float | None) -> TokenText:
        """A token alone; one that is no text by itself goes by its name in the vocabulary, which is unique."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        value = None if logprob is None else max(logprob, LOWEST_LOGPROB)
        if REPLACEMENT in text:
            return TokenText(self._tokenizer.id_to_token(token_id) or text, value, None)
        return TokenText(text, value, text.encode())


def join_deltas(parts: list[list[ChoiceDelta]], reported: bool) -> list[ChoiceDelta]:
    """Each choice's deltas as one, by index; a choice that was cut off has no finish reason.

    Args:
        parts: the deltas of each choice, in order.
        reported: whether logprobs were asked for.
    """
    return [
        ChoiceDelta(
            index=index,
            text="".join(delta.text for delta in deltas),
            reports=[report for delta in deltas for report in delta.reports or ()] if reported else None,
            finish_reason=deltas[-1].finish_reason if deltas else None,
            kv=deltas[-1].kv if deltas else None,
        )
        for index, deltas in enumerate(parts)
    ]


@dataclass(kw_only=True, slots=True)
class Generation:
    """One HTTP request on its way out."""

    stream: OutputStream
    tokenizer: Tokenizer
    sampling: SamplingParams
    num_prompt_tokens: int
    num_choices: int
    return_kv_stats: bool
    metrics: Metrics
    arrival: float
    """time.monotonic() when the request came."""
    echoes: Sequence[Echo] = ()
    """See `Assembler`."""
    num_completion_tokens: int = field(default=0, init=False)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """What each choice gains, as it comes; every choice ends with a delta that has a finish reason.

        Ends early, without a word, when the stream is closed because the client has gone. Closes the stream.

        Raises:
            ApiError: the engine could not finish an output.
        """
        assembler = Assembler(
            self.tokenizer,
            self.sampling,
            self.num_choices,
            return_kv_stats=self.return_kv_stats,
            abort=self.stream.abort,
            timers=lambda: OutputTimer(self.metrics, self.arrival),
            echoes=self.echoes,
        )
        try:
            async for index, output in self.stream:
                delta = assembler.push(index, output)
                self.num_completion_tokens = assembler.num_completion_tokens
                if delta.text or delta.reports or delta.finish_reason is not None:
                    yield delta
        finally:
            self.stream.close()
            assembler.close()

    async def whole(self) -> list[ChoiceDelta]:
        """Every choice as one delta, by index; choices cut off by a closed stream have no finish reason."""
        parts: list[list[ChoiceDelta]] = [[] for _ in range(self.num_choices)]
        async for delta in self.deltas():
            parts[delta.index].append(delta)
        return join_deltas(parts, self.sampling.logprobs is not None)


def echoes(body: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[Echo]:
    """What comes before each choice: its prompt where the body asks for that, else nothing.

    Args:
        prompts: the body's prompts as token ids.
    """
    if not (isinstance(body, CompletionRequest) and body.echo):
        return []
    found = []
    for given, ids in zip(body.prompts(), prompts, strict=True):
        text = given if isinstance(given, str) else tokenizer.decode(given, skip_special_tokens=False)
        found += [Echo(text, ids)] * body.n
    return found
