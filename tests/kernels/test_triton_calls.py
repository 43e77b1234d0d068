"""The calls of a step that the kernel benchmark times on a GPU, in the interpreter: all of them, and their bytes."""

import torch

from oasis_tp.bench.decode_rig import DecodeRig
from oasis_tp.bench.kernel_cases import CASES
from oasis_tp.bench.triton_kernels import Call, step_calls
from oasis_tp.config import SparsityConfig
from oasis_tp.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype_bytes=4)
SPARSE = SparsityConfig(budget_tokens=128, recent_tokens=32, hot_factor=2.0, prefetch="off")


def calls_of_a_step() -> dict[str, Call]:
    """Two rows that stand in block 43: 40 candidates, 8 of them chosen, and 1 + 3 pinned."""
    rig = DecodeRig(LAYOUT, 3, SPARSE, 694, 2, use_triton=True)
    with torch.inference_mode():
        return {call.kernel: call for call in step_calls(rig)}


def test_every_kernel_of_a_step_can_be_called_again_and_has_a_check() -> None:
    calls = calls_of_a_step()
    assert list(calls) == [
        *("rotate", "score", "group_scores", "top_blocks", "plan_copies", "gather"),
        *("sparse_attention", "tail_attention", "merge_states"),
    ]
    for call in calls.values():
        call.run()
        assert call.case in CASES
        assert call.over_link == (call.kernel == "gather")
    block = 2 * 16 * 64 * 4
    assert calls["sparse_attention"].num_bytes == 2 * 2 * (1 + 8 + 3) * block
    assert calls["gather"].num_bytes % block == 0 and calls["gather"].num_bytes > 0
    scores = 2 * 2 * 3 * 40 * 4
    assert calls["score"].num_bytes == 2 * 2 * 40 * (4 * 64 + 32 + 64 + 2) + 2 * scores


def test_torch_does_the_same_where_it_stands_beside_a_kernel() -> None:
    calls = calls_of_a_step()
    plain = {name: call.torch_run() for name, call in calls.items() if call.torch_run is not None}
    assert set(plain) == {"rotate", "score", "group_scores", "top_blocks"}
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(calls["rotate"].run(), plain["rotate"], **close)
    torch.testing.assert_close(calls["score"].run()[0], torch.stack(plain["score"]), **close)
    torch.testing.assert_close(calls["group_scores"].run(), torch.stack(plain["group_scores"]), **close)
    assert torch.equal(calls["top_blocks"].run().long(), torch.stack(plain["top_blocks"]))
