"""The engine with the Triton kernels, in triton's interpreter, beside its torch path: same tokens, same residency.

Steps are replayed from recordings as CUDA graphs would be, see oasis_tp/bench/graph_twin.py.
"""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from oasis_tp.bench.graph_twin import recorded
from oasis_tp.config import SparsityConfig
from oasis_tp.engine.cuda_graphs import MAX_GRAPHS, RECORD_AT, DecodeGraphs
from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams
from oasis_tp.sparse import triton_decode
from tests.tiny import make_tiny

SMALL: dict[str, Any] = {
    **{"budget_tokens": 64, "recent_tokens": 32, "hot_factor": 2, "max_num_seqs": 4, "max_num_batched_tokens": 256},
    **{"device_kv_gb": 0.001, "host_kv_gb": 0.002, "max_model_len": 272},
}
GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, logprobs=0)
LENGTHS = (247, 20)
AHEAD = SparsityConfig(budget_tokens=64, recent_tokens=32, hot_factor=2, prefetch="on")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    few = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    return str(make_tiny("llama", tmp_path_factory.mktemp("model"), **few))  # every launch takes its time here


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    long, short = ([rng.randrange(3, 311) for _ in range(length)] for length in LENGTHS)
    return [long[:120] * 2 + long[240:], short]


def answers(model: str, backend: str, *, graphs: bool = False, **how: Any) -> list[dict[str, Any]]:
    options = SMALL | how
    sparsity, both_long = options.pop("each", None), options.pop("both_long", False)
    asked = [prompts()[0], prompts()[0][::-1]] if both_long else prompts()
    llm = LLM(model, attention_backend=backend, extra_sketches=["2bit", "minmax"], **options)
    runner = llm.engine.runner
    if graphs:
        runner.graphs = DecodeGraphs(recorded)
    outputs = [output.outputs[0] for output in llm.generate(asked, GREEDY, sparsity=sparsity)]
    llm.engine.step()
    llm.engine.check_integrity()
    if runner.graphs is not None:
        assert runner.graphs.num_replays >= 5
    return [
        {"ids": o.token_ids, "logprobs": [t.logprob for t in o.logprobs], "kv": asdict(o.kv) if o.kv else {}}
        for o in outputs
    ]


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine["ids"] == theirs["ids"]
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
        for name, value in theirs["kv"].items():
            close = pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            assert mine["kv"][name] == close, name


MODES: list[dict[str, Any]] = [
    {"prefetch": "on"},
    {"prefetch": "on", "spec_method": "ngram", "spec_tokens": 1},
    {"attention": "paper", "spec_method": "ngram"},
    {"sketch": "1bit", "tail_estimate": False},
    {"each": [replace(AHEAD, sketch="minmax"), AHEAD], "both_long": True},
    {"each": [AHEAD, SparsityConfig(attention="dense")]},
    {"host_kv_gb": 0, "device_kv_gb": 0.004},
]


@pytest.mark.parametrize("how", MODES, ids=str)
def test_same_tokens_and_blocks_as_torch(model: str, how: dict[str, Any]) -> None:
    expected = answers(model, "torch", **how)
    assert len(set(expected[0]["ids"])) >= 10
    assert (expected[0]["kv"]["missed_blocks"] > 0) == ("host_kv_gb" not in how)
    assert_same(answers(model, "triton", **how), expected)


@pytest.mark.parametrize("how", MODES[:2], ids=str)
def test_replayed_steps_are_those_launched_one_by_one(model: str, how: dict[str, Any]) -> None:
    eager = answers(model, "triton", **how)
    assert eager[0]["kv"]["prefetch_used"] > 0
    assert answers(model, "triton", graphs=True, **how) == eager


def test_a_step_that_keeps_a_number_of_its_own_is_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick of the recorded step in place of the replayed one's: nothing is stamped as selected now."""
    eager = answers(model, "triton", prefetch="on")
    ticks: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(
        triton_decode.TritonStep,
        "tick",
        property(lambda step: ticks.setdefault(id(step), step.inputs[-1:].clone())),
    )
    got = answers(model, "triton", graphs=True, prefetch="on")
    assert got[0]["kv"] != eager[0]["kv"]


def test_graphs_that_were_not_used_for_longest_go() -> None:
    graphs = DecodeGraphs(recorded)
    for turn in range(1, RECORD_AT + 1):
        for key in range(MAX_GRAPHS + 1):
            (out,) = graphs.run(key, [torch.tensor([turn * key])], lambda inputs: [inputs[0] * 2])
            assert out.item() == 2 * turn * key
    assert graphs.num_replays == MAX_GRAPHS + 1 and len(graphs._graphs) == MAX_GRAPHS
    (out,) = graphs.run(5, [torch.tensor([7])], lambda inputs: [inputs[0] * 0])
    assert out.item() == 14, "the recorded call runs, not the one that was given now"
    (out,) = graphs.run(0, [torch.tensor([7])], lambda inputs: [inputs[0] * 0])
    assert out.item() == 0, "the one that has gone must be met as often as a new one"
