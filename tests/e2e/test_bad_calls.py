"""What Python callers get wrong: a clear error each time, and the next good call works."""

from typing import Any

import numpy as np
import pytest

from oasis_tp.config import SparsityConfig
from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams
from tests.dist.ranks import run_on_ranks
from tests.tiny import make_tiny

SMALL = {"budget_tokens": 64, "recent_tokens": 32, "max_num_seqs": 4, "host_kv_gb": 0.02, "comm": "gloo"}
GOOD = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(make_tiny("llama", tmp_path_factory.mktemp("model"))), **SMALL)


@pytest.fixture(autouse=True)
def _the_next_good_call_works(llm: LLM) -> Any:
    yield
    assert len(llm.generate([3, 4, 5], GOOD)[0].outputs[0].token_ids) == 4
    llm.engine.step()
    llm.engine.check_integrity()
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hot_factor": 0.5}, "sparsity.hot_factor is 0.5"),
        ({"budget_tokens": -16}, "sparsity.budget_tokens is -16"),
        ({"sink_blocks": -1}, "sparsity.sink_blocks is -1"),
        ({"recent_tokens": 0}, "sparsity.recent_tokens is 0"),
        ({"attention": "dens"}, "sparsity.attention is 'dens'"),
        ({"sketch": "minmax"}, "this engine keeps 2bit"),
    ],
)
def test_a_request_with_wrong_sparsity_is_refused(llm: LLM, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llm.generate([3, 4, 5], GOOD, sparsity=SparsityConfig(**wrong))


@pytest.mark.parametrize("prompt", [[[1.5]], [["a"]]])
def test_a_prompt_of_something_else_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="whole token ids"):
        llm.generate(prompt, GOOD)


def test_numpy_ids_are_ids(llm: LLM) -> None:
    assert llm.generate([np.array([3, 4, 5])], GOOD)[0].prompt_token_ids == [3, 4, 5]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 1.5}, {"n": "2"}, {"temperature": "0"}, {"seed": 0.5}, {"stop": (1,)}, {"stop": ""}]
)
def test_sampling_parameters_of_the_wrong_type_name_their_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        SamplingParams(**wrong)


def test_one_stop_string_is_not_its_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_an_interrupted_call_leaves_nothing_running(llm: LLM) -> None:
    step, count = llm.engine.step, iter(range(5))

    def interrupted(*args: Any) -> bool:
        if next(count, None) is None:
            llm.engine.step = step  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return step(*args)

    llm.engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([3, 4, 5], SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    before = llm.engine.stats().steps
    llm.generate([3, 4, 5], GOOD)
    assert llm.engine.stats().steps < before + 10


def test_held_prompts_that_fill_the_host_tier_are_an_error_and_no_hang(llm: LLM) -> None:
    small = LLM(str(llm.engine.model_dir), **(SMALL | {"host_kv_gb": 0.0012}))
    assert small.engine.scheduler.runs.num_runs == 4
    ids = [3 + index % 300 for index in range(400)]
    with small.hold(ids), small.hold([*ids, 3]):
        output = small.generate(ids[:300], SamplingParams(max_tokens=100))[0].outputs[0]
        assert output.finish_reason == "error" and output.error is not None and "--host-kv-gb" in output.error
        with pytest.raises(ValueError, match="--host-kv-gb"), small.hold([*ids, 4]):
            pass
    assert len(small.generate(ids[:300], GOOD)[0].outputs[0].token_ids) == 4
    assert small.engine.scheduler.runs.num_free == 4


def _refused(rank: int, model: str) -> None:
    with pytest.raises(ValueError, match="4 ranks share 3 KV heads"):
        LLM(model, attention="dense", extra_sketches=("2bit",), comm="gloo")


def test_no_sketch_is_kept_where_ranks_share_a_kv_head(llm: LLM, tmp_path: Any) -> None:
    run_on_ranks(4, tmp_path / "store", _refused, str(llm.engine.model_dir))
