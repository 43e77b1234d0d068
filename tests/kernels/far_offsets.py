"""Run as a script under TRITON_INTERPRET=1: kernels on pools of more than 2**31 elements, of which few are touched.

A script of its own, because an offset that wraps ends the process rather than a test.
"""

import mmap

import torch
from triton.runtime.interpreter import GridExecutor

from oasis_tp.kernels import attention, gather, rope_store, rotate, score, seal
from oasis_tp.kernels.rows import RowFacts, Rows

D, BLOCK = 64, 16
FAR = 2**20 + 5
"""Pages of 2 * 16 * 64 elements: this one begins behind element 2**31."""

# Tensors are on the CPU already; the interpreter would copy their whole storage onto itself.
GridExecutor._restore_args_dev = lambda *_: None


def far(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose memory is given only where it is touched."""
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


def main() -> None:
    kv = far(FAR + 2, 1, 2, BLOCK, D, dtype=torch.float16)
    assert kv.numel() > 2**31
    page, first = torch.tensor([[FAR]]), torch.tensor([0])
    angles = torch.zeros(1, D // 2)
    k, v = torch.randn(1, 1, D).half(), torch.randn(1, 1, D).half()
    rope_store.rope_store(k, k, v, angles.cos(), angles, first, page, kv)
    assert torch.equal(kv[FAR, 0, 0, 0], k[0, 0]) and torch.equal(kv[FAR, 0, 1, 0], v[0, 0])

    states, lse = torch.empty(1, 1, 1, 1, D), torch.empty(1, 1, 1, 1)
    one = torch.tensor([[1]], dtype=torch.int32)
    attention.sparse_attention(k[:, :, None], kv, page.int()[None], one, states, lse)
    torch.testing.assert_close(states[0, 0, 0, 0], v[0, 0].float(), atol=1e-3, rtol=0)

    host = far(1, FAR + 2, 2, BLOCK, D, dtype=torch.float16)
    gather.write_back(kv, host, page.int()[None], page.int()[None] + 1, one)
    assert torch.equal(host[0, FAR + 1], kv[FAR, 0])
    gather.gather(host, kv, page.int()[None] + 1, page.int()[None] - 1, one)
    assert torch.equal(kv[FAR - 1, 0], kv[FAR, 0])

    home = 2**23 + 3  # of 256 bytes of codes each
    sketch = (
        far(home + 2, 1, BLOCK, D // 4, dtype=torch.uint8),
        far(home + 2, 1, BLOCK, dtype=torch.float16),
        far(home + 2, 1, 2, D, dtype=torch.int8),
        far(home + 2, 1, 2, dtype=torch.float16),
    )
    assert sketch[0].numel() > 2**31
    signs = torch.ones(D)
    layer = [x[None] for x in sketch]
    seal.seal(kv[None, :, :, 0], kv[None, :, :, 1], page[None], torch.tensor([home]), signs, *layer)
    seal.seal(kv[None, :, :, 0], kv[None, :, :, 1], page[None], first, signs, *layer)
    assert all(torch.equal(x[home], x[0]) for x in sketch) and sketch[0][home].any()
    q = torch.randn(1, 1, 1, D)
    facts = RowFacts(
        table_row=0, first=0, last=2, budget=1, position=40, num_slots=1, resident=False, use_tail=False
    )  # fmt: skip
    rows = Rows.of([facts], BLOCK, q.device)
    table = torch.tensor([[home, 0]], dtype=torch.int32)
    scores, tail = score.score(q, rotate.rotate(q, signs), table, rows, *sketch)
    assert scores.isfinite().all() and scores[..., 0] == scores[..., 1] and tail[..., 0] == tail[..., 1]


if __name__ == "__main__":
    main()
    print("far offsets are right")
