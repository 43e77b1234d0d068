"""The control that must fail: a needle whose blocks are gone from the device is lost unless they are fetched again."""

from collections.abc import Iterator

import pytest
import torch

from oasis_tp.bench.haystack import Needle, noise_needle
from oasis_tp.config import SparsityConfig
from oasis_tp.llm import LLM, HeldPrompt
from oasis_tp.request import KvStats, RequestSpec, SamplingParams, TokenOutput

COLD = SparsityConfig(budget_tokens=256, hot_factor=2.0, tail_estimate=False)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("smollm2", max_model_len=4096, budget_tokens=256, hot_factor=2.0, max_num_seqs=2, tail_estimate=False)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def needle(llm: LLM) -> Needle:
    return noise_needle(llm.tokenizer, 3000, depth=0.4, seed=3)


@pytest.fixture(scope="module")
def held(llm: LLM, needle: Needle) -> Iterator[HeldPrompt]:
    with llm.hold(needle.prompt) as held:
        yield held


def blocks_of_answer(llm: LLM, needle: Needle) -> torch.Tensor:
    """Blocks that hold a token of the hidden number, [n]."""
    start = needle.prompt.index(needle.answer)
    stop = start + len(needle.answer)
    offsets = llm.tokenizer.backend.encode(needle.prompt).offsets
    positions = [i for i, (first, last) in enumerate(offsets) if first < stop and last > start]
    assert positions
    return torch.tensor(positions).div(16, rounding_mode="floor").unique()


def answer_from_cold(
    llm: LLM, needle: Needle, held: HeldPrompt, *, request_id: int, recall: bool
) -> tuple[str, KvStats]:
    """Fork the prompt, drop every unpinned block after its first token (dense by construction), and decode on."""
    engine, cache = llm.engine, llm.engine.runner.cache
    outputs: list[TokenOutput] = []
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    engine.submit(
        RequestSpec(
            request_id=request_id,
            prompt_ids=held.prompt_token_ids,
            sampling=sampling,
            sparsity=COLD,
            fork_of=held.request_id,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "on_output", outputs.extend)
        patch.setattr(cache, "recall", recall)
        engine.step()
        assert len(outputs) == 1, "the fork has its first token and no more"
        request = engine.scheduler.running[request_id]
        state, position = engine.runner.states[request.row], request.num_computed
        blocks = blocks_of_answer(llm, needle)
        first, last = state.selection.candidates(position)
        assert first <= blocks.min() and blocks.max() < last, "the needle must not be pinned"
        here = cache.residency.slot_of_block[:, state.row]  # [layer, head, block]
        assert (here[:, :, blocks] >= 0).any(), "the question's own rows seed the hot set with the needle"
        with torch.inference_mode():
            cache.drop_candidates(state, position)
        assert (here[:, :, blocks] < 0).all()
        cache.residency.check_row(state.row)
        while engine.has_work:
            engine.step()
        if not recall:
            assert (here[:, :, blocks] < 0).all(), "nothing may have brought the needle back"
    engine.check_integrity()
    assert outputs[-1].kv is not None
    return llm.tokenizer.decode([o.token_id for o in outputs if o.token_id is not None]), outputs[-1].kv


def test_a_cold_needle_is_found_with_recall_and_lost_without(llm: LLM, needle: Needle, held: HeldPrompt) -> None:
    text, kv = answer_from_cold(llm, needle, held, request_id=10**6, recall=True)
    assert needle.answer in text
    assert 0 < kv.missed_blocks < kv.selected_blocks
    lost, kv = answer_from_cold(llm, needle, held, request_id=10**6 + 1, recall=False)
    assert needle.answer not in lost
    assert kv.missed_blocks > 0
