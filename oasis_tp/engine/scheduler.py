"""Scheduler: which requests run and what each step computes. Pure Python; every rank runs the same one.

Admission is first come, first served and reserves a request's row, pages and host blocks for its whole life, so
nothing is ever preempted or outgrown and whoever waits at the head gets in as soon as the requests before it end.
"""

from collections import deque
from dataclasses import dataclass, replace

from oasis_tp.config import SparsityConfig, SpeculationConfig
from oasis_tp.draft.pace import DraftPace
from oasis_tp.engine.plan import ForkStart, PrefillChunk, StepPlan
from oasis_tp.kv.blocks import PagePool, RunPool, blocks_of, runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, SelectionLayout, ceil_div
from oasis_tp.request import FinishReason, Request, RequestSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Everything admission and planning depend on; the same on every rank."""

    num_pages: int
    num_host_blocks: int
    host_tier: bool
    hot_factor: float
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_slots: int
    """Most pages that a request whose blocks come and go may own."""
    eos_token_ids: frozenset[int]
    speculation: SpeculationConfig
    num_probes: int = 0
    """Drafts after the last verified one that a step may carry in rows of their own."""
    on_cuda: bool = False
    sparsity: SparsityConfig


@dataclass(kw_only=True, slots=True)
class Prefix:
    """A finished prompt that forks may still start from: its host blocks, with a reference on their runs."""

    prompt_ids: tuple[int, ...]
    host_blocks: list[int]
    runs: list[int]
    held: bool


class Scheduler:
    """Waiting and running requests and the pools they draw from."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self.runs = RunPool(limits.num_host_blocks)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._runs_of: dict[int, list[int]] = {}
        self._prefixes: dict[int, Prefix] = {}
        self._paces: dict[int, DraftPace] = {}
        self._released_rows: list[int] = []
        self._dropped_prefixes: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._released_rows or self._dropped_prefixes)

    def selection(self, sparsity: SparsityConfig) -> SelectionLayout:
        """The selection layout of a request: its own --hot-factor, or the engine's where it says auto."""
        factor = self.limits.hot_factor if sparsity.hot_factor == "auto" else float(sparsity.hot_factor)
        num_drafts = self.limits.speculation.num_drafts + self.limits.num_probes
        return SelectionLayout.from_config(sparsity, self.limits.block_size, factor, num_drafts)

    def looks_ahead(self, request: Request) -> bool:
        """Its steps bring in blocks for the next ones: some are not on the device, and it wants that."""
        outgrows = len(request.pages) < self._num_blocks(request)
        return outgrows and request.sparsity.looks_ahead(self.limits.on_cuda)

    def make_request(self, spec: RequestSpec) -> Request:
        """Fill in what the spec leaves open.

        Raises:
            ValueError: the request could never run here; both numbers and the option are named.
        """
        limits = self.limits
        num_prompt = len(spec.prompt_ids)
        if num_prompt == 0:
            raise ValueError("prompt is empty; at least one token is needed")
        if num_prompt >= limits.max_model_len:
            raise ValueError(
                f"prompt has {num_prompt} tokens, but --max-model-len is {limits.max_model_len} and at least one token "
                f"must be generated: use at most {limits.max_model_len - 1} prompt tokens"
            )
        wanted = spec.sampling.max_tokens
        if wanted is None:
            wanted = limits.max_model_len - num_prompt
        wanted = max(wanted, 1)  # 0: one is drawn, so that numbers that are not finite are found, and not told
        if spec.hold:
            wanted = 0
        if num_prompt + wanted > limits.max_model_len:
            raise ValueError(
                f"prompt ({num_prompt} tokens) plus max_tokens ({wanted}) is {num_prompt + wanted}, but "
                f"--max-model-len is {limits.max_model_len}: ask for at most {limits.max_model_len - num_prompt} tokens"
            )
        request = Request(spec=spec, max_total_tokens=num_prompt + wanted, sparsity=spec.sparsity or limits.sparsity)
        if spec.hold and not limits.host_tier:
            raise ValueError("a held prompt lives in the host tier, and --host-kv-gb is 0: start with a host tier")
        num_pages = self._num_pages(request)
        if num_pages > limits.num_pages:
            raise ValueError(
                f"the request needs {num_pages} KV pages and the device has {limits.num_pages} in all: shorten it, "
                "or raise --device-kv-gb"
            )
        if limits.max_slots < num_pages < self._num_blocks(request):
            raise ValueError(
                f"budget_tokens {request.sparsity.budget_tokens}, recent_tokens {request.sparsity.recent_tokens} and "
                f"sink_blocks {request.sparsity.sink_blocks} keep {num_pages} blocks on the device and this engine was "
                f"planned for {limits.max_slots}: ask for less, or start it with a larger --budget-tokens or "
                "--hot-factor"
            )
        num_runs = runs_for(self._num_blocks(request))
        if spec.fork_of is not None:
            # Its own blocks, beside its parent's prompt.
            num_runs = runs_for(self._num_blocks(request) - num_prompt // limits.block_size)
            num_runs += runs_for(ceil_div(num_prompt, limits.block_size))
        if num_runs > self.runs.num_runs:
            run_tokens = limits.block_size * RUN_BLOCKS
            raise ValueError(
                f"the request needs room for {num_runs * run_tokens} tokens of KV and the host tier has "
                f"{self.runs.num_runs * run_tokens} in all: shorten it, or raise --host-kv-gb"
            )
        return request

    def add(self, spec: RequestSpec) -> None:
        """Queue a request that `make_request` accepts. A fork of what cannot be shared is a plain request."""
        parent = spec.fork_of
        for request in self.waiting:
            if request.request_id == parent and request.spec.fork_of is not None:
                parent = request.spec.fork_of  # a fork of a fork has the same prompt to wait for
                spec = replace(spec, fork_of=parent)
        shares = self.limits.host_tier and spec.sampling.prompt_logprobs is None
        if parent is not None and not (shares and self._prompt_of(parent) == spec.prompt_ids):
            spec = replace(spec, fork_of=None)
        self.waiting.append(self.make_request(spec))

    def abort(self, request_id: int) -> list[Request]:
        """End a request, or the hold on a prompt, wherever it stands. Returns what ended; unknown ids end nothing."""
        prefix = self._prefixes.get(request_id)
        if prefix is not None:
            prefix.held = False
            self._drop_idle_prefixes()
        for request in [*self.running.values(), *self.waiting]:
            if request.request_id == request_id:
                self._finish(request, FinishReason.ABORT)
                return [request]
        return []

    def plan(self) -> StepPlan:
        """Admit whoever fits, then give every decoding request a row and fill the step with prompt chunks."""
        plan = StepPlan(released_rows=self._released_rows, dropped_prefixes=self._dropped_prefixes)
        self._released_rows, self._dropped_prefixes = [], []
        while self.waiting:
            if self._admit(self.waiting[0], plan):
                self.waiting.popleft()
            elif self.running or not self._release_prefixes():
                break
        started = {start.request.request_id for start in plan.starts}
        for request in self.running.values():
            if request.num_computed >= request.num_prompt_tokens and request.request_id not in started:
                plan.decode.append(request)
        room = self.limits.max_num_batched_tokens - len(plan.decode)
        prefilling = any(request.num_computed < request.num_prompt_tokens for request in self.running.values())
        for request in plan.decode:
            # Drafts may not starve prompts: a block's worth of tokens is theirs.
            drafts = request.draft_ids[: max(0, room - self.limits.block_size * prefilling)]
            num_verified = self._num_to_verify(request)
            plan.drafts.append(drafts[:num_verified])
            plan.probes.append(drafts[num_verified : num_verified + self._num_probes(request)])
            room -= len(plan.drafts[-1]) + len(plan.probes[-1])
        for request in self.running.values():
            left = request.num_prompt_tokens - request.num_computed
            if left <= 0:
                continue
            size = left if left <= room else room // self.limits.block_size * self.limits.block_size
            if size == 0:
                break
            plan.prefill.append(PrefillChunk(request, request.num_computed, request.num_computed + size))
            room -= size
        plan.keep_prefix_of = {
            chunk.request.request_id for chunk in plan.prefill if chunk.is_last and self._is_wanted(chunk.request)
        }
        return plan

    def wanted_drafts(self) -> list[tuple[Request, int]]:
        """Requests that decode next and how many drafts each can use, those that can use none left out.

        Call after `commit`; drafts from before are dropped.
        """
        wanted = []
        for request in self.running.values():
            request.draft_ids = ()
            left = request.max_total_tokens - request.num_tokens - 1  # the last token's own row is never computed
            count = min(left, self._num_to_verify(request) + self._num_probes(request))
            if request.output_ids and count > 0:
                wanted.append((request, count))
        return wanted

    def commit(self, plan: StepPlan, token_ids: list[list[int]]) -> list[Request]:
        """Take the step's tokens, a list per `plan.sampled`: accepted drafts and the one after, or [-1].

        -1 means that this request's numbers were not finite. What follows a request's end is dropped from its list.
        Returns the requests that ended, their resources already given back.
        """
        for chunk in plan.prefill:
            chunk.request.num_computed = chunk.stop
            if chunk.is_last and chunk.request.request_id in plan.keep_prefix_of:
                self._keep_prefix(chunk.request)
        ended = []
        for index, (request, tokens) in enumerate(zip(plan.sampled, token_ids, strict=True)):
            reason = None
            if index < len(plan.decode):
                self._observe(request, len(plan.drafts[index]), len(tokens) - 1)
            for position, token_id in enumerate(tokens):
                request.num_computed += index < len(plan.decode)
                reason = self._accept(request, token_id)
                if reason is not None:
                    del tokens[position + 1 :]
                    break
            request.check_lengths()
            if reason is not None:
                self._finish(request, reason)
                ended.append(request)
        for chunk in plan.prefill:
            if chunk.is_last and chunk.request.spec.hold:
                self._finish(chunk.request, FinishReason.STOP)
        self._drop_idle_prefixes()
        return ended

    def refuse_stuck(self) -> int | None:
        """End the head of the queue if nothing can ever let it in: nothing runs, and held prompts take its room.

        Call after a plan that is empty. Returns the id of the request that ended, None if there is none.
        """
        if self.running or not self.waiting:
            return None
        request = self.waiting[0]
        self._finish(request, FinishReason.ERROR)
        return request.request_id

    def is_held(self, request_id: int) -> bool:
        """The prompt of a hold is computed and kept."""
        return request_id in self._prefixes

    def check_integrity(self) -> None:
        """Nothing lost, nothing owned twice; with no requests and no held prompts every pool is full again."""
        self.pages.check_integrity()
        self.runs.check_integrity()
        owned = [page for request in self.running.values() for page in request.pages]
        assert len(owned) == len(set(owned)) == self.limits.num_pages - self.pages.num_free, "pages leaked"
        assert len(self._free_rows) + len(self.running) == self.limits.max_num_seqs, "rows leaked"
        assert self._paces.keys() <= self.running.keys(), "draft paces leaked"
        if not self.running and not self._prefixes:
            assert self.runs.num_free == self.runs.num_runs, "host blocks leaked"

    def _num_blocks(self, request: Request) -> int:
        return ceil_div(request.max_total_tokens, self.limits.block_size)

    def _num_pages(self, request: Request) -> int:
        if request.spec.hold:
            return 0
        return self.selection(request.sparsity).num_pages(self._num_blocks(request), host_tier=self.limits.host_tier)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Reserve everything the request may ever need, or nothing; False: it waits, and so does all behind it."""
        parent_id = request.spec.fork_of
        prefix = self._prefixes.get(parent_id) if parent_id is not None else None
        if parent_id is not None and prefix is None:
            return False
        num_shared = request.num_prompt_tokens // self.limits.block_size if prefix else 0
        num_pages = self._num_pages(request)
        num_runs = runs_for(self._num_blocks(request) - num_shared)
        if not self._free_rows or num_pages > self.pages.num_free or num_runs > self.runs.num_free:
            return False
        request.row = self._free_rows.pop()
        request.pages = self.pages.take(num_pages)
        own = self.runs.take(num_runs)
        if prefix is None:
            request.host_blocks = blocks_of(own)
            self._runs_of[request.request_id] = own
        else:
            shared = runs_for(num_shared)
            self.runs.share(prefix.runs[:shared])
            request.host_blocks = prefix.host_blocks[:num_shared] + blocks_of(own)
            self._runs_of[request.request_id] = prefix.runs[:shared] + own
            request.num_computed = request.num_prompt_tokens
            partial = request.num_prompt_tokens % self.limits.block_size != 0
            assert parent_id is not None
            plan.starts.append(ForkStart(request, parent_id, prefix.host_blocks[num_shared] if partial else -1))
        self.running[request.request_id] = request
        plan.admitted.append(request)
        return True

    def _num_to_verify(self, request: Request) -> int:
        """Drafts worth a row each in the next step, by the acceptance seen and by what the request's slots allow."""
        if self.limits.speculation.num_drafts == 0 or request.sparsity.attention == "paper":
            return 0
        length = self._pace(request).length
        if len(request.pages) < self._num_blocks(request):
            # Each row may want a whole budget of its own.
            length = min(length, int(self.selection(request.sparsity).hot_factor) - 1)
        return length

    def _num_probes(self, request: Request) -> int:
        return self.limits.num_probes if self.looks_ahead(request) else 0

    def _pace(self, request: Request) -> DraftPace:
        pace = self._paces.get(request.request_id)
        if pace is None:
            pace = self._paces[request.request_id] = DraftPace(self.limits.speculation.num_drafts)
        return pace

    def _observe(self, request: Request, num_verified: int, num_accepted: int) -> None:
        if self.limits.speculation.num_drafts:
            request.num_draft_tokens += num_verified
            request.num_accepted_tokens += num_accepted
            self._pace(request).observe(num_verified, num_accepted)

    def _accept(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id < 0:
            return FinishReason.ERROR
        sampling = request.spec.sampling
        if sampling.max_tokens == 0:
            return FinishReason.LENGTH
        request.output_ids.append(token_id)
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self.limits.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if request.num_tokens >= request.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request_id = request.request_id
        self._paces.pop(request_id, None)
        if request_id in self.running:
            del self.running[request_id]
            self.pages.give_back(request.pages)
            self.runs.release(self._runs_of.pop(request_id))
            self._free_rows.append(request.row)
            self._released_rows.append(request.row)
        else:
            self.waiting.remove(request)
        if request_id not in self._prefixes:
            self._promote_forks(request_id)
        self._drop_idle_prefixes()

    def _prompt_of(self, request_id: int) -> tuple[int, ...] | None:
        if request_id in self._prefixes:
            return self._prefixes[request_id].prompt_ids
        for request in [*self.running.values(), *self.waiting]:
            if request.request_id == request_id and request.num_computed < request.num_prompt_tokens:
                return request.spec.prompt_ids
        return None

    def _forks_of(self, request_id: int) -> list[Request]:
        return [request for request in self.waiting if request.spec.fork_of == request_id]

    def _is_wanted(self, request: Request) -> bool:
        return request.spec.hold or bool(self._forks_of(request.request_id))

    def _keep_prefix(self, request: Request) -> None:
        num_runs = runs_for(ceil_div(request.num_prompt_tokens, self.limits.block_size))
        runs = self._runs_of[request.request_id][:num_runs]
        self.runs.share(runs)
        self._prefixes[request.request_id] = Prefix(
            prompt_ids=request.spec.prompt_ids,
            host_blocks=request.host_blocks[: num_runs * RUN_BLOCKS],
            runs=runs,
            held=request.spec.hold,
        )

    def _drop_idle_prefixes(self) -> None:
        for parent_id, prefix in list(self._prefixes.items()):
            if not prefix.held and not self._forks_of(parent_id):
                self.runs.release(prefix.runs)
                del self._prefixes[parent_id]
                self._dropped_prefixes.append(parent_id)

    def _release_prefixes(self) -> bool:
        """Let go of prompts that are kept for forks only, so that whoever is at the head fits; False: there are none.

        Called when nothing runs: then these alone may be in its way, and its turn comes before theirs.
        """
        parent_ids = [parent_id for parent_id, prefix in self._prefixes.items() if not prefix.held]
        for parent_id in parent_ids:
            self._promote_forks(parent_id)
        self._drop_idle_prefixes()
        return bool(parent_ids)

    def _promote_forks(self, parent_id: int) -> None:
        """There is no finished prompt to start from: the first fork prefills instead, the others follow that one."""
        forks = self._forks_of(parent_id)
        for index, fork in enumerate(forks):
            fork.spec = replace(fork.spec, fork_of=forks[0].request_id if index else None)
