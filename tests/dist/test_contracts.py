"""The engine's contracts 1, 2, 3, 5 and 7 on a tiny random model: prompts many times the hot set, mixed with short ones.

Bit-equal: anything that only moves blocks about. Token-equal with logprobs within 1e-4: anything that changes the shape
of a matrix product (ranks, batch company, chunks), because sums then run in another order.
"""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.config import SparsityConfig
from oasis_tp.llm import LLM
from oasis_tp.request import RequestSpec, SamplingParams
from tests.dist.ranks import run_on_ranks
from tests.tiny import make_tiny

SMALL = {"budget_tokens": 64, "recent_tokens": 16, "max_num_seqs": 6, "max_num_batched_tokens": 256}
GREEDY = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True, logprobs=0)
LENGTHS = (333, 20, 256, 150)
TOLERANCE = 1e-4


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 311) for _ in range(length)] for length in LENGTHS]


def answers(llm: LLM, asked: list[list[int]], **how: Any) -> list[dict[str, Any]]:
    """Tokens, logprobs and tier statistics of every prompt; every pool is whole again afterwards."""
    outputs = [output.outputs[0] for output in llm.generate(asked, GREEDY, **how)]
    llm.engine.step()
    llm.engine.check_integrity()
    assert llm.engine.scheduler.pages.num_free == llm.engine.scheduler.pages.num_pages
    return [
        {"ids": o.token_ids, "logprobs": [t.logprob for t in o.logprobs], "kv": asdict(o.kv) if o.kv else None}
        for o in outputs
    ]


