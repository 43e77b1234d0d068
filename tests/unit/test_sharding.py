"""The shard table: every head has an owner, contiguous and as even as can be."""

from itertools import pairwise

import pytest

from oasis_tp.sharding import HeadShard, head_shards, split_range


@pytest.mark.parametrize("total", [0, 1, 7, 49152])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_ranges_cover_everything_once(total: int, parts: int) -> None:
    ranges = [split_range(total, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_nine_heads_of_three_groups_on_two_ranks() -> None:
    assert head_shards(9, 3, 2) == [HeadShard(0, 6, 0, 2), HeadShard(6, 9, 2, 3)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 1), (8, 2), (32, 8), (6, 6), (14, 2)])
def test_every_query_head_is_held_once_beside_its_kv_head(num_heads: int, num_kv_heads: int) -> None:
    group = num_heads // num_kv_heads
    for tp_size in range(1, num_heads + 1):
        shards = head_shards(num_heads, num_kv_heads, tp_size)
        assert len(shards) == tp_size
        assert [head for s in shards for head in range(s.q_start, s.q_stop)] == list(range(num_heads))
        for shard in shards:
            assert shard.num_heads >= 1 and shard.num_kv_heads >= 1
            assert {head // group for head in range(shard.q_start, shard.q_stop)} == set(
                range(shard.kv_start, shard.kv_stop)
            )
            assert shard.num_heads % shard.num_kv_heads == 0


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 10: the model has 9 query heads; use 1 to 9"):
        head_shards(9, 3, 10)
