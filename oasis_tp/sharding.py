"""Who owns what: the shard table over KV heads and uneven ranges for everything else. Pure Python."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One rank's attention heads, as ranges of the whole model's heads.

    `kv_start:kv_stop` are KV heads, `q_start:q_stop` query heads. With more ranks than KV heads several ranks hold
    the same KV head and split its query group.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_heads(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_stop - self.kv_start


def split_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `range(total)` cut into `parts` contiguous pieces; the first pieces take the remainder."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def head_shards(num_heads: int, num_kv_heads: int, tp_size: int) -> list[HeadShard]:
    """The shard table: entry r is what rank r holds.

    Up to `num_kv_heads` ranks, each rank owns a contiguous range of KV heads (uneven allowed) and the query heads that
    follow them. Beyond, ranks are dealt to KV heads and split each group of query heads; at most one rank per
    query head.

    Raises:
        ValueError: more ranks than query heads.
    """
    group = num_heads // num_kv_heads
    if tp_size > num_heads:
        raise ValueError(
            f"--tensor-parallel-size {tp_size}: the model has {num_heads} query heads; use 1 to {num_heads} ranks"
        )
    shards = []
    if tp_size <= num_kv_heads:
        for rank in range(tp_size):
            kv_start, kv_stop = split_range(num_kv_heads, tp_size, rank)
            shards.append(HeadShard(kv_start * group, kv_stop * group, kv_start, kv_stop))
        return shards
    for kv_head in range(num_kv_heads):
        first, last = split_range(tp_size, num_kv_heads, kv_head)
        sharers = last - first
        for part in range(sharers):
            q_start, q_stop = split_range(group, sharers, part)
            shards.append(HeadShard(kv_head * group + q_start, kv_head * group + q_stop, kv_head, kv_head + 1))
    return shards
