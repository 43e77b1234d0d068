"""Contract 7: after thousands of random operations, copies on their way among them, every pool is whole again."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from oasis_tp.config import SparsityConfig
from oasis_tp.llm import LLM
from oasis_tp.request import RequestSpec, SamplingParams, TokenOutput
from tests.dist.test_contracts import SMALL
from tests.kernels.scrambled import Scrambled
from tests.tiny import make_tiny

NUM_OPERATIONS = 2000
WORDS = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42], list(range(100, 120))]
"""Prompts repeat a few phrases, so that prompt lookup finds drafts, right and wrong ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=2))


class Crowd:
    """Clients that submit, fork, hold, let go and leave at random."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.engine = llm.engine
        self.rng = random.Random(seed)
        self.open: dict[int, RequestSpec] = {}
        self.held: dict[int, RequestSpec] = {}
        self.holds: set[int] = set()
        self.ends: dict[int, str] = {}
        self.next_id = 0
        self.engine.on_output = self.receive

    def receive(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                assert output.request_id not in self.ends, "a request ended twice"
                self.ends[output.request_id] = str(output.finish_reason)
                self.open.pop(output.request_id, None)

    def prompt(self) -> tuple[int, ...]:
        length = self.rng.choice((3, 20, 64, 150, 300))
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self.rng.choice(WORDS)
        return tuple(tokens[:length])

    def submit(self, *, hold: bool = False, fork_of: int | None = None, prompt: tuple[int, ...] = ()) -> None:
        sampling = SamplingParams(max_tokens=self.rng.choice((1, 5, 40)), temperature=0.0, ignore_eos=True)
        sparsity = self.rng.choice(
            (None, None, SparsityConfig(attention="dense"), replace(self.engine.config.sparsity, prefetch="off"))
        )
        spec = RequestSpec(
            request_id=self.next_id,
            prompt_ids=prompt or self.prompt(),
            sampling=sampling,
            sparsity=None if hold else sparsity,
            fork_of=fork_of,
            hold=hold,
        )
        self.engine.submit(spec)
        self.next_id += 1
        self.holds.update({spec.request_id} if hold else ())
        (self.held if hold else self.open)[spec.request_id] = spec

    def operate(self) -> None:
        chance = self.rng.random()
        known = {**self.open, **self.held}
        if chance < 0.12 and len(self.open) < 12:
            self.submit()
        elif chance < 0.18 and known and len(self.open) < 12:
            parent = self.rng.choice(sorted(known))
            self.submit(fork_of=parent, prompt=known[parent].prompt_ids)
        elif chance < 0.20 and len(self.held) < 2:
            self.submit(hold=True)
        elif chance < 0.23 and self.held:
            self.engine.abort(self.held.pop(self.rng.choice(sorted(self.held))).request_id)
        elif chance < 0.28 and self.open:
            self.engine.abort(self.rng.choice(sorted(self.open)))
        else:
            self.engine.step()

    def leave(self) -> None:
        for request_id in self.held:
            self.engine.abort(request_id)
        self.engine.step()
        while self.engine.has_work:
            self.engine.step()


@pytest.mark.parametrize("attention", ["resolve", "paper"])
def test_no_leak_after_thousands_of_random_operations(model: str, attention: str) -> None:
    llm = LLM(
        model,
        attention=attention,
        hot_factor=3,
        prefetch="on",
        spec_method="ngram",
        spec_tokens=2,
        host_kv_gb=0.004,
        device_kv_gb=0.002,
        **(SMALL | {"recent_tokens": 32}),
    )
    transfers = llm.engine.runner.cache.transfers
    assert transfers is not None
    engine = Scrambled(random.Random(0), queued=False)
    transfers.engine = engine
    engine.attach(transfers)
    crowd = Crowd(llm, seed=11)
    for index in range(NUM_OPERATIONS // 2 if attention == "paper" else NUM_OPERATIONS):
        crowd.operate()
        if index % 10 == 0:
            llm.engine.check_integrity()
    crowd.leave()
    llm.engine.check_integrity()
    scheduler, runner = llm.engine.scheduler, llm.engine.runner
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert scheduler.runs.num_free == scheduler.runs.num_runs
    assert not runner.states and not runner._prompt_ends
    assert crowd.ends.keys() >= set(range(crowd.next_id)) - crowd.holds, "somebody waits for ever"
    assert {"length", "abort"} <= set(crowd.ends.values())
    stats = llm.engine.stats()
    assert stats.missed_blocks > 0 and stats.prefetch_used > 0 and stats.prefetch_wasted > 0
    assert (stats.draft_tokens > stats.accepted_tokens > 0) == (attention == "resolve")
