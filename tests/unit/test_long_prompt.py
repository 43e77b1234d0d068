"""Prompts that repeat: a stretched window, and keys, values and sketches that are where a real prompt has them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oasis_tp.bench.forks import Forks
from oasis_tp.bench.long_prompt import RepeatingRunner, stretched
from oasis_tp.config import SparsityConfig
from oasis_tp.engine.engine import Engine
from oasis_tp.engine.startup import start
from oasis_tp.llm import make_config
from oasis_tp.models.registry import load_arch
from tests.tiny import make_tiny

PERIOD, CONTEXT = 128, 300
SPARSE = SparsityConfig(budget_tokens=32, recent_tokens=32, hot_factor=2.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def make_forks(model_dir: Path, period: int) -> Forks:
    """Prompts of token ids that come again after PERIOD tokens, of which the engine computes the first `period`."""
    config = make_config(
        model=str(model_dir),
        budget_tokens=32,
        recent_tokens=32,
        hot_factor=2.0,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        host_kv_gb=0.02,
    )
    started = start(config, ())
    engine = Engine(config, replace(started, runner=RepeatingRunner(started.runner, period)))
    return Forks(engine, list(range(3, 3 + PERIOD)))


@pytest.fixture(scope="module")
def repeating(tiny: Path) -> Iterator[Forks]:
    forks = make_forks(tiny, PERIOD)
    yield forks
    forks.engine.tp.close()


def test_a_model_keeps_its_directory_where_its_window_is_enough(tiny: Path) -> None:
    with stretched(tiny, 512) as found:
        assert found == tiny


def test_a_stretched_model_has_the_same_files_and_a_longer_window(tiny: Path) -> None:
    with stretched(tiny, 2000) as found:
        assert found != tiny and load_arch(found, None).max_position_embeddings == 2000
        assert {path.name for path in found.iterdir()} == {path.name for path in tiny.iterdir()}
        plain, wide = (json.loads((path / "config.json").read_text()) for path in (tiny, found))
        assert {key for key in plain if plain[key] != wide[key]} == {"max_position_embeddings"}
    assert not found.exists() and (tiny / "config.json").exists()
    assert load_arch(tiny, None).max_position_embeddings == 512


def test_the_first_layers_keys_and_sketches_are_those_of_the_whole_prompt_computed(
    tiny: Path, repeating: Forks
) -> None:
    """The first layer's keys depend on nothing but the token and its position, so a repetition must meet them."""
    whole = make_forks(tiny, 512)
    tiers = []
    for forks in (whole, repeating):
        held = forks.hold(CONTEXT)
        cache = forks.engine.runner.cache
        assert cache.transfers is not None
        blocks = forks.engine.scheduler._prefixes[held.request_id].host_blocks[: -(-CONTEXT // 16)]
        kv = cache.transfers.host.kv[0][:, blocks].flatten(2, 2).clone()  # [head, block, K|V, 16, D]
        sketch = [x[0][blocks[: CONTEXT // 16]].clone() for x in cache.sketches["2bit"].tensors()]
        tiers.append((kv.transpose(2, 3).flatten(1, 2)[:, :CONTEXT], sketch))
        forks.release(held)
    whole.engine.tp.close()
    (want, want_sketch), (got, got_sketch) = tiers
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)  # angles of up to 300 radians, in fp32
    assert (got[:, PERIOD : 2 * PERIOD, 0] - got[:, :PERIOD, 0]).abs().max() > 0.1, "keys were not turned"
    same_codes = (got_sketch[0] == want_sketch[0]).float().mean()
    assert same_codes > 0.99, same_codes  # a code at a threshold may fall to either side


def test_forks_of_a_repeated_prompt_decode_and_leave_nothing(repeating: Forks) -> None:
    engine = repeating.engine
    held = repeating.hold(CONTEXT)
    for mode in ("dense", "resolve"):
        decoded = repeating.decode([held], replace(SPARSE, attention=mode), 2, 6)
        assert len(decoded.step_s) == 6
        assert (decoded.hit_rate is None) == (mode == "dense")
    repeating.release(held)
    engine.check_integrity()
    assert engine.stats().host_blocks_used == engine.stats().kv_pages_used == 0


def test_a_prompts_end_has_the_last_computed_query_turned_to_its_place_and_the_repetitions_next_token(
    repeating: Forks,
) -> None:
    runner = repeating.engine.runner
    assert isinstance(runner, RepeatingRunner)
    held = repeating.hold(CONTEXT)
    end = runner._prompt_ends[held.request_id]
    assert end.logits is not None and int(end.logits.argmax()) == held.prompt_ids[CONTEXT % PERIOD]
    query = end.last_query
    assert query.isfinite().all()
    torch.testing.assert_close(query.norm(dim=-1), runner._last_query.norm(dim=-1))
    assert (query - runner._last_query).abs().max() > 0.1, "the query was not turned"
    repeating.release(held)
