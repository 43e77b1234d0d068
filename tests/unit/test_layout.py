"""Which blocks are pinned, which are candidates, how many pages that takes; and what memory is turned into."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_tp.config import SparsityConfig
from oasis_tp.kv.layout import RUN_BLOCKS, Capacity, KvLayout, SelectionLayout, plan_capacity

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype_bytes=4)
PAGE = LAYOUT.page_bytes


def select(
    *, sink: int = 1, recent: int = 2, budget: int | None = 4, hot_factor: float = 1.0, block_size: int = 16
) -> SelectionLayout:
    return SelectionLayout(block_size=block_size, sink=sink, recent=recent, budget=budget, hot_factor=hot_factor)


def capacity(**changes: object) -> Capacity:
    arguments: dict[str, object] = {
        "layout": LAYOUT,
        "sparsity": SparsityConfig(budget_tokens=64, recent_tokens=32),
        "sketch_block_bytes": 100,
        "max_model_len": 1024,
        "max_num_seqs": 2,
        "device_bytes": 40 * PAGE,
        "host_bytes": 200 * PAGE,
        "sketch_from_device_bytes": False,
    }
    return plan_capacity(**(arguments | changes))  # type: ignore[arg-type]


def test_a_page_is_both_halves_of_a_block_in_every_layer_and_head() -> None:
    assert PAGE == 2 * 2 * 3 * 16 * 8 * 4
    assert [LAYOUT.num_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("position", "sink", "recent", "expected"),
    [
        (0, 1, 2, (0, 0)),
        (16, 1, 2, (1, 1)),
        (15, 0, 1, (0, 0)),
        (16, 0, 1, (0, 0)),
        (31, 0, 1, (0, 0)),
        (32, 0, 1, (0, 1)),
        (63, 1, 2, (1, 1)),
        (64, 1, 2, (1, 2)),
        (79, 1, 2, (1, 2)),
        (80, 1, 2, (1, 3)),
        (100, 1, 9, (1, 1)),
        (100, 20, 1, (6, 6)),
    ],
)
def test_candidates_lie_between_the_sink_and_the_recent_blocks(
    position: int, sink: int, recent: int, expected: tuple[int, int]
) -> None:
    assert select(sink=sink, recent=recent).candidates(position) == expected


@settings(max_examples=200, deadline=None)
@given(
    sink=st.integers(0, 5),
    recent=st.integers(1, 5),
    budget=st.integers(1, 8),
    hot_factor=st.floats(1, 5),
    position=st.integers(0, 600),
)
def test_a_step_always_fits_its_pages(sink: int, recent: int, budget: int, hot_factor: float, position: int) -> None:
    """Pinned blocks and a whole budget of candidates, at every position of the request."""
    layout = select(sink=sink, recent=recent, budget=budget, hot_factor=hot_factor)
    first, last = layout.candidates(position)
    block = position // 16
    pinned = [b for b in range(block + 1) if not first <= b < last]
    assert block in pinned and len(pinned) <= layout.pinned
    pages = layout.num_pages(600 // 16 + 1, host_tier=True)
    assert len(pinned) + min(budget, last - first) <= pages <= 600 // 16 + 1


@pytest.mark.parametrize(
    ("hot_factor", "budget", "total", "expected"),
    [
        (1.0, 4, 100, 8),
        (1.5, 4, 100, 10),
        (1.1, 4, 100, 9),
        (1.1, 70, 100, 81),  # 1.1 × 70 is 77, whatever the last bit of a float says
        (2.0, 4, 12, 12),
        (2.0, 4, 5, 5),
        (4.0, None, 100, 100),
    ],
)
def test_pages_of_a_request(hot_factor: float, budget: int | None, total: int, expected: int) -> None:
    layout = select(budget=budget, hot_factor=hot_factor)
    assert layout.num_pages(total, host_tier=True) == expected
    assert layout.num_pages(total, host_tier=False) == total


def test_token_counts_round_up_to_blocks() -> None:
    config = SparsityConfig(budget_tokens=33, recent_tokens=17, sink_blocks=0)
    layout = SelectionLayout.from_config(config, 16, 2.0)
    assert (layout.budget, layout.recent, layout.pinned) == (3, 2, 3)
    dense = SelectionLayout.from_config(SparsityConfig(attention="dense"), 16, 2.0)
    assert dense.budget is None


def test_auto_spends_the_pages_on_the_requests_that_may_run() -> None:
    got = capacity()
    assert got == Capacity(num_pages=40, num_host_blocks=128, hot_factor=(20 - 4) / 4)
    assert capacity(device_bytes=10**9).num_pages == 128, "more than everything is no use"
    assert capacity(device_bytes=10**9).hot_factor == (64 - 4) / 4
    assert capacity(device_bytes=9 * PAGE).hot_factor == 1.0, "fewer than all may run at once, but one can"


@settings(max_examples=200, deadline=None)
@given(
    budget=st.integers(1, 40),
    num_pages=st.integers(1, 300),
    max_num_seqs=st.integers(1, 4),
    recent=st.integers(1, 4),
)
def test_auto_never_asks_for_more_than_there_is(budget: int, num_pages: int, max_num_seqs: int, recent: int) -> None:
    sparsity = SparsityConfig(budget_tokens=16 * budget, recent_tokens=16 * recent)
    own = SelectionLayout.from_config(sparsity, 16, 1.0)
    arguments = {"sparsity": sparsity, "max_num_seqs": max_num_seqs, "max_model_len": 8192, "host_bytes": 10**9}
    if num_pages < own.num_pages(512, host_tier=True):
        with pytest.raises(ValueError, match="--device-kv-gb"):
            capacity(device_bytes=num_pages * PAGE, **arguments)
        return
    got = capacity(device_bytes=num_pages * PAGE, **arguments)
    pages = SelectionLayout.from_config(sparsity, 16, got.hot_factor).num_pages(512, host_tier=True)
    assert pages <= max(num_pages // max_num_seqs, own.num_pages(512, host_tier=True))


def test_host_blocks_come_in_whole_runs_and_no_more_than_are_used() -> None:
    assert capacity(host_bytes=79 * PAGE).num_host_blocks == 64
    assert capacity(host_bytes=80 * PAGE).num_host_blocks == 80
    assert capacity(host_bytes=10**9).num_host_blocks == 128
    assert capacity(host_bytes=10**9, max_model_len=1025).num_host_blocks % RUN_BLOCKS == 0


def test_without_a_host_tier_everything_must_be_resident() -> None:
    got = capacity(host_bytes=0, device_bytes=64 * PAGE)
    assert (got.num_pages, got.num_host_blocks) == (64, 128)
    with pytest.raises(ValueError, match=r"63 pages.*1024 tokens needs 64.*--device-kv-gb"):
        capacity(host_bytes=0, device_bytes=63 * PAGE)


def test_sketches_come_out_of_the_same_bytes_where_they_share_them() -> None:
    assert capacity(device_bytes=40 * PAGE + 12_800, sketch_from_device_bytes=True).num_pages == 40
    assert capacity(device_bytes=40 * PAGE + 12_799, sketch_from_device_bytes=True).num_pages == 39
    with pytest.raises(ValueError, match=r"0 pages.*--device-kv-gb"):
        capacity(device_bytes=10, sketch_from_device_bytes=True)


def test_a_host_tier_that_is_too_small_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"holds 768 tokens.*1024 tokens.*--host-kv-gb.*--max-model-len"):
        capacity(host_bytes=63 * PAGE)


def test_a_device_that_is_too_small_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"holds 7 pages.*needs 8 .*--device-kv-gb.*--budget-tokens or --hot-factor"):
        capacity(device_bytes=7 * PAGE)
    with pytest.raises(ValueError, match=r"holds 40 pages.*needs 64") as error:
        capacity(sparsity=SparsityConfig(attention="dense"))
    assert "--budget-tokens" not in str(error.value)


def test_a_hot_factor_that_was_asked_for_is_kept_or_refused() -> None:
    sparsity = SparsityConfig(budget_tokens=64, recent_tokens=32, hot_factor=3.0)
    assert capacity(sparsity=sparsity).hot_factor == 3.0
    with pytest.raises(ValueError, match=r"15 pages.*needs 16"):
        capacity(sparsity=sparsity, device_bytes=15 * PAGE)


def test_a_rank_of_no_kv_heads_does_not_divide_by_nothing() -> None:
    empty = KvLayout(num_layers=2, num_kv_heads=0, head_dim=8, block_size=16, dtype_bytes=4)
    assert empty.page_bytes == 0
    assert math.isfinite(capacity(layout=empty).hot_factor)
