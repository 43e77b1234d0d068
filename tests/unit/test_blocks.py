"""Pages and host runs: counters that lose nothing and notice what is given back twice."""

import random

import pytest

from oasis_tp.kv.blocks import PagePool, RunPool, blocks_of, runs_for
from oasis_tp.kv.layout import RUN_BLOCKS


def test_pages_come_back_whatever_the_order() -> None:
    pool, draw, owned = PagePool(37), random.Random(0), []
    for _ in range(300):
        if owned and draw.random() < 0.5:
            pool.give_back(owned.pop(draw.randrange(len(owned))))
        else:
            owned.append(pool.take(draw.randint(0, pool.num_free)))
        pool.check_integrity()
        flat = [page for pages in owned for page in pages]
        assert len(set(flat)) == len(flat) == 37 - pool.num_free
    for pages in owned:
        pool.give_back(pages)
    assert pool.num_free == 37


def test_a_page_given_back_twice_is_noticed() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(pages)
    with pytest.raises(AssertionError):
        pool.take(5)


def test_a_shared_run_is_free_when_its_last_owner_lets_go() -> None:
    pool = RunPool(4 * RUN_BLOCKS)
    runs = pool.take(2)
    pool.share(runs[:1])
    pool.release(runs)
    pool.check_integrity()
    assert pool.num_free == 3
    pool.release(runs[:1])
    pool.check_integrity()
    assert pool.num_free == 4
    with pytest.raises(KeyError):
        pool.release(runs[:1])


def test_runs_are_contiguous_where_a_gap_is_wide_enough() -> None:
    pool = RunPool(6 * RUN_BLOCKS)
    runs = pool.take(6)
    assert runs == [0, 1, 2, 3, 4, 5]
    pool.release([0, 2, 3, 5])
    assert pool.take(2) == [2, 3]
    assert sorted(pool.take(2)) == [0, 5]
    assert pool.take(0) == []


def test_a_tier_of_broken_runs_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        RunPool(RUN_BLOCKS + 1)


def test_blocks_of_runs_are_numbered_in_order() -> None:
    assert blocks_of([3, 1]) == [*range(3 * RUN_BLOCKS, 4 * RUN_BLOCKS), *range(RUN_BLOCKS, 2 * RUN_BLOCKS)]
    assert [runs_for(n) for n in (0, 1, RUN_BLOCKS, RUN_BLOCKS + 1)] == [0, 1, 1, 2]
