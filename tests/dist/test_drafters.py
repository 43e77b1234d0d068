"""Contract 4 for every drafter: no token and no logprob changes, in a batch of 8 mixed requests with aborts, at TP 1 and 2.

And what drafters are for: a draft model that knows the answer is accepted, an EAGLE-3 head proposes what its published
description says, and whoever never hits soon costs nothing.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oasis_tp.config import SparsityConfig
from oasis_tp.draft.draft_model import ModelDrafter
from oasis_tp.draft.eagle3 import Eagle3Drafter
from oasis_tp.draft.ngram import NgramDrafter, NgramIndex
from oasis_tp.engine.plan import StepPlan
from oasis_tp.llm import LLM
from oasis_tp.request import Request, RequestSpec, SamplingParams, TokenOutput
from tests import eagle3_reference
from tests.dist.ranks import run_on_ranks
from tests.dist.test_contracts import SMALL, TOLERANCE, mixed_ends
from tests.tiny import make_tiny, make_tiny_eagle3

SETTINGS = {
    "budget_tokens": 64, "recent_tokens": 32, "hot_factor": 4, "max_num_seqs": 8, "max_num_batched_tokens": 128,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=0)
LENGTHS = (333, 20, 256, 150, 5, 64, 200, 31)
ABORTED = {2: 30, 5: 9}
"""Request -> tokens it has when it is aborted."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of seven layers, a draft model that is not it, and an EAGLE-3 head."""
    root = tmp_path_factory.mktemp("models")
    make_tiny("qwen3", root / "target", num_hidden_layers=7)
    make_tiny("llama", root / "other", seed=5, hidden_size=72, num_attention_heads=6, num_key_value_heads=2)
    make_tiny_eagle3(root / "target", root / "head")
    return root


def drafters(root: Path) -> dict[str, dict[str, Any]]:
    return {
        "ngram": {"spec_method": "ngram", "prompt_lookup_min": 1},
        "same_model": {"spec_method": "draft_model", "spec_model": str(root / "target")},
        "other_model": {"spec_method": "draft_model", "spec_model": str(root / "other")},
        "eagle3": {"spec_method": "eagle3", "spec_model": str(root / "head")},
    }


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    made = [[rng.randrange(3, 311) for _ in range(length)] for length in LENGTHS]
    made[3] = made[3][:50] * 3  # something to look up
    return made


def run(llm: LLM) -> dict[str, Any]:
    """All prompts at once, two of them aborted on the way; every pool is whole and every drafter empty afterwards."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(LENGTHS))}
    logprobs: dict[str, list[float]] = {name: [] for name in tokens}
    kv: dict[str, int] = Counter()

    def receive(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            name = str(output.request_id)
            if output.token_id is not None:
                tokens[name].append(output.token_id)
            if output.logprobs is not None:
                logprobs[name].append(output.logprobs.logprob)
            if output.kv is not None:
                kv["draft_tokens"] += output.kv.draft_tokens
                kv["accepted_tokens"] += output.kv.accepted_tokens
                kv["missed_blocks"] += output.kv.missed_blocks
            if len(tokens[name]) >= ABORTED.get(output.request_id, 1000):
                llm.engine.abort(output.request_id)

    llm.engine.on_output = receive
    for index, prompt in enumerate(prompts()):
        dense = SparsityConfig(attention="dense") if index == 6 else None
        spec = RequestSpec(request_id=index, prompt_ids=tuple(prompt), sampling=GREEDY, sparsity=dense)
        llm.engine.submit(spec)
    llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    scheduler = llm.engine.scheduler
    assert scheduler.pages.num_free == scheduler.pages.num_pages and scheduler.runs.num_free == scheduler.runs.num_runs
    assert_holds_nothing(llm)
    return {"tokens": tokens, "logprobs": logprobs, "steps": llm.engine.stats().steps, **kv}


def assert_holds_nothing(llm: LLM) -> None:
    drafter = llm.engine.drafter
    if isinstance(drafter, NgramDrafter):
        assert not drafter._indexes
    if isinstance(drafter, ModelDrafter | Eagle3Drafter):
        assert not drafter.kv.rows and not drafter.kv.kv.any()
    if isinstance(drafter, Eagle3Drafter):
        assert not drafter._rows


def assert_same(got: dict[str, Any], plain: dict[str, Any]) -> None:
    for index in range(len(LENGTHS)):
        name, aborted = str(index), index in ABORTED
        if aborted:  # a step may bring more tokens before the abort is seen
            assert len(got["tokens"][name]) >= ABORTED[index]
        count = ABORTED[index] if aborted else GREEDY.max_tokens
        assert got["tokens"][name][:count] == plain["tokens"][name][:count], f"request {index}"
        assert aborted or len(got["tokens"][name]) == GREEDY.max_tokens
        if plain["logprobs"][name] and got["logprobs"][name]:
            assert got["logprobs"][name][:count] == pytest.approx(plain["logprobs"][name][:count], abs=TOLERANCE)


@pytest.fixture(scope="module")
def plain(root: Path) -> dict[str, Any]:
    result = run(LLM(str(root / "target"), **SETTINGS))
    assert result["missed_blocks"] > 0
    assert all(len(set(result["tokens"][str(index)])) >= 20 for index in range(len(LENGTHS)) if index not in ABORTED)
    return result


@pytest.mark.parametrize("prefetch", ["off", "on"])
@pytest.mark.parametrize("name", ["ngram", "same_model", "other_model", "eagle3"])
def test_same_tokens_with_every_drafter(
    root: Path, plain: dict[str, Any], name: str, prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prefetch the draft after the last verified one looks ahead in a row of its own."""
    llm = LLM(str(root / "target"), prefetch=prefetch, **SETTINGS, **drafters(root)[name])
    planned, num_probes = llm.engine.scheduler.plan, 0

    def plan() -> StepPlan:
        nonlocal num_probes
        made = planned()
        num_probes += sum(map(len, made.probes))
        return made

    monkeypatch.setattr(llm.engine.scheduler, "plan", plan)
    got = run(llm)
    assert_same(got, plain)
    assert (num_probes > 30) == (prefetch == "on")
    assert got["draft_tokens"] > 30
    if name == "same_model":  # of n-grams that hit, see test_speculation.py
        assert got["accepted_tokens"] > 30 and got["accepted_tokens"] < got["draft_tokens"]


