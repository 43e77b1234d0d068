"""What a user may ask for, and lengths that stay in order."""

import math

import pytest

from oasis_tp.config import SparsityConfig
from oasis_tp.request import Request, RequestSpec, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("stop", ("a", "")),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_value_outside_its_range_is_named_with_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{name} is {value!r}; allowed: ")


def test_the_borders_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=1.0, seed=-(2**63), n=128, logprobs=20)
    assert SamplingParams() == SamplingParams(max_tokens=None, temperature=1.0, n=1)


def test_lengths_are_ordered() -> None:
    spec = RequestSpec(request_id=1, prompt_ids=(5, 6, 7), sampling=SamplingParams())
    request = Request(spec=spec, max_total_tokens=5, sparsity=SparsityConfig())
    assert (request.num_prompt_tokens, request.num_tokens, request.num_computed) == (3, 3, 0)
    request.num_computed = 3
    request.output_ids += [1, 2]
    request.check_lengths()
    request.output_ids.append(3)
    with pytest.raises(AssertionError):
        request.check_lengths()
    del request.output_ids[:]
    request.num_computed = 4
    with pytest.raises(AssertionError):
        request.check_lengths()
