"""The kernel benchmark: what is wrong is not timed, and the bytes of a kernel by hand."""

import argparse
import ctypes
import json
from pathlib import Path

import pytest
import torch

from oasis_tp.bench import cpu_kernels
from oasis_tp.bench import kernels as bench
from oasis_tp.bench.cpu_kernels import check_decode, check_linear, linears, time_decode, time_linear
from oasis_tp.bench.decode_rig import DecodeRig, layout_of
from oasis_tp.config import SparsityConfig
from oasis_tp.kernels import cpu
from oasis_tp.models.hub import cache_dir
from oasis_tp.models.registry import ModelArch, load_arch
from oasis_tp.sparse.cpu_decode import load_library
from tests.tiny import make_tiny

SPARSE = SparsityConfig(budget_tokens=128, hot_factor=2.0)
QUICK = ("--budget-tokens", "128", "--rounds", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def arch(tiny: Path) -> ModelArch:
    return load_arch(tiny, None)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = load_library(cache_dir())
    if found is None:
        pytest.skip("no C++ compiler for the compiled path")
    return found


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "COLD_BYTES", 2**17)
    monkeypatch.setattr(bench, "bytes_per_second", lambda tp: 1e9)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_compiled_path_passes_its_checks(arch: ModelArch, library: ctypes.CDLL) -> None:
    assert check_decode(arch, library) == {"select": True, "attend": True}
    assert all(check_linear(arch, library, name) for name in linears(arch))


def test_two_rigs_are_asked_the_same_and_their_rows_miss_blocks(arch: ModelArch) -> None:
    first, second = (DecodeRig(layout_of(arch, 2), 3, SPARSE, 700, 2) for _ in range(2))
    for _ in range(2):
        assert torch.equal(first.step(), second.step())
    assert torch.equal(first.query, second.query)
    assert all(state.stats.missed_blocks > 0 for state in first.states)


def test_bytes_of_select_and_attend_are_those_of_the_ceiling(arch: ModelArch, library: ctypes.CDLL) -> None:
    """Position 799 stands in block 49: candidates 1 to 40; attended 8 + 1 + 8 + 1 blocks of 3 heads of 16."""
    select, attend = time_decode(arch, SPARSE, 800, 2, library, rounds=2)
    assert (select.kernel, select.context, select.batch) == ("select", 800, 2)
    assert select.num_bytes == 2 * 40 * 3 * (6 * 16 + 36)
    assert attend.num_bytes == 2 * 18 * 16 * 2 * 3 * 16 * 4
    assert all(timing.seconds > 0 and timing.torch_seconds for timing in (select, attend))


def test_bytes_of_a_product_are_its_weights(arch: ModelArch, library: ctypes.CDLL) -> None:
    for name, (inputs, outputs, _) in linears(arch).items():
        timing = time_linear(arch, name, 2, library, rounds=1)
        assert timing.kernel == f"linear {name}" and timing.num_bytes == 4 * inputs * outputs
        assert 0 < timing.seconds < 1
    per_layer = sum(inputs * outputs for name, (inputs, outputs, _) in linears(arch).items() if name != "head")
    hidden, mlp = 144, 203
    assert per_layer == hidden * 16 * 15 + 9 * 16 * hidden + 3 * hidden * mlp


def test_report_has_every_kernel_context_and_batch(
    tiny: Path, library: ctypes.CDLL, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse("--model", str(tiny), "--contexts", "700,800", "--batches", "1,2", *QUICK)
    assert bench.main(args) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    products = [
        (f"linear {name}", None, batch) for name in ("qkv", "out", "gate_up", "down", "head") for batch in (1, 2)
    ]
    decode = [(kernel, context, batch) for context in (700, 800) for batch in (1, 2) for kernel in ("select", "attend")]
    assert [(row["kernel"], row["context"], row["batch"]) for row in rows] == products + decode
    for row in rows:
        assert row["ok"] and row["us"] > 0 and row["torch_us"] > 0
        assert row["ceiling_share"] == pytest.approx(row["ceiling_us"] / row["us"], rel=0.1, abs=1e-3)


def test_what_is_wrong_is_not_timed(
    tiny: Path, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cpu.linear, cpu.attend
    monkeypatch.setattr(cpu, "linear", lambda *args, **options: right[0](*args, **options) + 1e-3)
    monkeypatch.setattr(cpu, "attend", lambda *args: right[1](*args) * 1.01)
    args = parse("--model", str(tiny), "--contexts", "700", "--batches", "1", *QUICK)
    assert bench.main(args) == 1
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["kernel"] for row in rows if row["ok"]] == ["select"]
    wrong = [row for row in rows if not row["ok"]]
    assert {row["kernel"] for row in wrong} == {f"linear {name}" for name in linears(load_arch(tiny, None))} | {
        "attend"
    }
    assert not any("us" in row for row in wrong)
    assert "attend: its check failed, so it is not timed" in out


def test_a_wrong_choice_is_seen(arch: ModelArch, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled path is asked with other queries than torch's."""
    right = cpu.select
    monkeypatch.setattr(
        cpu,
        "select",
        lambda lib, layer, index, step, q, *kv: right(lib, layer, index, step, q.flip(-1).contiguous(), *kv),
    )
    assert check_decode(arch, library)["select"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--batches", "1,0"], "--batches 0: at least 1"),
        (["--contexts", "1000"], "--contexts 1000: at least --budget-tokens and 512"),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench.main(parse(*arguments))


def test_without_a_compiler_it_says_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load_library", lambda directory: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no C\\+\\+ compiler is found"):
        bench.main(parse("--model", str(tiny), "--contexts", "2000"))
