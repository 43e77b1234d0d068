"""Requests: what a user asks for, what the engine keeps about it, what it reports. Pure Python."""

from dataclasses import dataclass, field
from enum import StrEnum

from oasis_tp.config import SparsityConfig


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class QueueFullError(ValueError):
    """More requests wait than --max-num-queued-reqs allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Raises:
        ValueError: a value outside its range; the message names the field, the value and what is allowed.
    """

    max_tokens: int | None = None
    """Most tokens to generate. None: the rest of the model's window. 0: the prompt is computed, and that is all."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Taken once from the logit of every token of the output so far."""
    frequency_penalty: float = 0.0
    """Taken as often as the token stands in the output so far."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, below 0) the logits of tokens of prompt and output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); each token once."""
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report each token's logprob and this many alternatives (0: the token's own only)."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens. Such a prompt is always computed, never taken from one that is held."""

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}; allowed: {allowed}")

        def is_whole(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        # Callers may write one string, or lists; inside they are tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or is_whole(value), "a whole number")
        for name in ("temperature", "top_p", "min_p"):
            check(name, isinstance(getattr(self, name), (int, float)), "a number")
        check("stop", all(isinstance(text, str) for text in self.stop), "a string, or several")
        check("stop_token_ids", all(map(is_whole, self.stop_token_ids)), "whole numbers")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "a whole number from 0")
        check("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0, up to 1")
        check("top_k", self.top_k >= -1, "-1 or 0 (off), or a whole number from 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2")
        check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0, up to 100")
        biased = dict(self.logit_bias)
        check("logit_bias", all(-100.0 <= bias <= 100.0 for bias in biased.values()), "-100 to 100 for each token")
        check("logit_bias", len(biased) == len(self.logit_bias), "each token once")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit whole number")
        check("n", 1 <= self.n <= 128, "1 to 128")
        check("stop", all(self.stop), "strings that are not empty")
        for name in ("logprobs", "prompt_logprobs"):
            check(name, getattr(self, name) is None or 0 <= getattr(self, name) <= 20, "0 to 20")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """One request as it enters the engine at rank 0 and is broadcast to all ranks.

    `request_id` is chosen by the caller and unique in the engine's life. `sampling.n` is 1 here: the front end turns
    n > 1 into n specs whose `fork_of` names the first. A fork must carry the same prompt; it waits for that
    prompt's prefill and shares its host KV read-only. `hold` prefills only and keeps the prompt's KV for forks until
    the request is aborted.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    sparsity: SparsityConfig | None = None
    fork_of: int | None = None
    hold: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KvStats:
    """What the KV tiers did for one request, summed over ranks. Bytes are whole-model; shares are means."""

    mode: str
    budget_tokens: int
    context_tokens: int
    hot_kv_bytes: int
    sketch_bytes: int
    host_kv_bytes: int
    dense_kv_bytes: int
    selected_blocks: int
    """Scored selections over all rows, layers and KV heads; pinned blocks are not counted."""
    missed_blocks: int
    """Those of them that had to be fetched from the host tier on the path."""
    prefetch_used: int = 0
    """Blocks brought in ahead and selected by a later row, which found them on the device."""
    prefetch_late: int = 0
    """Those that were selected while still on their way, and waited for."""
    prefetch_wasted: int = 0
    """Those that nobody selected before they were given up."""
    hit_rate: float | None
    """1 - missed / selected; None when nothing was selected."""
    missed_mass: float | None
    """Estimated attention mass outside the attended set, mean over rows, layers and heads; None for minmax."""
    attended_share: float
    """Attended tokens over context tokens, mean over decoded rows."""
    draft_tokens: int = 0
    """Drafted tokens that were verified."""
    accepted_tokens: int = 0
    """Those of them that were right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """One event of one request, produced at rank 0: a token, an end, or both.

    `error` is set with FinishReason.ERROR and is fit to be shown to the user. `prompt_logprobs`, where they were asked
    for, come with the first event: an entry per prompt token but the first, which nothing predicts.
    """

    request_id: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    kv: KvStats | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class Request:
    """A request inside the scheduler; the same on every rank.

    Lengths are ordered and asserted: 0 <= num_computed <= num_tokens <= max_total_tokens. `num_computed` counts
    tokens whose KV is in place.
    """

    spec: RequestSpec
    max_total_tokens: int
    sparsity: SparsityConfig
    output_ids: list[int] = field(default_factory=list)
    draft_ids: tuple[int, ...] = ()
    """What may follow the last token, proposed for the next step; the same on every rank."""
    num_computed: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> int:
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of prompt and output; both ends at most `num_tokens`."""
        split = self.num_prompt_tokens
        return [*self.spec.prompt_ids[start:stop], *self.output_ids[max(0, start - split) : max(0, stop - split)]]

    def check_lengths(self) -> None:
        assert 0 <= self.num_computed <= self.num_tokens <= self.max_total_tokens, (
            self.num_computed,
            self.num_tokens,
            self.max_total_tokens,
        )
