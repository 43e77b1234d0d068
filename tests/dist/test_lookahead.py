"""Contract 1 with lookahead: what is brought in ahead, whenever it lands, changes no bit of an answer."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.llm import LLM
from oasis_tp.request import RequestSpec, TokenOutput
from tests.dist.ranks import run_on_ranks
from tests.dist.test_contracts import GREEDY, SMALL, answers, assert_token_equal, prompts
from tests.dist.test_speculation import know_the_answers
from tests.kernels.scrambled import Scrambled
from tests.tiny import make_tiny

SETTINGS = SMALL | {"recent_tokens": 32}
DRAFTS = {"spec_method": "ngram", "spec_tokens": 2}
AHEAD = {"prefetch": "on", "fetch_ratio": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(model: str) -> list[dict[str, Any]]:
    return answers(LLM(model, hot_factor=2, **SETTINGS), prompts())


def start(model: str, compiled: bool = True, schedule: int | None = None, **how: Any) -> LLM:
    """An engine on one of the two CPU paths; `schedule` seeds copies that are delayed and reordered."""
    llm = LLM(model, **(SETTINGS | how))
    cache = llm.engine.runner.cache
    if not compiled:
        cache.cpu = None
    if schedule is not None:
        assert cache.transfers is not None
        engine = Scrambled(random.Random(schedule), queued=False)
        cache.transfers.engine = engine
        engine.attach(cache.transfers)
    return llm


def bits(answer: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    return [(a["ids"], a["logprobs"]) for a in answer]


def check_books(answer: list[dict[str, Any]]) -> None:
    """What was brought in ahead was used, late or wasted; the long prompts brought in something."""
    for one in answer:
        kv = one["kv"]
        assert min(kv["prefetch_used"], kv["prefetch_late"], kv["prefetch_wasted"]) >= 0
        if kv["hot_kv_bytes"] == kv["dense_kv_bytes"]:
            assert kv["prefetch_used"] + kv["prefetch_late"] + kv["prefetch_wasted"] == 0


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("hot_factor", [1, 2, 4])
def test_bit_equal_with_and_without_prefetch(model: str, hot_factor: int, compiled: bool) -> None:
    """Without drafts: the last row of a step orders what it ranks just under its budget."""
    plain = answers(start(model, compiled, hot_factor=hot_factor), prompts())
    ahead = answers(start(model, compiled, hot_factor=hot_factor, **AHEAD), prompts())
    assert bits(ahead) == bits(plain)
    check_books(ahead)
    assert all(a["kv"]["prefetch_used"] + a["kv"]["prefetch_wasted"] == 0 for a in plain)
    assert (ahead[0]["kv"]["prefetch_used"] > 0) == (hot_factor > 1), "at 1 every slot is selected in every step"


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("hot_factor", [1, 2, 4])
def test_bit_equal_with_probes_whether_they_order_anything_or_not(
    model: str, reference: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, hot_factor: int, compiled: bool
) -> None:
    """At fixed drafts, right and wrong ones: the same rows with nothing ordered, and with copies landing at any time."""
    results = []
    for schedule, orders in ((None, True), (None, False), (1, True), (2, True)):
        know_the_answers(monkeypatch, reference, 0.8)
        llm = start(model, compiled, schedule, hot_factor=hot_factor, **AHEAD, **DRAFTS)
        if not orders:
            order_nothing(llm)
        results.append(answers(llm, prompts()))
    assert all(bits(result) == bits(results[0]) for result in results)
    assert_token_equal(results[0], reference)
    for result in results:
        check_books(result)
    used, none = results[0][0]["kv"], results[1][0]["kv"]
    assert used["prefetch_used"] > 0 == none["prefetch_used"] + none["prefetch_wasted"]
    assert used["missed_blocks"] < none["missed_blocks"]
    assert results[2][0]["kv"]["prefetch_late"] > 0, "no copy was late: the schedule is too tame"


def order_nothing(llm: LLM) -> None:
    """The same rows, probes among them, and no background loads."""
    admit = llm.engine.runner.cache.admit
    llm.engine.runner.cache.admit = lambda request, selection, prefetch: admit(request, selection)  # type: ignore[method-assign]


def drive(llm: LLM, on_step: Callable[[], None] = lambda: None) -> dict[int, list[tuple[int, float]]]:
    """Eight requests of all lengths, two of them forks and three aborted on their way: tokens and logprobs of each."""
    engine, rng = llm.engine, random.Random(3)
    seen: dict[int, list[tuple[int, float]]] = {request_id: [] for request_id in range(8)}

    def receive(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.token_id is not None:
                assert output.error is None
                logprob = output.logprobs.logprob if output.logprobs else 0.0
                seen[output.request_id].append((output.token_id, logprob))

    engine.on_output = receive
    known = prompts()
    for request_id in range(8):
        fork_of = request_id - 4 if request_id in (4, 6) else None
        ids = known[request_id % 4][: None if fork_of is not None else rng.choice((None, 100, 250))]
        if request_id < 4:
            ids = known[request_id]
        sampling = replace(GREEDY, max_tokens=(96, 20, 60, 96, 70, 3, 96, 41)[request_id])
        engine.submit(RequestSpec(request_id=request_id, prompt_ids=tuple(ids), sampling=sampling, fork_of=fork_of))
    engine.step()
    num_steps = 0
    while engine.has_work:
        for aborted in {12: [2], 25: [0], 40: [7]}.get(num_steps, []):
            engine.abort(aborted)
        engine.step()
        engine.check_integrity()
        on_step()
        num_steps += 1
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert scheduler.runs.num_free == scheduler.runs.num_runs
    return seen


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
def test_a_batch_of_eight_with_aborts_is_bit_equal(
    model: str, reference: list[dict[str, Any]], compiled: bool, drafts: dict[str, Any]
) -> None:
    results = []
    for schedule, orders in ((None, False), (None, True), (5, True), (6, True)):
        llm = start(model, compiled, schedule, hot_factor=3, host_kv_gb=0.01, **AHEAD, **drafts)
        if not orders:
            order_nothing(llm)
        results.append(drive(llm))
    assert all(result == results[0] for result in results)
    for survivor in (1, 3, 4, 5, 6):
        assert len(results[0][survivor]) == (96, 20, 60, 96, 70, 3, 96, 41)[survivor]
    for request_id in (1, 3):
        ids = [token for token, _ in results[0][request_id]]
        assert ids == reference[request_id]["ids"][: len(ids)]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
def test_paper_mode_attends_what_was_ordered_whenever_it_lands(
    model: str, monkeypatch: pytest.MonkeyPatch, compiled: bool, drafts: dict[str, Any]
) -> None:
    how = {"attention": "paper", "hot_factor": 1.5, "max_num_seqs": 4} | drafts
    results = [answers(start(model, compiled, schedule, **how), prompts()) for schedule in (None, 1, 2)]
    assert all(bits(result) == bits(results[0]) for result in results)
    for answer in results[0]:
        kv = answer["kv"]
        assert (kv["mode"], kv["draft_tokens"], kv["prefetch_late"]) == ("paper", 0, 0)
    long = results[0][0]["kv"]
    assert long["missed_blocks"] > 0 < long["prefetch_used"]
    if not drafts:
        dense = answers(LLM(model, attention="dense", **SETTINGS), prompts())
        whole = answers(start(model, compiled, **(how | {"budget_tokens": 512})), prompts())
        assert_token_equal(whole, dense)


def rank_lookahead(rank: int, model: str, reference: list[dict[str, Any]], out: Path) -> None:
    results = []
    for how, orders in (({"hot_factor": 1}, True), ({"hot_factor": 2}, True), ({"hot_factor": 2}, False)):
        with pytest.MonkeyPatch.context() as patch:
            know_the_answers(patch, reference, 0.8)
            llm = start(model, comm="gloo", check_ranks=True, **AHEAD, **DRAFTS, **how)
            if not orders:
                order_nothing(llm)
            results.append(answers(llm, prompts()))
    results.append(answers(start(model, comm="gloo", attention="paper", hot_factor=1.5), prompts()))
    (out / f"{rank}.json").write_text(json.dumps(results))


def test_two_ranks_bring_in_ahead_and_answer_as_one(
    model: str, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_on_ranks(2, tmp_path / "store", rank_lookahead, model, reference, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for mine in first[:3]:
        assert_token_equal(mine, reference)
    assert bits(first[1]) == bits(first[2])
    assert first[1][0]["kv"]["prefetch_used"] > 0 == first[2][0]["kv"]["prefetch_used"]
    assert_token_equal(first[3], answers(start(model, attention="paper", hot_factor=1.5), prompts()))
    for mine, theirs in zip(first, second, strict=True):
        assert [a["ids"] for a in mine] == [a["ids"] for a in theirs]