def rank_drafts(rank: int, root: Path, out: Path) -> None:
    for name, how in drafters(root).items():
        llm = LLM(str(root / "target"), check_ranks=True, comm="gloo", **SETTINGS, **how)
        (out / f"{name}-{rank}.json").write_text(json.dumps(run(llm)))


def test_same_tokens_with_every_drafter_on_two_ranks(root: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    run_on_ranks(2, tmp_path / "store", rank_drafts, root, tmp_path)
    for name in drafters(root):
        first, second = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(2))
        assert_same(first, plain)
        assert first["tokens"] == second["tokens"] and first["draft_tokens"] == second["draft_tokens"] > 30


def test_a_draft_model_equal_to_the_target_is_accepted(root: Path) -> None:
    target = str(root / "target")
    how = {"attention": "dense", "spec_method": "draft_model", "spec_model": target, "recent_tokens": 32}
    llm = LLM(target, **how)
    outputs = [output.outputs[0] for output in llm.generate(prompts(), GREEDY)]
    expected = LLM(target, attention="dense").generate(prompts(), GREEDY)
    assert [o.token_ids for o in outputs] == [e.outputs[0].token_ids for e in expected]
    drafted = sum(o.kv.draft_tokens for o in outputs if o.kv)
    assert sum(o.kv.accepted_tokens for o in outputs if o.kv) >= 0.99 * drafted > 300
    assert llm.engine.stats().steps < 40


def test_eagle3_proposes_what_its_description_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through prompts in chunks, accepted and rejected drafts: each proposal equals the plain reference's."""
    from transformers import AutoModelForCausalLM

    seen: list[tuple[list[int], list[int], tuple[int, ...]]] = []
    known: dict[int, list[int]] = {}
    rng = random.Random(3)
    inner = Eagle3Drafter.propose

    def propose(self: Eagle3Drafter, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        proposals = inner(self, requests, counts)
        swapped = []
        for request, count, proposal in zip(requests, counts, proposals, strict=True):
            tokens = request.tokens(0, request.num_tokens)
            seen.append((tokens, [count], proposal))
            # The engine gets the right answer, now and then spoiled, so that drafts of every length are accepted.
            right = known[request.request_id][len(tokens) : len(tokens) + count]
            swapped.append(tuple(token if rng.random() < 0.8 else 7 for token in right))
        return swapped

    target = str(root / "target")
    how = SETTINGS | {"attention": "dense", "max_num_batched_tokens": 40}
    asked = [prompt[:70] for prompt in prompts()[:4]]
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in LLM(target, **how).generate(asked, sampling)]
    known.update({index: asked[index] + plain[index] for index in range(4)})
    monkeypatch.setattr(Eagle3Drafter, "propose", propose)
    llm = LLM(target, **how, **drafters(root)["eagle3"])
    outputs = [output.outputs[0] for output in llm.generate(asked, sampling)]
    assert [output.token_ids for output in outputs] == plain
    assert all(o.kv and 10 < o.kv.accepted_tokens < o.kv.draft_tokens for o in outputs)

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tensors = load_file(root / "head" / "model.safetensors")
    features = {}
    with torch.inference_mode():
        for index, tokens in known.items():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            features[index] = torch.cat([states[layer][0] for layer in (2, 3, 4)], dim=-1)
        embedding = model.get_input_embeddings().weight
        assert len(seen) > 40
        for tokens, (count,), proposal in seen:
            (index,) = (i for i, whole in known.items() if whole[: len(tokens)] == tokens)
            known_features = features[index][: len(tokens) - 1]
            expected = eagle3_reference.drafts(tensors, embedding, tokens, known_features, count)
            assert list(proposal) == expected
    assert len({proposal for _, _, proposal in seen}) > 20


