"""`gpu_check` where there is no GPU: it fails when a kernel is wrong, and a whole step is the torch path's."""

import json

import pytest
import torch

from oasis_tp.bench import gpu_check, kernel_cases
from oasis_tp.bench.kernel_chain import DecodeLayer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU run `make gpu-check`")
SHAPE = {"num_rows": 2, "num_heads": 2, "group": 3, "head_dim": 64, "num_candidates": 40, "budget": 8}


def test_it_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--kernels", "silu_mul,top_blocks"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["kernel"], row["dtype"], row["ok"]) for row in summary["kernels"]] == [
        ("top_blocks", "float32", True),
        ("silu_mul", "float32", True),
        ("silu_mul", "float16", True),
    ]
    assert summary["step_equals_torch"] is True and summary["graph_equals_eager"] is None
    assert "speed" not in summary and "gather_gb_s" not in summary


def test_a_wrong_kernel_makes_it_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_cases.silu_mul, "silu_mul", lambda x: x.chunk(2, 1)[0].clone())
    assert gpu_check.main(["--kernels", "silu_mul"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_an_unknown_kernel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--kernels", "silu"]) == 2
    assert "--kernels silu: there is rope_store," in capsys.readouterr().err


def test_the_step_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched: the pages of missing blocks hold what was there before."""
    monkeypatch.setattr("oasis_tp.bench.kernel_chain.gather.gather", lambda *_: None)
    assert not gpu_check.check_step(torch.device("cpu"), steps=2)


def test_what_is_resident_changes_no_answer() -> None:
    """A step from the first hot set and the same step again, when everything it chose is there: equal to the bit."""
    layer = DecodeLayer(torch.float32, torch.device("cpu"), **SHAPE)
    q = torch.randn(2, 2, 3, 64)
    out, missed, counts = layer.step(q)
    again, missed_again, counts_again = layer.step(q)
    assert (counts > 0).any() and (counts_again == 0).all()
    assert torch.equal(out, again) and torch.equal(missed, missed_again)
    assert ((missed > 0) & (missed < 1)).all()
    for row in range(2):
        layer.residency.check_row(row)
