"""Sampling: each request draws from its own stream, from the distribution that was asked for."""

import math

import pytest
import torch

from oasis_tp.config import SparsityConfig
from oasis_tp.engine.sampler import Sampler
from oasis_tp.request import Request, RequestSpec, SamplingParams

PROBS = torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05])


def make_request(request_id: int, **sampling: object) -> Request:
    spec = RequestSpec(request_id=request_id, prompt_ids=(1,), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
    return Request(spec=spec, max_total_tokens=100, sparsity=SparsityConfig())


def draws(count: int, logits: torch.Tensor, **sampling: object) -> list[int]:
    sampler, request = Sampler(0), make_request(1, **({"seed": 11} | sampling))
    return [sampler.sample(logits[None], [request]).token_ids[0][0] for _ in range(count)]


def support(**sampling: object) -> set[int]:
    return set(draws(400, PROBS.log(), **sampling))


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0]])
    requests = [make_request(i, temperature=0.0) for i in range(2)]
    assert Sampler(0).sample(logits, requests).token_ids == [[1], [0]]


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square over 4,000 seeded draws; 99.9 % of correct samplers stay below 18.5 (4 degrees of freedom)."""
    counts = torch.bincount(torch.tensor(draws(4000, PROBS.log())), minlength=5).double()
    expected = 4000 * PROBS.double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5
    cooler = torch.bincount(torch.tensor(draws(4000, PROBS.log(), temperature=0.5)), minlength=5).double()
    expected = 4000 * PROBS.double() ** 2 / (PROBS.double() ** 2).sum()
    assert float(((cooler - expected) ** 2 / expected).sum()) < 18.5


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {0}),
        ({"top_p": 0.5}, {0, 2}),
        ({"top_p": 0.75}, {0, 2, 3}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.6}, {0, 2}),
        ({"min_p": 0.45}, {0, 2, 3}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.75}, {0, 2}),  # top-p is of what top-k left: 4/9 and 3/9 reach 0.75
        ({"top_k": 2, "min_p": 0.8}, {0}),
        ({"temperature": 1e-3}, {0}),
        ({"temperature": 1e-300}, {0}),
    ],
)
def test_what_may_be_drawn(sampling: dict[str, float], expected: set[int]) -> None:
    assert support(**sampling) == expected


def test_a_high_temperature_is_even() -> None:
    counts = torch.bincount(torch.tensor(draws(2000, PROBS.log(), temperature=100.0)), minlength=5)
    assert counts.min() > 330


@pytest.mark.parametrize("neighbours", [0, 3])
def test_a_seed_gives_the_same_tokens_in_any_company_and_order(neighbours: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, 50, generator=generator)

    def run(request_id: int, others: list[Request], place: int) -> list[int]:
        sampler, mine = Sampler(9), make_request(request_id, seed=5)
        tokens = []
        for row in logits:
            requests = [*others[:place], mine, *others[place:]]
            rows = torch.randn(len(requests), 50, generator=generator)
            rows[place] = row
            tokens.append(sampler.sample(rows, requests).token_ids[place][0])
        return tokens

    alone = run(1, [], 0)
    others = [make_request(10 + i, temperature=float(i)) for i in range(neighbours)]
    for place in range(neighbours + 1):
        assert run(2 + place, others, place) == alone
    assert len(set(alone)) >= 10


def test_without_a_seed_requests_differ_and_the_engines_seed_decides() -> None:
    logits = torch.zeros(1, 1000)

    def run(seed: int, request_id: int) -> list[int]:
        sampler, request = Sampler(seed), make_request(request_id)
        return [sampler.sample(logits, [request]).token_ids[0][0] for _ in range(8)]

    runs = [run(seed, request_id) for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63)) for request_id in (1, 2)]
    assert len({tuple(tokens) for tokens in runs}) == len(runs)
    assert run(2**63 - 1, 2) in runs


def test_a_finished_request_is_forgotten() -> None:
    sampler, request = Sampler(0), make_request(1, seed=4)
    logits = torch.zeros(1, 1000)
    first = sampler.sample(logits, [request]).token_ids
    assert sampler.sample(logits, [request]).token_ids != first
    sampler.forget(1)
    sampler.forget(1)
    assert sampler.sample(logits, [request]).token_ids == first


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_none_end_their_own_row_only(bad: float, temperature: float) -> None:
    requests = [make_request(i, seed=i, temperature=temperature, logprobs=1) for i in range(3)]
    logits = torch.randn(3, 40)
    expected = Sampler(0).sample(logits, requests)
    broken = logits.clone()
    broken[1, 7] = bad
    got = Sampler(0).sample(broken, requests)
    assert got.token_ids == [expected.token_ids[0], [-1], expected.token_ids[2]]
    assert got.logprobs == [expected.logprobs[0], [None], expected.logprobs[2]]


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    request = make_request(1, temperature=0.2, top_k=1, logprobs=3)
    ((logprobs,),) = Sampler(0).sample(PROBS.log()[None] + 5, [request]).logprobs
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(math.log(0.4), abs=1e-5)
    assert [token for token, _ in logprobs.top] == [0, 2, 3]
    assert [value for _, value in logprobs.top] == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-5)
    only_own = Sampler(0).sample(PROBS.log()[None], [make_request(1, temperature=0.0, logprobs=0)]).logprobs[0][0]
    assert only_own is not None and only_own.top == ()


def test_drafts_change_no_draw() -> None:
    """Rows verified together give the tokens of rows sampled one after the other, up to the first miss."""
    rows = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        alone = Sampler(0)
        request = make_request(1, seed=seed, temperature=1.0)
        expected = [alone.sample(row[None], [request]).token_ids[0][0] for row in rows]
        for right in range(4):
            drafts = tuple(expected[:right]) + ((expected[right] + 1) % 7,) * (3 - right)
            got = Sampler(0).sample(rows, [make_request(1, seed=seed, temperature=1.0)], [drafts])
            assert got.token_ids == [expected[: right + 1]]


def test_accepted_drafts_keep_the_distribution() -> None:
    """A fixed draft, right one time in ten or two in five: the tokens that come out follow the model all the same."""
    logits = PROBS.log()[None].repeat(2, 1)
    for draft in range(len(PROBS)):
        sampler, counts = Sampler(0), torch.zeros(len(PROBS))
        request = make_request(1, seed=draft, temperature=1.0)
        for _ in range(2000):
            counts[sampler.sample(logits, [request], [(draft,)]).token_ids[0][0]] += 1
        assert torch.allclose(counts / 2000, PROBS.float(), atol=0.045)