def test_a_drafter_that_never_hits_costs_no_rows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(root / "target")
    sampling = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    prompt = prompts()[1]
    right = prompt + LLM(target, **SETTINGS).generate(prompt, sampling)[0].outputs[0].token_ids
    asked: list[int] = []

    def propose(self: NgramIndex, count: int) -> tuple[int, ...]:
        asked.append(len(self.tokens))
        return tuple((token + 1) % 300 for token in right[len(self.tokens) : len(self.tokens) + count])

    monkeypatch.setattr(NgramIndex, "propose", propose)
    llm = LLM(target, **SETTINGS, spec_method="ngram")
    output = llm.generate(prompt, sampling)[0].outputs[0]
    assert output.token_ids == right[len(prompt) :]
    assert output.kv and output.kv.accepted_tokens == 0
    # Four rows once, then one after pauses of 1, 2, 4 … 32 steps.
    assert output.kv.draft_tokens == 4 + 9 and len(asked) == 10


@pytest.mark.parametrize("name", ["ngram", "same_model", "eagle3"])
def test_sampled_tokens_keep_their_distribution(root: Path, name: str) -> None:
    """Three tokens from the three likeliest each: counts of the 27 outcomes against the model's own probabilities."""
    target, prompt = str(root / "target"), prompts()[3][:60]
    exact = LLM(target, attention="dense", recent_tokens=32)
    top = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3, ignore_eos=True)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        stems = list(probabilities)
        following = exact.generate([prompt + list(stem) for stem in stems], top)
        longer = {}
        for stem, output in zip(stems, following, strict=True):
            best = [(token, math.exp(logprob)) for token, logprob in output.outputs[0].logprobs[0].top]
            whole = sum(weight for _, weight in best)
            longer |= {(*stem, token): probabilities[stem] * weight / whole for token, weight in best}
        probabilities = longer

    llm = LLM(target, attention="dense", recent_tokens=32, max_num_seqs=16, **drafters(root)[name])
    sampling = SamplingParams(max_tokens=3, temperature=1.0, top_k=3, ignore_eos=True, n=120)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(8):
        counts.update(tuple(choice.token_ids) for choice in llm.generate(prompt, sampling)[0].outputs)
    assert counts.keys() <= probabilities.keys()
    total = counts.total()
    statistic = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in probabilities.items())
    assert statistic < 54.05, "chi-square with 26 degrees of freedom, 1 in 1,000"
    if name == "same_model":
        assert llm.engine.stats().accepted_tokens > 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"spec_method": "draft_model", "spec_model": "nowhere"}, "--spec-model nowhere: no such directory"),
        ({"spec_method": "draft_model"}, "--spec-model is ''; allowed: a model, with --spec-method draft_model or eagle3"),
        ({"spec_method": "ngram", "spec_model": "smollm2"}, "--spec-model is 'smollm2'; allowed"),
    ],
)
def test_a_draft_model_must_be_named_and_there(root: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(root / "target"), **how, **SETTINGS)


def test_a_draft_model_of_another_vocabulary_is_refused(root: Path, tmp_path: Path) -> None:
    larger = make_tiny("llama", tmp_path / "larger", vocab_size=320)
    with pytest.raises(ValueError, match="--spec-model .*320 tokens and the model's 311"):
        LLM(str(root / "target"), spec_method="draft_model", spec_model=str(larger), **SETTINGS)
    renamed = make_tiny("llama", tmp_path / "renamed")
    file = json.loads((renamed / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    (renamed / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match="--spec-model .*differs from the model's: token 'b' has id "):
        LLM(str(root / "target"), spec_method="draft_model", spec_model=str(renamed), **SETTINGS)


@pytest.mark.parametrize("name", ["same_model", "eagle3"])
def test_drafters_hold_nothing_whatever_way_requests_end(tmp_path: Path, name: str) -> None:
    """Aborts at any stage, forks, numbers that are not finite."""
    make_tiny("llama", tmp_path / "target", num_hidden_layers=7, seed=1)  # never says the poisoned token itself
    make_tiny_eagle3(tmp_path / "target", tmp_path / "head")
    settings = SMALL | {"recent_tokens": 32, "host_kv_gb": 0.05, "device_kv_gb": 0.03}
    llm = LLM(str(tmp_path / "target"), hot_factor=2, **settings, **drafters(tmp_path)[name])
    ends = mixed_ends(llm)
    assert {"length", "abort", "error"} <= set(ends.values())
    assert_holds_nothing(llm)
