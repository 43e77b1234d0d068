"""The table of ranks that is printed at start: who runs where."""

import os
import socket

import torch

from oasis_tp.comm import TpGroup
from oasis_tp.numa import format_list

CELL_BYTES = 64
HEAD = ("host", "pid", "device", "cores")


def rank_table(tp: TpGroup) -> list[str]:
    """A line per rank, under a head, the same on every rank. Collective."""
    mine = (socket.gethostname(), str(os.getpid()), str(tp.device), format_list(os.sched_getaffinity(0)))
    cells = torch.zeros(tp.size, len(mine), CELL_BYTES, dtype=torch.int64)
    for column, text in enumerate(mine):
        data = text.encode()[:CELL_BYTES]
        cells[tp.rank, column, : len(data)] = torch.tensor(list(data))
    tp.sum_over_ranks(cells)
    rows = [HEAD] + [tuple(bytes(cell).rstrip(b"\0").decode() for cell in row) for row in cells.tolist()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    names = ["rank", *map(str, range(tp.size))]
    return [f"oasis_tp {name:>4}  {line}" for name, line in zip(names, lines, strict=True)]
