"""`gpu_check` where there is no GPU: it fails when a kernel is wrong, and a whole step is the torch path's."""

import json

import pytest
import torch

from oasis_tp.bench import agreement, gpu_check, gpu_decode, kernel_cases
from oasis_tp.kv.transfers import Transfers
from oasis_tp.sparse.triton_decode import TritonStep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU run `make gpu-check`")
CPU = torch.device("cpu")
PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4


def broken(*_: object) -> None:
    raise RuntimeError("not a finite number")


def test_it_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--kernels", "silu_mul,top_blocks"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["kernel"], row["dtype"], row["ok"]) for row in summary["kernels"]] == [
        ("top_blocks", "float32", True),
        ("silu_mul", "float32", True),
        ("silu_mul", "float16", True),
    ]
    assert all(summary[check] is True for check in gpu_check.CHECKS)
    assert "speed" not in summary and "gather_gb_s" not in summary
    rows = summary["model"]["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [("resolve", 1), ("paper", 1), ("dense", 2)]
    resolve, paper, dense = rows
    assert 0 < resolve["hit_rate"] < 1 and resolve["loaded_bytes"] > 0 and dense["loaded_bytes"] == 0
    assert resolve["kv_bytes_per_request"] == paper["kv_bytes_per_request"] + PAGE_BYTES  # no sink there
    assert dense["kv_bytes_per_request"] == 20 * PAGE_BYTES
    assert resolve["kv_bytes_per_request"] == (2 * 4 + 1 + 2 + 1) * PAGE_BYTES
    assert summary["model"]["not_measured"] == [] and summary["model_is_finite"] is True


def test_what_would_begin_too_late_is_named_and_not_timed() -> None:
    measured = gpu_decode.time_model(CPU, ends=0.0)
    assert measured["rows"] == [] and measured["not_measured"][2] == "dense, context 320, batch 2: out of time"


def test_a_model_whose_output_is_no_number_makes_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", {})
    monkeypatch.setattr(gpu_decode.Forks, "decode", broken)
    assert gpu_check.main(["--kernels", "silu_mul"]) == 1


def test_a_wrong_kernel_makes_it_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_cases.silu_mul, "silu_mul", lambda x: x.chunk(2, 1)[0].clone())
    monkeypatch.setattr(gpu_check, "CHECKS", {})
    assert gpu_check.main(["--kernels", "silu_mul"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_what_raises_is_wrong_and_the_rest_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cases.silu_mul, "silu_mul", broken)
    monkeypatch.setattr(gpu_check, "CHECKS", {"first": broken, "second": lambda device: True})
    assert gpu_check.main(["--kernels", "silu_mul"]) == 1
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert [row["ok"] for row in summary["kernels"]] == [False, False]
    assert (summary["first"], summary["second"]) == (False, True) and "model" not in summary
    assert "RuntimeError: not a finite number" in captured.err


def test_an_unknown_kernel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--kernels", "silu"]) == 2
    assert "--kernels silu: there is rope_store," in capsys.readouterr().err


def test_the_step_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched: the pages of missing blocks hold what was there before."""
    monkeypatch.setattr(Transfers, "load_planned", lambda *_: None)
    assert not gpu_check.check_step(CPU, steps=2)


def test_the_graph_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded step's tick in place of the replayed one's."""
    ticks: dict[int, torch.Tensor] = {}
    stale = property(lambda step: ticks.setdefault(id(step), step.inputs[-1:].clone()))
    monkeypatch.setattr(TritonStep, "tick", stale)
    assert not gpu_check.check_graph(CPU, steps=4)


def test_the_check_with_delays_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what is under way."""
    monkeypatch.setattr(Transfers, "settle", lambda *_: None)
    assert not agreement.check_delays(CPU)


def test_the_check_of_two_ranks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks decode as many tokens as ever, the rank alone fewer."""
    monkeypatch.setattr(agreement, "NUM_TOKENS", 2)
    assert not agreement.check_ranks(CPU)


def test_what_is_resident_changes_no_answer() -> None:
    """A step from the first hot set and the same step again, when everything it chose is there: equal to the bit."""
    rig = gpu_check.small_rig(CPU, torch.float32, use_triton=True, prefetch="off")

    def missed() -> tuple[list[int], list[float]]:
        stats = [state.stats for state in rig.states]
        return [s.missed_blocks for s in stats], [float(s.missed_mass) for s in stats]

    with torch.inference_mode():
        out = rig.step()
        blocks, mass = missed()
        assert torch.equal(rig.again(), out)
    assert min(blocks) > 0 and missed() == (blocks, [2 * share for share in mass])
    for state in rig.states:
        share = float(state.stats.missed_mass) / state.stats.missed_mass_count
        assert 0 < share < 1
        rig.cache.residency.check_row(state.row)
