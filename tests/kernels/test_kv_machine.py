"""Block lifetime as a Hypothesis state machine: requests come, fork, draft, are rejected, and go in any order.

The real cache on pools that hand pages and host blocks from one request to the next, with copies that land whenever the
seed wants. Each attended row is compared with the truth; where no copy is on its way, so is every byte in both tiers.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from oasis_tp.engine.decode_batch import RowState
from oasis_tp.kv.blocks import PagePool, RunPool, blocks_of, runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, SelectionLayout
from oasis_tp.kv.transfers import Transfers
from oasis_tp.request import Request, RequestSpec, SamplingParams
from tests.kernels.scrambled import Scrambled
from tests.kernels.test_kv_cache import BLOCK, DIM, LAYERS, LAYOUT, TOLERANCE, Rig, Truth, make_truth

NUM_ROWS, NUM_PAGES, NUM_RUNS = 3, 30, 4
MAX_DRAFTS = 2


@dataclass
class Live:
    """A running request, the runs it holds a reference on, and how many of its tokens are computed.

    `prompt` are the host blocks that its prompt was stored in, by itself or by the request it was forked from.
    """

    truth: Truth
    request: Request
    state: RowState
    runs: list[int]
    prompt: list[int]
    computed: int

    @property
    def left(self) -> int:
        """Positions that may still be computed."""
        return self.truth.num_prompt + self.truth.num_decode - self.computed


class BlockLifetime(RuleBasedStateMachine):
    """Rows are rows of the residency tables; `live` is keyed by them."""

    @initialize(seed=st.integers(0, 2**30))
    def start(self, seed: int) -> None:
        self.rig = Rig(None, num_runs=NUM_RUNS)
        self.cache = self.rig.cache
        assert self.cache.transfers is not None
        self.engine = Scrambled(random.Random(seed), queued=False)
        self.cache.transfers.engine = self.engine
        self.engine.attach(self.cache.transfers)
        self.pages, self.runs = PagePool(NUM_PAGES), RunPool(NUM_RUNS * RUN_BLOCKS)
        self.live: dict[int, Live] = {}

    @rule(num_prompt=st.integers(1, 180), num_decode=st.integers(1, 80), hot_factor=st.sampled_from([1.0, 2.0, 3.0]))
    def admit(self, num_prompt: int, num_decode: int, hot_factor: float) -> None:
        truth = make_truth(num_prompt, num_decode, recent_tokens=32, prefetch="on", fetch_ratio=1.0)
        if (live := self.take_room(truth, hot_factor)) is not None:
            self.rig.prefill(truth, live.state, 64)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), hot_factor=st.sampled_from([1.0, 3.0]))
    def fork(self, data: st.DataObject, hot_factor: float) -> None:
        """Share a running request's full prompt blocks and go a way of one's own."""
        parent = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        truth = parent.truth
        full = truth.num_prompt // BLOCK
        live = self.take_room(truth, hot_factor, parent, full)
        if live is not None:
            partial = truth.num_prompt % BLOCK != 0
            self.rig.begin(truth, live.state, parent.prompt[full] if partial else -1)

    @precondition(lambda self: any(live.left for live in self.live.values()))
    @rule(data=st.data(), count=st.integers(1, 8))
    def decode(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.step(data)

    def step(self, data: st.DataObject) -> None:
        """Every request that goes on: its committed token, drafts of which some are accepted, and perhaps a probe."""
        rows: list[tuple[Live, int, bool, bool]] = []  # request, position, its token is right, it is a probe
        accepted: dict[int, int] = {}
        for row, live in sorted(self.live.items()):
            most = min(live.left - 1, MAX_DRAFTS)
            if not live.state.resident:
                most = min(most, int(live.state.selection.hot_factor) - 1)
            if most < 0:
                continue
            num_drafts = data.draw(st.integers(0, most))
            accepted[row] = data.draw(st.integers(0, num_drafts))
            for index in range(1 + num_drafts):
                rows.append((live, live.computed + index, index <= accepted[row], False))
            if live.left > 1 + num_drafts and data.draw(st.booleans()):
                rows.append((live, live.computed + 1 + num_drafts, data.draw(st.booleans()), True))
        if rows:
            self.run(rows)
        for row, num_accepted in accepted.items():
            live = self.live[row]
            computed = live.computed + 1 + num_accepted
            for block in range(live.computed // BLOCK, computed // BLOCK):
                self.cache.seal(live.state, block)
            live.computed = computed

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finished or aborted: whatever is on its way must not reach what the next owner holds."""
        live = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.cache.release(live.state)
        self.pages.give_back(live.request.pages)
        self.runs.release(live.runs)

    @rule()
    def land(self) -> None:
        self.engine.drain()
        for live in self.live.values():
            self.check_bytes(live)

    @invariant()
    def tables_agree(self) -> None:
        if hasattr(self, "pages"):
            self.pages.check_integrity()
            self.runs.check_integrity()
            for row, live in self.live.items():
                if not live.state.resident:
                    self.cache.residency.check_row(row)

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self.land()
            for live in self.live.values():
                self.pages.give_back(live.request.pages)
                self.runs.release(live.runs)
            assert self.pages.num_free == NUM_PAGES and self.runs.num_free == NUM_RUNS

    def take_room(
        self, truth: Truth, hot_factor: float, parent: Live | None = None, num_shared: int = 0
    ) -> Live | None:
        """Reserve as the scheduler does; None when there is no room."""
        total = truth.num_prompt + truth.num_decode
        selection = SelectionLayout.from_config(truth.sparsity, BLOCK, hot_factor, MAX_DRAFTS + 1)
        num_pages = selection.num_pages(LAYOUT.num_blocks(total), host_tier=True)
        num_runs = runs_for(LAYOUT.num_blocks(total) - num_shared)
        free = sorted(set(range(NUM_ROWS)) - self.live.keys())
        if not free or num_pages > self.pages.num_free or num_runs > self.runs.num_free:
            return None
        own = self.runs.take(num_runs)
        prompt = parent.prompt if parent else blocks_of(own)[: LAYOUT.num_blocks(truth.num_prompt)]
        shared = sorted({block // RUN_BLOCKS for block in prompt}) if parent else []
        self.runs.share(shared)
        request = Request(
            spec=RequestSpec(request_id=0, prompt_ids=(1,) * truth.num_prompt, sampling=SamplingParams()),
            max_total_tokens=total,
            sparsity=truth.sparsity,
            row=free[0],
            pages=self.pages.take(num_pages),
            host_blocks=(prompt[:num_shared] if parent else []) + blocks_of(own),
        )
        state = self.cache.admit(request, selection, prefetch=num_pages < LAYOUT.num_blocks(total))
        live = self.live[free[0]] = Live(truth, request, state, shared + own, prompt, truth.num_prompt)
        return live

    def run(self, rows: list[tuple[Live, int, bool, bool]]) -> None:
        """One step in all layers. What is rejected computes with other keys and values than the truth's."""
        batch = self.cache.prepare(
            [live.state for live, *_ in rows], [position for _, position, *_ in rows], [probe for *_, probe in rows]
        )
        for layer in range(LAYERS):
            q, k, v = (
                torch.stack(
                    [
                        getattr(live.truth, name)[layer, position] + (0 if right else 3)
                        for live, position, right, _ in rows
                    ]
                )
                for name in "qkv"
            )
            output = self.cache.decode(layer, batch, q, k, v)
            for index, (live, position, right, probe) in enumerate(rows):
                if right and not probe:
                    truth = live.truth
                    want = truth.output(layer, position, truth.attended(layer, position), tail=True)
                    torch.testing.assert_close(output[index].double(), want.view(-1, DIM), atol=TOLERANCE, rtol=0)

    def check_bytes(self, live: Live) -> None:
        """With no copy on its way: committed tokens lie where the tables say, sealed blocks at home too."""
        cache = self.cache
        assert cache.transfers is not None
        for layer in range(LAYERS):
            for head in range(LAYOUT.num_kv_heads):
                held = torch.arange(live.state.num_slots)
                if not live.state.resident:
                    held = cache.residency.block_in_slot[layer, live.state.row, head, : live.state.num_slots].long()
                for slot, block in enumerate(held.tolist()):
                    page = cache.pool.kv[layer, live.state.pages[slot], head]
                    self.rig._check_block(live.truth, layer, head, block, live.computed, page)
                for block in range(live.computed // BLOCK):
                    home = cache.transfers.host.kv[layer, head, live.state.host_blocks[block]]
                    self.rig._check_block(live.truth, layer, head, block, live.computed, home)


LONG_LIVES = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


@torch.inference_mode()
def test_no_block_is_lost_or_read_too_early_whatever_requests_do() -> None:
    run_state_machine_as_test(BlockLifetime, settings=LONG_LIVES)


@torch.inference_mode()
def test_the_machine_notices_a_block_that_is_read_before_it_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: Transfers, layer: int) -> None:
        self._prefetches[layer] = None

    monkeypatch.setattr(Transfers, "settle", settle)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(BlockLifetime, settings=settings(LONG_LIVES, max_examples=200))
