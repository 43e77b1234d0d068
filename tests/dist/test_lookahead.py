"""Contract 1 with lookahead: what is brought in ahead, whenever it lands, changes no bit of an answer."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.llm import LLM
from tests.dist.ranks import run_on_ranks
from tests.dist.test_contracts import SMALL, answers, assert_token_equal, prompts
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
