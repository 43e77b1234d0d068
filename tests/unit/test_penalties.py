"""Bias and penalties against their definitions, and through the sampler."""

import torch

from oasis_tp.config import SparsityConfig
from oasis_tp.engine.penalties import changes_logits, penalized
from oasis_tp.engine.sampler import Sampler
from oasis_tp.request import Request, RequestSpec, SamplingParams

LOGITS = torch.tensor([2.0, 1.5, -1.0, 0.5, 0.0])


def request(prompt: tuple[int, ...] = (0, 2), output: tuple[int, ...] = (), **sampling: object) -> Request:
    params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
    spec = RequestSpec(request_id=1, prompt_ids=prompt, sampling=params)
    return Request(spec=spec, max_total_tokens=99, sparsity=SparsityConfig(), output_ids=list(output))


def check(asked: Request, expected: list[float]) -> None:
    before = LOGITS.clone()
    torch.testing.assert_close(penalized(LOGITS, asked), torch.tensor(expected))
    assert torch.equal(LOGITS, before), "the logits are the logprobs' too"


def test_each_by_its_definition() -> None:
    check(request(), LOGITS.tolist())
    check(request(output=(1, 1, 3), presence_penalty=0.5), [2.0, 1.0, -1.0, 0.0, 0.0])
    check(request(output=(1, 1, 3), frequency_penalty=0.5), [2.0, 0.5, -1.0, 0.0, 0.0])
    check(request(output=(1, 1), presence_penalty=1.0, frequency_penalty=-0.5), [2.0, 1.5, -1.0, 0.5, 0.0])
    check(request(output=(1, 1), repetition_penalty=2.0), [1.0, 0.75, -2.0, 0.5, 0.0])
    check(request(logit_bias=((4, 10.0), (0, -100.0))), [-98.0, 1.5, -1.0, 0.5, 10.0])


def test_the_sampler_takes_them_row_by_row_and_reports_the_models_own_logprobs() -> None:
    rows = [request(), request(logit_bias=((4, 10.0),), logprobs=0), request(output=(0,), presence_penalty=1.0)]
    sampled = Sampler(0).sample(LOGITS.expand(3, -1).clone(), rows)
    assert sampled.token_ids == [[0], [4], [1]]
    assert sampled.logprobs[1][0] is not None
    assert abs(sampled.logprobs[1][0].logprob - float(torch.log_softmax(LOGITS, -1)[4])) < 1e-6


def test_logits_that_are_no_numbers_stay_an_error() -> None:
    rows = [request(repetition_penalty=1.5)]
    assert Sampler(0).sample(torch.full((1, 5), torch.nan), rows).token_ids == [[-1]]


def test_a_row_after_a_draft_counts_the_tokens_before_it() -> None:
    asked = request(presence_penalty=1.0)
    check_rows = Sampler(0).sample(LOGITS.expand(3, -1).clone(), [asked], [(0, 1)])
    assert check_rows.token_ids == [[0, 1, 0]], "0 and 1 lose 1 each as they are said: 2, then 1.5, then 1 again"


def test_plain_requests_pay_nothing() -> None:
    assert not changes_logits(SamplingParams())
    assert changes_logits(SamplingParams(repetition_penalty=1.1)) and changes_logits(
        SamplingParams(logit_bias=((1, 1.0),))
    )
