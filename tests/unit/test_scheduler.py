"""The scheduler: admission for life, first come first served, forks, and that it always gets on."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oasis_tp.config import SparsityConfig, SpeculationConfig
from oasis_tp.engine.plan import StepPlan
from oasis_tp.engine.scheduler import Scheduler, SchedulerLimits
from oasis_tp.kv.layout import RUN_BLOCKS, SelectionLayout
from oasis_tp.request import FinishReason, Request, RequestSpec, SamplingParams

BLOCK = 16
EOS = 2
SPARSITY = SparsityConfig(budget_tokens=32, recent_tokens=16, hot_factor=1.5)


def make_limits(
    *,
    num_pages: int = 64,
    num_runs: int = 8,
    host_tier: bool = True,
    max_num_seqs: int = 4,
    max_model_len: int = 512,
    max_num_batched_tokens: int = 64,
    sparsity: SparsityConfig = SPARSITY,
    hot_factor: float = 1.5,
) -> SchedulerLimits:
    layout = SelectionLayout.from_config(sparsity, BLOCK, hot_factor)
    return SchedulerLimits(
        num_pages=num_pages,
        num_host_blocks=num_runs * RUN_BLOCKS,
        host_tier=host_tier,
        hot_factor=hot_factor,
        block_size=BLOCK,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_slots=layout.num_pages(-(-max_model_len // BLOCK), host_tier=host_tier),
        eos_token_ids=frozenset({EOS}),
        speculation=SpeculationConfig(),
        sparsity=sparsity,
    )


def make_spec(
    request_id: int,
    num_prompt: int,
    max_tokens: int | None = 8,
    *,
    fork_of: int | None = None,
    hold: bool = False,
    sparsity: SparsityConfig | None = None,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
    prompt = tuple(3 + i % 90 for i in range(num_prompt))
    return RequestSpec(
        request_id=request_id, prompt_ids=prompt, sampling=sampling, fork_of=fork_of, hold=hold, sparsity=sparsity
    )


def step(scheduler: Scheduler, token_id: int = 7) -> tuple[StepPlan, list[Request]]:
    plan = scheduler.plan()
    ended = scheduler.commit(plan, [[token_id] for _ in plan.sampled])
    scheduler.check_integrity()
    return plan, ended


def run_to_end(scheduler: Scheduler, max_steps: int = 500) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        assert len(plans) < max_steps, f"no progress: {[r.request_id for r in scheduler.waiting]} wait for ever"
        plans.append(step(scheduler)[0])
    return plans


def assert_all_free(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    assert scheduler.pages.num_free == scheduler.limits.num_pages
    assert scheduler.runs.num_free == scheduler.runs.num_runs
    assert not scheduler.running and not scheduler.waiting


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, forks, holds, aborts and steps on two schedulers that must agree, as two ranks must."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0
        self.order: list[int] = []
        self.admitted: list[int] = []
        self.prompt_done: set[int] = set()
        self.ended: set[int] = set()
        self.holds: set[int] = set()
        self.num_prompt: dict[int, int] = {}

    @initialize(
        num_pages=st.integers(6, 60),
        num_runs=st.integers(1, 5),
        host_tier=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.sampled_from([16, 17, 40, 64]),
        hot_factor=st.sampled_from([1.0, 1.5, 4.0]),
    )
    def start(self, **limits: object) -> None:
        self.limits = make_limits(max_model_len=320, **limits)  # type: ignore[arg-type]
        self.scheduler, self.twin = Scheduler(self.limits), Scheduler(self.limits)

    @rule(
        num_prompt=st.integers(1, 120) | st.sampled_from([16, 32, 256, 300]),
        max_tokens=st.integers(1, 60) | st.none(),
        dense=st.booleans(),
        hold=st.integers(0, 5).map(lambda n: n == 0),
    )
    def add(self, num_prompt: int, max_tokens: int | None, dense: bool, hold: bool) -> None:
        sparsity = replace(SPARSITY, attention="dense") if dense else None
        self._submit(make_spec(self.next_id, num_prompt, max_tokens, hold=hold, sparsity=sparsity))

    @rule(
        which=st.integers(0, 7), count=st.integers(1, 3), max_tokens=st.integers(1, 60), num_prompt=st.integers(1, 60)
    )
    def add_family(self, which: int, count: int, max_tokens: int, num_prompt: int) -> None:
        """Forks of some request that was seen before, whatever became of it, or of a new one."""
        if which < len(self.order):
            first = self.order[-1 - which]
            num_prompt = self.num_prompt[first]
        else:
            first = self.next_id
            if not self._submit(make_spec(first, num_prompt, max_tokens)):
                return
        for _ in range(count):
            self._submit(make_spec(self.next_id, num_prompt, max_tokens, fork_of=first))

    def _submit(self, spec: RequestSpec) -> bool:
        self.next_id += 1
        try:
            self.scheduler.make_request(spec)
        except ValueError:
            return False
        for scheduler in (self.scheduler, self.twin):
            scheduler.add(spec)
        self.order.append(spec.request_id)
        self.num_prompt[spec.request_id] = len(spec.prompt_ids)
        if spec.hold:
            self.holds.add(spec.request_id)
        return True

    @precondition(lambda self: self.order)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        request_id = self.order[which % len(self.order)]
        was_open = request_id not in self.ended
        ended = [s.abort(request_id) for s in (self.scheduler, self.twin)]
        assert [r.request_id for r in ended[0]] == [r.request_id for r in ended[1]] == [request_id] * was_open
        assert all(r.finish_reason is FinishReason.ABORT for r in ended[0])
        self.ended.add(request_id)
        self.holds.discard(request_id)

    @rule(count=st.integers(1, 8), seed=st.integers(0, 1000))
    def steps(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            self._step(draw)

    def _step(self, draw: random.Random) -> None:
        plan, other = self.scheduler.plan(), self.twin.plan()
        assert plan.fingerprint() == other.fingerprint()
        self._check_plan(plan)
        tokens = draw.choices([7, 8, EOS, -1], [30, 30, 2, 1], k=len(plan.sampled))
        ended = self.scheduler.commit(plan, [[token] for token in tokens])
        assert [r.request_id for r in ended] == [
            r.request_id for r in self.twin.commit(other, [[token] for token in tokens])
        ]
        self.ended |= {r.request_id for r in ended}
        for chunk in plan.prefill:
            if chunk.is_last:
                self.prompt_done.add(chunk.request.request_id)
                if chunk.request.spec.hold:
                    self.ended.add(chunk.request.request_id)

    def _check_plan(self, plan: StepPlan) -> None:
        self.admitted += [r.request_id for r in plan.admitted]
        assert self.admitted == sorted(self.admitted), "admission is not first come, first served"
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        for chunk in plan.prefill:
            assert chunk.start < chunk.stop <= chunk.request.num_prompt_tokens
            assert chunk.start == chunk.request.num_computed and chunk.start % BLOCK == 0
            assert chunk.is_last or chunk.stop % BLOCK == 0
        for start in plan.starts:
            assert start.parent_id in self.prompt_done, "a fork started before its parent's prompt was done"
            assert start.request.num_computed == start.request.num_prompt_tokens
        ids = [r.request_id for r in plan.sampled]
        assert len(ids) == len(set(ids)), "a request is sampled twice in one step"

    @invariant()
    def nothing_is_owned_twice(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        owners: dict[int, tuple[int, int]] = {}
        for request in scheduler.running.values():
            request.check_lengths()
            assert len(set(request.host_blocks)) == len(request.host_blocks)
            for index, block in enumerate(request.host_blocks[: -(-request.max_total_tokens // BLOCK)]):
                other = owners.setdefault(block, (request.request_id, index))
                if other[0] != request.request_id:
                    shared = min(request.num_prompt_tokens, self.num_prompt[other[0]]) // BLOCK
                    assert other[1] == index < shared, f"host block {block} belongs to two requests"
                    assert scheduler.running[other[0]].spec.prompt_ids == request.spec.prompt_ids
        rows = [r.row for r in scheduler.running.values()]
        assert len(rows) == len(set(rows))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for request_id in sorted(self.holds):
            for scheduler in (self.scheduler, self.twin):
                scheduler.abort(request_id)
        draw = random.Random(0)
        # Every running request gains a token or a chunk at least every second step, and one always runs.
        bound = 20 + sum(
            2 * (r.max_total_tokens + 2) for r in [*self.scheduler.waiting, *self.scheduler.running.values()]
        )
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self._step(draw)
            self.nothing_is_owned_twice()
        assert not self.scheduler.has_work, f"{[r.request_id for r in self.scheduler.waiting]} wait for ever"
        assert_all_free(self.scheduler)
        assert_all_free(self.twin)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking a failure takes minutes: add Phase.shrink when looking into one
)


@pytest.mark.parametrize(
    ("spec", "limits", "said"),
    [
        (make_spec(0, 0), {}, ["empty"]),
        (make_spec(0, 512), {}, ["512 tokens", "--max-model-len is 512", "511"]),
        (make_spec(0, 600), {}, ["600", "512", "--max-model-len"]),
        (make_spec(0, 500, 13), {}, ["500", "13", "513", "512", "at most 12"]),
        (make_spec(0, 300, sparsity=replace(SPARSITY, attention="dense")), {"num_pages": 19}, ["20", "19", "--device"]),
        (make_spec(0, 500), {"num_runs": 1}, ["512", "256", "--host-kv-gb"]),
        (make_spec(0, 500, sparsity=replace(SPARSITY, budget_tokens=240)), {}, ["240", "26", "6", "--budget-tokens"]),
        (make_spec(1, 5, fork_of=0), {"num_runs": 1}, ["512", "256", "--host-kv-gb"]),
        (make_spec(0, 20, hold=True), {"host_tier": False}, ["--host-kv-gb is 0"]),
    ],
)
def test_what_can_never_run_is_refused_with_both_numbers(
    spec: RequestSpec, limits: dict[str, int], said: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        Scheduler(make_limits(**limits)).make_request(spec)  # type: ignore[arg-type]
    assert all(part in str(error.value) for part in said), error.value


def test_the_longest_prompt_that_is_allowed_gives_one_token() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_spec(0, 511, None))
    run_to_end(scheduler)
    assert_all_free(scheduler)


@pytest.mark.parametrize(("num_prompt", "budget"), [(100, 64), (97, 40), (33, 16), (16, 16), (5, 17)])
def test_chunks_end_on_block_borders_and_cover_the_prompt(num_prompt: int, budget: int) -> None:
    scheduler = Scheduler(make_limits(max_num_batched_tokens=budget, max_num_seqs=1))
    scheduler.add(make_spec(0, num_prompt))
    chunks = [(c.start, c.stop) for plan in run_to_end(scheduler) for c in plan.prefill]
    assert [start for start, _ in chunks] == [0] + [stop for _, stop in chunks[:-1]]
    assert chunks[-1][1] == num_prompt
    assert all(stop % BLOCK == 0 and stop - start <= budget for start, stop in chunks[:-1])


def test_decoded_rows_come_first_and_chunks_take_what_is_left() -> None:
    scheduler = Scheduler(make_limits(max_num_batched_tokens=40))
    scheduler.add(make_spec(0, 5))
    step(scheduler)
    scheduler.add(make_spec(1, 100))
    plan = scheduler.plan()
    assert [r.request_id for r in plan.decode] == [0]
    assert [(c.start, c.stop) for c in plan.prefill] == [(0, 32)]


def test_a_request_ends_at_its_length_at_eos_at_a_stop_token_or_at_a_number_that_is_none() -> None:
    scheduler = Scheduler(make_limits(max_num_seqs=5))
    scheduler.add(make_spec(0, 5, 2))
    scheduler.add(make_spec(1, 5))
    scheduler.add(make_spec(2, 5, stop_token_ids=(9,)))
    scheduler.add(make_spec(3, 5))
    scheduler.add(make_spec(4, 5, ignore_eos=True))
    plan = scheduler.plan()
    assert [r.request_id for r in plan.sampled] == [0, 1, 2, 3, 4]
    ended = scheduler.commit(plan, [[7], [EOS], [9], [-1], [EOS]])
    assert {r.request_id: r.finish_reason for r in ended} == {
        1: FinishReason.STOP,
        2: FinishReason.STOP,
        3: FinishReason.ERROR,
    }
    assert ended[-1].output_ids == []
    _, ended = step(scheduler)
    assert [(r.request_id, r.finish_reason, len(r.output_ids)) for r in ended] == [(0, FinishReason.LENGTH, 2)]
    assert list(scheduler.running) == [4]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = Scheduler(make_limits(num_runs=2))
    scheduler.add(make_spec(0, 5, 20))
    scheduler.add(make_spec(1, 300, 5))
    scheduler.add(make_spec(2, 5, 1))
    first = [r.request_id for plan in run_to_end(scheduler) for r in plan.admitted]
    assert first == [0, 1, 2]
    assert_all_free(scheduler)


@pytest.mark.parametrize("scarce", [{"num_pages": 9}, {"num_runs": 1}, {"max_num_seqs": 1}])
def test_who_does_not_fit_now_waits_for_whoever_is_before_it(scarce: dict[str, int]) -> None:
    """Two requests of 6 pages and one run each."""
    scheduler = Scheduler(make_limits(**scarce))  # type: ignore[arg-type]
    for request_id in (0, 1):
        scheduler.add(make_spec(request_id, 100))
    step(scheduler)
    assert list(scheduler.running) == [0] and [r.request_id for r in scheduler.waiting] == [1]
    run_to_end(scheduler)
    assert_all_free(scheduler)


def family(scheduler: Scheduler, first: int, num_prompt: int, size: int, max_tokens: int = 8) -> None:
    scheduler.add(make_spec(first, num_prompt, max_tokens))
    for index in range(1, size):
        scheduler.add(make_spec(first + index, num_prompt, max_tokens, fork_of=first))


@pytest.mark.parametrize("num_prompt", [5, 16, 40, 100, 256, 260])
@pytest.mark.parametrize("num_runs", [1, 2, 3, 4])
def test_two_families_get_through_any_host_tier_that_accepts_them(num_prompt: int, num_runs: int) -> None:
    scheduler = Scheduler(make_limits(num_runs=num_runs))
    try:
        for spec in (make_spec(0, num_prompt), make_spec(1, num_prompt, fork_of=0)):
            scheduler.make_request(spec)
    except ValueError:
        return
    family(scheduler, 0, num_prompt, 3)
    family(scheduler, 10, num_prompt, 3)
    run_to_end(scheduler)
    assert_all_free(scheduler)


def test_a_late_fork_behind_a_large_request_holds_nobody_up() -> None:
    """The prefix that is kept for request 2 leaves request 1, ahead of it, no room."""
    scheduler = Scheduler(make_limits(num_runs=2))
    scheduler.add(make_spec(0, 100, 4))
    step(scheduler)
    scheduler.add(make_spec(1, 500, 4))  # all of the host tier
    scheduler.add(make_spec(2, 100, 4, fork_of=0))
    plans = run_to_end(scheduler)
    assert [r.request_id for plan in plans for r in plan.admitted] == [1, 2]
    assert_all_free(scheduler)


def test_forks_share_whole_prompt_blocks_and_nothing_else() -> None:
    scheduler = Scheduler(make_limits())
    family(scheduler, 0, 40, 3)
    step(scheduler)
    plan = scheduler.plan()
    assert [(s.request.request_id, s.parent_id) for s in plan.starts] == [(1, 0), (2, 0)]
    parent, *forks = scheduler.running.values()
    for start, fork in zip(plan.starts, forks, strict=True):
        assert fork.host_blocks[:2] == parent.host_blocks[:2]
        assert not set(fork.host_blocks[2:]) & set(parent.host_blocks)
        assert start.partial_source == parent.host_blocks[2]
    assert not set(forks[0].host_blocks[2:]) & set(forks[1].host_blocks)


def test_a_prompt_of_whole_blocks_leaves_forks_no_partial_block() -> None:
    scheduler = Scheduler(make_limits())
    family(scheduler, 0, 32, 2)
    step(scheduler)
    assert [s.partial_source for s in scheduler.plan().starts] == [-1]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_parent_that_is_aborted_before_during_or_after_its_prompt_leaves_its_forks_running(steps: int) -> None:
    """Two rows: the second fork still waits when the parent goes."""
    scheduler = Scheduler(make_limits(max_num_batched_tokens=32, max_num_seqs=2))
    family(scheduler, 0, 60, 3, max_tokens=20)
    for _ in range(steps):
        step(scheduler)
    assert [r.request_id for r in scheduler.abort(0)] == [0]
    plans = run_to_end(scheduler)
    sampled = [r.request_id for plan in plans for r in plan.sampled]
    prefilled = {c.request.request_id for plan in plans for c in plan.prefill}
    assert sampled.count(1) + (steps == 3) == 20 and sampled.count(2) == 20
    assert prefilled == ({1} if steps < 2 else set()), "the prompt is computed once more, or not at all"
    assert_all_free(scheduler)


def test_a_parent_that_ends_at_its_first_token_leaves_its_prompt_to_its_forks() -> None:
    scheduler = Scheduler(make_limits(max_num_seqs=1))
    family(scheduler, 0, 40, 3)
    _, ended = step(scheduler, EOS)
    assert [r.request_id for r in ended] == [0]
    plans = run_to_end(scheduler)
    assert not any(plan.prefill for plan in plans)
    assert {s.request.request_id for plan in plans for s in plan.starts} == {1, 2}
    assert [parent for plan in plans for parent in plan.dropped_prefixes] == [0]
    assert_all_free(scheduler)


def test_a_parent_whose_numbers_are_none_leaves_its_forks_to_their_own_prompts_end() -> None:
    scheduler = Scheduler(make_limits())
    family(scheduler, 0, 40, 2)
    step(scheduler, -1)
    run_to_end(scheduler)
    assert_all_free(scheduler)


def test_a_held_prompt_serves_forks_until_it_is_let_go() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_spec(0, 40, hold=True))
    plan, _ = step(scheduler)
    assert plan.sampled == [] and plan.keep_prefix_of == {0}
    run_to_end(scheduler)
    held = scheduler.runs.num_runs - scheduler.runs.num_free
    assert held == 1 and scheduler.pages.num_free == scheduler.limits.num_pages
    for request_id in (1, 2):
        scheduler.add(make_spec(request_id, 40, fork_of=0))
        assert not any(plan.prefill for plan in run_to_end(scheduler))
    scheduler.add(make_spec(3, 40, fork_of=0))
    assert scheduler.abort(0) == []
    assert not any(plan.prefill for plan in run_to_end(scheduler)), "the waiting fork may still use it"
    assert_all_free(scheduler)


def test_a_fork_of_another_prompt_of_nobody_or_without_a_host_tier_is_a_plain_request() -> None:
    other = replace(make_spec(1, 40, fork_of=0), prompt_ids=(5,) * 40)
    for scheduler, spec in (
        (Scheduler(make_limits()), other),
        (Scheduler(make_limits()), make_spec(1, 40, fork_of=77)),
        (Scheduler(make_limits(host_tier=False)), make_spec(1, 40, fork_of=0)),
    ):
        scheduler.add(make_spec(0, 40))
        scheduler.add(spec)
        assert {c.request.request_id for plan in run_to_end(scheduler) for c in plan.prefill} == {0, 1}
        assert_all_free(scheduler)


def test_a_plan_differs_in_its_fingerprint_by_any_fact() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_spec(0, 40))
    step(scheduler)
    before = scheduler.plan().fingerprint()
    scheduler.running[0].output_ids[-1] += 1
    assert scheduler.plan().fingerprint() != before


def speculating(num_probes: int = 0, **changes: Any) -> Scheduler:
    speculation = SpeculationConfig(spec_method="ngram", spec_tokens=4)
    limits = make_limits(**changes)
    return Scheduler(replace(limits, max_slots=limits.max_slots + 1, speculation=speculation, num_probes=num_probes))


def test_drafts_are_split_into_rows_to_verify_and_probes() -> None:
    scheduler = speculating(num_probes=1, sparsity=replace(SPARSITY, hot_factor=6.0, prefetch="on"), hot_factor=6.0)
    scheduler.add(make_spec(0, 280, 40))
    while not scheduler.wanted_drafts():
        step(scheduler)
    ((request, count),) = scheduler.wanted_drafts()
    assert count == 5, "four to verify and one to look ahead"
    request.draft_ids = (11, 12, 13, 14, 15)
    plan = scheduler.plan()
    assert (plan.drafts, plan.probes) == ([(11, 12, 13, 14)], [(15,)])
    assert (plan.num_decode_rows, plan.num_tokens) == (5, 6)
    scheduler.commit(plan, [[7]])  # the first draft was wrong: a pause
    assert scheduler.wanted_drafts() == [(request, 1)] and request.draft_ids == ()
    request.draft_ids = (16,)
    plan = scheduler.plan()
    assert (plan.drafts, plan.probes) == ([()], [(16,)]), "who pauses verifies nothing and still looks ahead"


@pytest.mark.parametrize(
    ("num_prompt", "how", "expected"),
    [
        (280, {"prefetch": "on"}, [1]),
        (280, {"prefetch": "auto"}, []),  # on a CPU
        (20, {"prefetch": "on"}, [4]),  # everything is on the device
        (280, {"attention": "paper"}, [1]),
        (280, {"attention": "paper", "hot_factor": 3.0}, [1]),  # its drafts are never verified
        (280, {"prefetch": "on", "hot_factor": 3.0}, [3]),
    ],
)
def test_who_looks_ahead_asks_for_a_draft_to_do_it(num_prompt: int, how: dict[str, Any], expected: list[int]) -> None:
    sparsity = replace(SPARSITY, **how)
    scheduler = speculating(num_probes=1, sparsity=sparsity, hot_factor=4.0)
    scheduler.add(make_spec(0, num_prompt, 40))
    while not scheduler.running or next(iter(scheduler.running.values())).num_computed < num_prompt:
        step(scheduler)
    assert [count for _, count in scheduler.wanted_drafts()] == expected


def test_no_draft_stands_past_the_end_of_its_request() -> None:
    scheduler = speculating(num_probes=2)
    scheduler.add(make_spec(0, 20, 4))
    counts = []
    step(scheduler)
    while scheduler.running:
        counts.append(sum(count for _, count in scheduler.wanted_drafts()))
        step(scheduler)
    assert counts == [2, 1, 0], "four tokens: after the first one, rows for two more, then one, then none"


def test_who_outgrows_its_slots_verifies_fewer_than_its_hot_factor() -> None:
    for hot_factor, expected in ((1.0, []), (2.5, [1]), (4.0, [3])):
        scheduler = speculating(sparsity=replace(SPARSITY, hot_factor=hot_factor), hot_factor=hot_factor)
        scheduler.add(make_spec(0, 280, 40))
        while not scheduler.running or next(iter(scheduler.running.values())).num_computed < 280:
            step(scheduler)
        request = next(iter(scheduler.running.values()))
        assert len(request.pages) < request.max_total_tokens / BLOCK
        assert [count for _, count in scheduler.wanted_drafts()] == expected


def test_drafts_take_no_room_from_decoding_rows_and_prompts() -> None:
    scheduler = speculating(max_num_batched_tokens=2 * BLOCK)
    scheduler.add(make_spec(0, 20, 40))
    step(scheduler)
    scheduler.add(make_spec(1, 60, 40))
    ((request, _),) = scheduler.wanted_drafts()
    request.draft_ids = tuple(range(30, 60))
    plan = scheduler.plan()
    assert plan.num_tokens <= 2 * BLOCK and plan.prefill and len(plan.drafts[0]) == 4
