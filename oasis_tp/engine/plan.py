"""StepPlan: what one step computes. Pure Python, the same on every rank."""

import zlib
from dataclasses import dataclass, field

from oasis_tp.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens [start, stop) of a request; start is a multiple of the block size."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ForkStart:
    """A fork that begins to decode from `parent_id`'s finished prefill.

    `partial_source` is the parent's host block that holds the prompt's unfinished last block, -1 if there is none.
    """

    request: Request
    parent_id: int
    partial_source: int


@dataclass(slots=True)
class StepPlan:
    """One step: forks that start, rows that decode, prompt chunks; and what ended since the last step."""

    admitted: list[Request] = field(default_factory=list)
    released_rows: list[int] = field(default_factory=list)
    dropped_prefixes: list[int] = field(default_factory=list)
    keep_prefix_of: set[int] = field(default_factory=set)
    starts: list[ForkStart] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    drafts: list[tuple[int, ...]] = field(default_factory=list)
    """Per decoding request: the tokens to verify in rows after its committed one."""
    probes: list[tuple[int, ...]] = field(default_factory=list)
    """Per decoding request: the drafts after the last one to verify, whose rows only look ahead."""
    prefill: list[PrefillChunk] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return (
            self.num_decode_rows + sum(map(len, self.probes)) + sum(chunk.stop - chunk.start for chunk in self.prefill)
        )

    @property
    def num_decode_rows(self) -> int:
        """Rows whose logits are wanted: committed tokens and drafts to verify."""
        return len(self.decode) + sum(map(len, self.drafts))

    @property
    def sampled(self) -> list[Request]:
        """Requests that get tokens in this step, in this order: decoding ones, prompts that end, forks that start."""
        ended = [c.request for c in self.prefill if c.is_last and not c.request.spec.hold]
        return self.decode + ended + [start.request for start in self.starts]

    @property
    def is_empty(self) -> bool:
        return not (self.starts or self.decode or self.prefill or self.released_rows or self.dropped_prefixes)

    def fingerprint(self) -> int:
        """A hash for comparing plans over ranks."""
        facts = (
            [(r.request_id, r.row, r.pages, r.host_blocks) for r in self.admitted],
            self.released_rows,
            self.dropped_prefixes,
            [(s.request.request_id, s.parent_id) for s in self.starts],
            [(r.request_id, r.num_computed, r.output_ids[-1:]) for r in self.decode],
            self.drafts,
            self.probes,
            [(c.request.request_id, c.start, c.stop) for c in self.prefill],
        )
        return zlib.crc32(repr(facts).encode())
