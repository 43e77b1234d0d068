"""From engine outputs to text: one request's choices, detokenised, counted and timed."""

import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from oasis_tp.request import FinishReason, SamplingParams, TokenOutput
from oasis_tp.server.bridge import OutputStream
from oasis_tp.server.detokenizer import REPLACEMENT, Detokenizer
from oasis_tp.server.metrics import Metrics, OutputTimer
from oasis_tp.server.protocol import ApiError, ChoiceDelta, TokenReport, TokenText

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


@dataclass(slots=True)
class _Choice:
    detokenizer: Detokenizer
    timer: OutputTimer
    num_token_chars: int = 0
    ended: bool = False


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
    num_completion_tokens: int = field(default=0, init=False)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """What each choice gains, as it comes; every choice ends with a delta that has a finish reason.

        Ends early, without a word, when the stream is closed because the client has gone. Closes the stream.

        Raises:
            ApiError: the engine could not finish an output.
        """
        choices = [
            _Choice(Detokenizer(self.tokenizer, self.sampling.stop), OutputTimer(self.metrics, self.arrival))
            for _ in range(self.num_choices)
        ]
        try:
            async for index, output in self.stream:
                delta = self._delta(index, choices[index], output)
                if delta.text or delta.reports or delta.finish_reason is not None:
                    yield delta
        finally:
            self.stream.close()
            for choice in choices:
                if not choice.ended:
                    choice.timer.finish(FinishReason.ABORT)

    async def whole(self) -> list[ChoiceDelta]:
        """Every choice as one delta, by index; choices cut off by a closed stream have no finish reason."""
        parts: list[list[ChoiceDelta]] = [[] for _ in range(self.num_choices)]
        async for delta in self.deltas():
            parts[delta.index].append(delta)
        reported = self.sampling.logprobs is not None
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

    def _delta(self, index: int, choice: _Choice, output: TokenOutput) -> ChoiceDelta:
        finish, text, reports = output.finish_reason, "", None
        was_stopped = choice.detokenizer.stopped
        if output.token_id is not None and not was_stopped:
            self.num_completion_tokens += 1
            choice.timer.token()
            if finish is not FinishReason.STOP:  # the token that means the end is not text
                text = choice.detokenizer.push(output.token_id)
            if output.logprobs is not None:
                reports = [self._report(choice, output)]
        if finish is not None:
            text += choice.detokenizer.finish()
        if choice.detokenizer.stopped and finish is None and not was_stopped:
            self.stream.abort(index)
        if choice.detokenizer.stopped and finish is FinishReason.ABORT:
            finish = FinishReason.STOP
        if finish is not None:
            choice.ended = True
            choice.timer.finish(finish)
        if finish is FinishReason.ERROR:
            raise ApiError(500, output.error or "the engine could not finish this request", code="engine_error")
        kv = dataclasses.asdict(output.kv) if self.return_kv_stats and output.kv is not None else None
        return ChoiceDelta(index=index, text=text, reports=reports, finish_reason=finish, kv=kv)

    def _report(self, choice: _Choice, output: TokenOutput) -> TokenReport:
        assert output.logprobs is not None and output.token_id is not None
        token = self._token_text(output.token_id, output.logprobs.logprob)
        offset = choice.num_token_chars
        choice.num_token_chars += len(token.text)
        return TokenReport(token, tuple(self._token_text(*pair) for pair in output.logprobs.top), offset)

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        """A token alone; one that is no text by itself goes by its name in the vocabulary, which is unique."""
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        value = max(logprob, LOWEST_LOGPROB)
        if REPLACEMENT in text:
            return TokenText(self.tokenizer.id_to_token(token_id) or text, value, None)
        return TokenText(text, value, text.encode())
