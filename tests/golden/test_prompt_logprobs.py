"""Logprobs of a prompt's own tokens: transformers' numbers, at any chunk size and number of ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.engine import token_logprobs
from oasis_tp.llm import LLM
from oasis_tp.models.llama import LlamaModel
from oasis_tp.request import FinishReason, SamplingParams
from tests.dist.ranks import run_on_ranks
from tests.tiny import make_tiny

PROMPT = torch.randint(3, 311, (300,), generator=torch.Generator().manual_seed(3)).tolist()
ASK = SamplingParams(max_tokens=0, prompt_logprobs=2)
NUM_TOP = 2
TOLERANCE = 1e-4
SMALL: dict[str, Any] = {"max_num_seqs": 2, "budget_tokens": 64, "recent_tokens": 16, "comm": "gloo"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model: str) -> torch.Tensor:
    """transformers' [prompt - 1, vocab] log-probabilities of each next token."""
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(twin(torch.tensor([PROMPT])).logits[0, :-1].float(), -1)


def asked(model: str, **options: Any) -> dict[str, Any]:
    """Own logprobs and the best alternatives of the prompt's tokens, from an engine of its own."""
    llm = LLM(model, **(SMALL | options))
    (choice,) = llm.generate(PROMPT, ASK)[0].outputs
    assert (choice.token_ids, choice.text, choice.finish_reason) == ([], "", FinishReason.LENGTH)
    llm.engine.step()
    llm.engine.check_integrity()
    assert llm.engine.scheduler.pages.num_free == llm.engine.scheduler.pages.num_pages
    scores = choice.prompt_logprobs
    return {"own": [score.logprob for score in scores], "top": [dict(score.top) for score in scores]}


def check(got: dict[str, Any], expected: torch.Tensor) -> None:
    own = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert got["own"] == pytest.approx(own.tolist(), abs=TOLERANCE)
    best = expected.topk(NUM_TOP)
    for top, ids, values in zip(got["top"], best.indices.tolist(), best.values.tolist(), strict=True):
        assert list(top.values()) == pytest.approx(values, abs=TOLERANCE)
        assert list(map(int, top)) == ids or abs(values[0] - values[1]) < TOLERANCE


@pytest.mark.parametrize("chunk", [1024, 48])
def test_the_prompt_s_logprobs_of_transformers(model: str, expected: torch.Tensor, chunk: int) -> None:
    check(asked(model, max_num_batched_tokens=chunk), expected)


def on_rank(rank: int, model: str, out: Path) -> None:
    got = asked(model, max_num_batched_tokens=128)
    if rank == 0:
        out.write_text(json.dumps(got))
    else:
        assert got["own"] == []


def test_the_same_on_two_ranks(model: str, expected: torch.Tensor, tmp_path: Path) -> None:
    run_on_ranks(2, tmp_path / "store", on_rank, model, tmp_path / "scores.json")
    check(json.loads((tmp_path / "scores.json").read_text()), expected)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **SMALL)


def test_every_choice_reports_the_prompt_and_its_own_tokens_follow(llm: LLM, expected: torch.Tensor) -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0, n=2, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    choices = llm.generate([PROMPT, PROMPT[:1]], sampling)
    for choice in choices[0].outputs:
        assert [score.logprob for score in choice.prompt_logprobs] == pytest.approx(
            expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist(), abs=TOLERANCE
        )
        assert len(choice.token_ids) == len(choice.logprobs) == 3
    assert [choice.prompt_logprobs for choice in choices[1].outputs] == [[], []], "nothing predicts a first token"


def test_a_held_prompt_is_computed_again_for_them(llm: LLM) -> None:
    with llm.hold(PROMPT) as held:
        (choice,) = llm.generate_from(held, ASK).outputs
    assert len(choice.prompt_logprobs) == len(PROMPT) - 1


def test_logits_of_a_long_prompt_never_exist_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole: Callable[[LlamaModel, torch.Tensor], torch.Tensor] = LlamaModel.logits

    def counted(self: LlamaModel, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return whole(self, hidden)

    monkeypatch.setattr(LlamaModel, "logits", counted)
    llm.generate(PROMPT, ASK)
    assert max(sizes) == token_logprobs.PIECE_ROWS and sum(sizes) == len(PROMPT)


def test_numbers_that_are_not_finite_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the prompt's last row, which is sampled, is sound."""
    whole: Callable[[LlamaModel, torch.Tensor], torch.Tensor] = LlamaModel.logits

    def broken(self: LlamaModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = whole(self, hidden)
        return logits if len(hidden) == 1 else logits.fill_(float("nan"))

    monkeypatch.setattr(LlamaModel, "logits", broken)
    (choice,) = llm.generate(PROMPT, ASK)[0].outputs
    assert choice.finish_reason is FinishReason.ERROR and "not a finite number" in (choice.error or "")
    monkeypatch.undo()
    assert llm.generate(PROMPT, ASK)[0].outputs[0].finish_reason is FinishReason.LENGTH