def assert_token_equal(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine["ids"] == theirs["ids"]
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=TOLERANCE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(model: str) -> list[dict[str, Any]]:
    """Hot factor 2 with a host tier, at TP 1: what the others are compared with."""
    result = answers(LLM(model, hot_factor=2, **SMALL), prompts())
    for length, answer in zip(LENGTHS, result, strict=True):
        assert len(set(answer["ids"])) >= 20, "too few distinct tokens to tell answers apart"
        assert len(answer["logprobs"]) == GREEDY.max_tokens
        # Whoever outgrew the hot set must have missed, and so evicted: its slots are all taken from the start.
        grew = length + 96 > 16 * (2 * 4 + 3)
        assert (answer["kv"]["missed_blocks"] > 0) == grew
    return result


@pytest.mark.parametrize("hot_factor", [1, 1.5, 4, "auto"])
def test_bit_equal_at_any_hot_factor(model: str, reference: list[dict[str, Any]], hot_factor: float | str) -> None:
    got = answers(LLM(model, hot_factor=hot_factor, **SMALL), prompts())
    assert [(a["ids"], a["logprobs"]) for a in got] == [(a["ids"], a["logprobs"]) for a in reference]
    if hot_factor in (1, 1.5):
        assert got[0]["kv"]["missed_blocks"] > reference[0]["kv"]["missed_blocks"]


def test_bit_equal_without_a_host_tier(model: str, reference: list[dict[str, Any]]) -> None:
    got = answers(LLM(model, hot_factor=2, host_kv_gb=0, **SMALL), prompts())
    assert [(a["ids"], a["logprobs"]) for a in got] == [(a["ids"], a["logprobs"]) for a in reference]
    assert [a["kv"]["missed_blocks"] for a in got] == [0] * len(LENGTHS)
    assert got[0]["kv"]["selected_blocks"] == reference[0]["kv"]["selected_blocks"] > 0


def test_bit_equal_from_a_cold_device(model: str, reference: list[dict[str, Any]]) -> None:
    """Every step starts with none of the candidates resident: the worst copy schedule there is."""
    llm = LLM(model, hot_factor=2, **SMALL)
    cache = llm.engine.runner.cache
    prepare = cache.prepare

    def cold(states: list, positions: list[int], probes: list[bool]) -> Any:
        for state, position in zip(states, positions, strict=True):
            if not state.resident:
                cache.drop_candidates(state, position)
        return prepare(states, positions, probes)

    cache.prepare = cold  # type: ignore[method-assign]
    got = answers(llm, prompts())
    assert [(a["ids"], a["logprobs"]) for a in got] == [(a["ids"], a["logprobs"]) for a in reference]
    assert got[0]["kv"]["missed_blocks"] == got[0]["kv"]["selected_blocks"]


@pytest.mark.parametrize("how", [{}, {"tail_estimate": False}, {"sketch": "1bit"}, {"sketch": "minmax"}], ids=str)
def test_compiled_path_gives_the_tokens_of_the_torch_path(model: str, how: dict[str, Any]) -> None:
    llm = LLM(model, hot_factor=1.5, **SMALL, **how)
    assert llm.engine.runner.cache.cpu is not None, "no C++ compiler"
    compiled = answers(llm, prompts())
    llm.engine.runner.cache.cpu = None
    plain = answers(llm, prompts())
    assert_token_equal(compiled, plain)
    for mine, theirs in zip(compiled, plain, strict=True):
        names = ["selected_blocks", "missed_blocks", "attended_share"]
        for name in names if how.get("sketch") == "minmax" else [*names, "missed_mass"]:
            assert mine["kv"][name] == pytest.approx(theirs["kv"][name], rel=1e-3), name


def test_same_tokens_alone_as_in_company(model: str, reference: list[dict[str, Any]]) -> None:
    llm = LLM(model, hot_factor=2, **SMALL)
    assert_token_equal([answers(llm, [prompt])[0] for prompt in prompts()], reference)


@pytest.mark.parametrize("chunk", [16, 80])
def test_same_tokens_at_any_chunk_size(model: str, reference: list[dict[str, Any]], chunk: int) -> None:
    got = answers(LLM(model, hot_factor=2, **(SMALL | {"max_num_batched_tokens": chunk + 6})), prompts())
    assert_token_equal(got, reference)


@pytest.mark.parametrize("sketch", ["2bit", "1bit", "minmax"])
def test_budget_of_the_context_is_dense(model: str, sketch: str) -> None:
    dense = answers(LLM(model, attention="dense", **SMALL), prompts())
    whole = answers(LLM(model, sketch=sketch, **(SMALL | {"budget_tokens": 512})), prompts())
    assert_token_equal(whole, dense)
    assert [a["kv"]["selected_blocks"] for a in whole] == [0] * len(LENGTHS)


def test_a_small_budget_is_not_dense(model: str, reference: list[dict[str, Any]]) -> None:
    """Else the comparisons above could not fail."""
    dense = answers(LLM(model, attention="dense", **SMALL), prompts())
    assert dense[0]["ids"] != reference[0]["ids"]


def test_forks_answer_like_their_prompt_computed_anew(model: str, reference: list[dict[str, Any]]) -> None:
    llm = LLM(model, hot_factor=2, **SMALL)
    for prompt, expected in zip(prompts(), reference, strict=True):
        with llm.hold(prompt) as held:
            forks = [llm.generate_from(held, GREEDY).outputs[0] for _ in range(2)]
            dense = llm.generate_from(held, GREEDY, sparsity=SparsityConfig(attention="dense")).outputs[0]
        got = [{"ids": fork.token_ids, "logprobs": [t.logprob for t in fork.logprobs]} for fork in forks]
        assert_token_equal(got, [expected, expected])
        assert dense.token_ids[0] == expected["ids"][0]
    llm.engine.check_integrity()
    assert llm.engine.scheduler.runs.num_free == llm.engine.scheduler.runs.num_runs


def test_several_choices_share_a_prompt_and_sample_apart(model: str) -> None:
    llm = LLM(model, hot_factor=1, **SMALL)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=5, n=4, ignore_eos=True)
    first, again = (llm.generate(prompts()[0], sampling)[0].outputs for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 4
    alone = llm.generate(prompts()[0], SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True))
    assert alone[0].outputs[0].token_ids == first[2].token_ids


def test_bit_equal_at_other_block_sizes(model: str) -> None:
    settings = SMALL | {"block_size": 32, "recent_tokens": 32, "budget_tokens": 96}
    few, many = (answers(LLM(model, hot_factor=factor, **settings), prompts()) for factor in (1, 3))
    assert [(a["ids"], a["logprobs"]) for a in few] == [(a["ids"], a["logprobs"]) for a in many]
    assert few[0]["kv"]["missed_blocks"] > many[0]["kv"]["missed_blocks"] > 0


