"""The vocabulary cut over the ranks: token embedding and output head."""

import torch
import torch.nn.functional as F

from oasis_tp.comm import TpGroup
from oasis_tp.nn.ops import Place
from oasis_tp.sharding import split_range


class VocabEmbedding:
    """This rank's rows of a [vocab, hidden] table; looks tokens up, and as a head scores hidden states.

    `ranges[r]` is rank r's half-open range of token ids; the ranges may differ in length by one.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TpGroup, place: Place) -> None:
        assert vocab_size >= tp.size, (vocab_size, tp.size)
        self.tp, self.ops = tp, place.ops
        self.ranges = [split_range(vocab_size, tp.size, rank) for rank in range(tp.size)]
        self.start, self.stop = self.ranges[tp.rank]
        self.weight = place.empty(self.stop - self.start, hidden_size)

    def lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 ids below vocab_size → [T, hidden], whole on every rank."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        foreign = (token_ids < self.start) | (token_ids >= self.stop)
        local = (token_ids - self.start).masked_fill(foreign, 0)
        return self.tp.all_reduce(F.embedding(local, self.weight).masked_fill_(foreign[:, None], 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] → [N, local_vocab] float32, for this rank's range of ids only."""
        return self.ops.linear(hidden, self.weight).float()
