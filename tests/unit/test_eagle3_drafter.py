"""Eagle3Drafter on made-up features: prompts in any chunks, windows shorter than the prompt, pauses, forks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.comm import TpGroup
from oasis_tp.config import SparsityConfig
from oasis_tp.draft import eagle3, window
from oasis_tp.draft.eagle3 import Eagle3Drafter
from oasis_tp.draft.eagle3_head import Eagle3Head, load_head, load_head_config
from oasis_tp.models.registry import load_arch
from oasis_tp.nn.ops import Place
from oasis_tp.request import Request, RequestSpec, SamplingParams
from tests.tiny import make_tiny, make_tiny_eagle3

NUM_PROMPT = 45


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    root: Path = tmp_path_factory.mktemp("head")
    target = make_tiny("llama", root / "target", num_hidden_layers=7)
    path = make_tiny_eagle3(target, root / "head")
    table = torch.randn(311, 144, generator=torch.Generator().manual_seed(1))
    made = Eagle3Head(
        load_head_config(path, load_arch(target)), 144, lambda ids: table[ids], TpGroup.single(torch.device("cpu")),
        Place(torch.float32, torch.device("cpu")), max_model_len=128,
    )  # fmt: skip
    load_head(made, path)
    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SINK_TOKENS", 3), ("WINDOW_TOKENS", 12), ("MAX_PIECE_TOKENS", 8)):
        monkeypatch.setattr(window, name, value)
    monkeypatch.setattr(eagle3, "MAX_PIECE_TOKENS", 8)


FEATURES = torch.randn(128, 3 * 144, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randint(0, 311, (128,), generator=torch.Generator().manual_seed(3)).tolist()


def follow(head: Eagle3Head, chunks: list[int], gains: list[int], asked: set[int]) -> list[tuple[int, ...]]:
    """Proposals after the prompt (in these chunks) and after steps that gain so many tokens, where one is asked for."""
    drafter = Eagle3Drafter(head, (2, 3, 4), num_rows=2, max_model_len=128)
    spec = RequestSpec(request_id=0, prompt_ids=tuple(TOKENS[:NUM_PROMPT]), sampling=SamplingParams())
    request = Request(spec=spec, max_total_tokens=128, sparsity=SparsityConfig(), row=1)
    proposals, done = [], 0
    for size in chunks:
        if done + size == NUM_PROMPT:
            request.output_ids = TOKENS[NUM_PROMPT : NUM_PROMPT + 1]
        drafter.learn(request, done, FEATURES[done : done + size])
        done += size
    for step, gain in enumerate([0, *gains]):
        request.output_ids = TOKENS[NUM_PROMPT : done + gain + 1]
        if gain:
            drafter.learn(request, done, FEATURES[done : done + gain])
        done += gain
        if step in asked:
            proposals += drafter.propose([request], [4])
    drafter.release(1)
    assert not drafter._rows and not drafter.kv.rows and not drafter.kv.kv.any()
    return proposals


def test_chunks_of_a_long_prompt_change_nothing(head: Eagle3Head, small: None) -> None:
    gains, asked = [1, 5, 1, 2, 3], {0, 1, 2, 3, 4, 5}
    expected = follow(head, [NUM_PROMPT], gains, asked)
    assert all(len(proposal) == 4 for proposal in expected) and len(set(expected)) > 4
    for chunks in ([16, 16, 13], [1, 2, 3, 4, 35], [44, 1], [1] * 45):
        assert follow(head, chunks, gains, asked) == expected


def test_of_a_long_prompt_only_sink_and_window_are_computed(
    head: Eagle3Head, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    forward = Eagle3Head.forward

    def counted(self: Eagle3Head, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(Eagle3Head, "forward", counted)
    follow(head, [16, 16, 13], [], {0})
    assert sum(computed) == 3 + 12 + 3, "three more drafts after the one that the prompt's end gives"


def test_a_pause_changes_nothing(head: Eagle3Head, small: None) -> None:
    """What was not asked for in between leaves no trace, even where more waits than one pass takes."""
    gains = [1, 3, 1, 1, 2, 5, 1, 1, 1, 4, 2]
    everything = follow(head, [NUM_PROMPT], gains, set(range(12)))
    assert follow(head, [NUM_PROMPT], gains, {2, 11}) == [everything[2], everything[11]]


def test_the_window_matters(head: Eagle3Head, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparisons above could not fail."""
    narrow = follow(head, [NUM_PROMPT], [1, 2], {0, 1, 2})
    monkeypatch.setattr(window, "WINDOW_TOKENS", 60)
    assert follow(head, [NUM_PROMPT], [1, 2], {0, 1, 2}) != narrow


def test_a_fork_starts_with_its_own_tokens(head: Eagle3Head) -> None:
    drafter = Eagle3Drafter(head, (2, 3, 4), num_rows=2, max_model_len=128)
    spec = RequestSpec(request_id=0, prompt_ids=tuple(TOKENS[:NUM_PROMPT]), sampling=SamplingParams(), fork_of=5)
    fork = Request(spec=spec, max_total_tokens=128, sparsity=SparsityConfig(), row=0, output_ids=TOKENS[45:46])
    assert drafter.propose([fork], [4]) == [()], "nothing is known yet"
    fork.output_ids = TOKENS[45:47]
    drafter.learn(fork, 45, FEATURES[45:46])
    (proposal,) = drafter.propose([fork], [2])
    assert len(proposal) == 2