def mixed_ends(llm: LLM) -> dict[int, str]:
    """Requests that end in every way there is: done, aborted at any stage, not finite."""
    poison, embedding = 310, llm.engine.runner.model.embedding
    with torch.inference_mode():
        embedding.weight[torch.arange(embedding.start, embedding.start + len(embedding.weight)) == poison] = float("nan")
    ends: dict[int, str] = {}
    poisoned: set[int] = set()
    llm.engine.on_output = lambda outputs: ends.update(
        {output.request_id: str(output.finish_reason) for output in outputs if output.finish_reason is not None}
    )
    rng = random.Random(1)
    for request_id in range(30):
        ids = [rng.randrange(3, 310) for _ in range(rng.choice((5, 40, 200, 333)))]
        if request_id % 7 == 3:
            ids[len(ids) // 2] = poison
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 17, 60)),
            temperature=0.0,
            ignore_eos=request_id % 2 == 0,
            prompt_logprobs=1 if request_id % 6 == 2 else None,
        )
        fork_of = request_id - 1 if request_id % 5 == 4 else None
        if fork_of is not None:
            ids = list(llm.engine.scheduler.waiting[-1].spec.prompt_ids) if llm.engine.scheduler.waiting else ids
        poisoned.update({request_id} if poison in ids else ())
        llm.engine.submit(
            RequestSpec(request_id=request_id, prompt_ids=tuple(ids), sampling=sampling, fork_of=fork_of)
        )
        if rng.random() < 0.7:
            llm.engine.step()
        if request_id % 4 == 1:
            llm.engine.abort(rng.randrange(request_id + 1))
        llm.engine.check_integrity()
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    scheduler = llm.engine.scheduler
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert scheduler.runs.num_free == scheduler.runs.num_runs
    assert not llm.engine.runner.states and not llm.engine.runner._prompt_ends
    assert not llm.engine.runner._prompt_logprobs
    # A poisoned neighbour harms nobody: only the poisoned end in errors, and all that ran to a token do.
    errors = {request_id for request_id, reason in ends.items() if reason == "error"}
    assert errors and errors <= poisoned and len(errors) == llm.engine.stats().corrupted_requests
    assert all(ends[request_id] in ("error", "abort") for request_id in poisoned)
    return ends


def test_nothing_is_lost_whatever_way_requests_end(model: str) -> None:
    ends = mixed_ends(LLM(model, hot_factor=1, host_kv_gb=0.02, device_kv_gb=0.01, **SMALL))
    assert sorted(ends) == list(range(30))
    assert {"length", "abort", "error"} <= set(ends.values())


def rank_answers(rank: int, model: str, size: int, out: Path) -> None:
    """On every rank: the batch, with plans compared each step, and one rank given less memory than the others."""
    less = {"host_kv_gb": 0.02 if rank == size - 1 else 0.05, "device_kv_gb": 0.004 if rank == 0 else 0.006}
    llm = LLM(model, hot_factor=2, check_ranks=True, comm="gloo", **SMALL, **less)
    limits = llm.engine.scheduler.limits
    ends = mixed_ends(LLM(model, hot_factor=1, check_ranks=True, comm="gloo", **SMALL, **less))
    (out / f"ends-{size}-{rank}.json").write_text(json.dumps(ends))
    for name, kwargs in (("batch", {}), ("dense", {"sparsity": SparsityConfig(attention="dense")})):
        result = {"answers": answers(llm, prompts(), **kwargs), "limits": [limits.num_pages, limits.num_host_blocks]}
        (out / f"{name}-{size}-{rank}.json").write_text(json.dumps(result))


@pytest.mark.parametrize("size", [2, 3])
def test_same_tokens_on_any_number_of_ranks(
    model: str, reference: list[dict[str, Any]], size: int, tmp_path: Path
) -> None:
    run_on_ranks(size, tmp_path / "store", rank_answers, model, size, tmp_path)
    ranks = [json.loads((tmp_path / f"batch-{size}-{rank}.json").read_text()) for rank in range(size)]
    assert_token_equal(ranks[0]["answers"], reference)
    assert ranks[0]["answers"][0]["kv"]["missed_blocks"] > 0
    for rank in ranks[1:]:
        assert [a["ids"] for a in rank["answers"]] == [a["ids"] for a in reference]
        assert rank["limits"] == ranks[0]["limits"]
    ends = [json.loads((tmp_path / f"ends-{size}-{rank}.json").read_text()) for rank in range(size)]
    assert all(mine == ends[0] and len(mine) == 30 for mine in ends)
    dense = json.loads((tmp_path / f"dense-{size}-0.json").read_text())["answers"]
    assert_token_equal(dense, answers(LLM(model, attention="dense", **SMALL), prompts()))
