"""Triton kernels: in the interpreter against the slow truth, and compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oasis_tp.bench import kernel_cases
from oasis_tp.bench.kernel_cases import CASES, Case
from oasis_tp.bench.kernel_tolerance import TOLERANCE
from oasis_tp.kernels import merge_states, reference
from oasis_tp.kernels.launch import check_head_dim
from oasis_tp.kernels.rows import RowFacts, Rows
from oasis_tp.kv.residency import NOTHING, Residency

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

# group, head_dim, count, bits: one token, sizes beside powers of two, a last block that is not full.
SHAPES = [(1, 64, 1, 1), (3, 64, 65, 2), (4, 128, 63, 1), (8, 128, 17, 2)]
LONG = {"copy_plan": 1000, "rms_norm": 1000, "silu_mul": 1500, "attention": 1000, "tail": 600, "rotate": 1000}
LONG |= {"group_scores": 2100, "top_blocks": 2100}
"""Counts at which a kernel's loop has several rounds, where the reference is fast enough."""
SLOW = {"seal", "rope_store"}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def shapes(kernel: str) -> list[tuple[int, int, int, int]]:
    if kernel in SLOW:
        return [(group, head_dim, min(count, 5), bits) for group, head_dim, count, bits in SHAPES]
    return SHAPES + ([(1, 64, LONG[kernel], 2)] if kernel in LONG else [])


@pytest.mark.parametrize(
    ("kernel", "dtype"), [key for key in TOLERANCE if key[1] != torch.bfloat16], ids=lambda x: str(x).split(".")[-1]
)
def test_kernel_matches_reference(kernel: str, dtype: torch.dtype) -> None:
    for group, head_dim, count, bits in shapes(kernel):
        share = kernel_cases.worst(kernel, Case(dtype, CPU, group, head_dim, count, bits=bits))
        assert share <= 1, f"{kernel} {dtype} group {group} head_dim {head_dim} count {count}: {share} of the tolerance"


def test_every_kernel_has_a_case_and_a_tolerance() -> None:
    assert {kernel for kernel, _ in TOLERANCE} == set(CASES)
    sources = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    assert sources.count("@triton.jit") > len(CASES)


def test_an_output_that_is_not_written_is_seen() -> None:
    with kernel_cases.poisoned():
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert isinstance(torch.empty, type(torch.zeros))


def test_a_wrong_result_is_worse_than_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.tensor([1.0, 2.0])
    case = Case(torch.float32, CPU, 1, 64, 1)
    for got in (wrong + 1e-3, wrong * torch.nan, torch.tensor([1.0, torch.inf])):
        monkeypatch.setitem(CASES, "silu_mul", lambda _, got=got: iter([("x", got, wrong)]))
        assert not kernel_cases.worst("silu_mul", case) <= 1
    monkeypatch.setitem(CASES, "top_blocks", lambda _: iter([("x", wrong + 1e-6, wrong)]))
    assert kernel_cases.worst("top_blocks", case) == float("inf")


def test_head_dims_that_the_kernels_cannot_take_are_named() -> None:
    check_head_dim(64)
    for head_dim in (8, 80, 96):
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}"):
            check_head_dim(head_dim)


@pytest.mark.parametrize("seed", range(4))
def test_the_reference_of_the_plan_is_what_residency_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_slots, first, last, position, tick = 12, 1, 21, 22 * 16 + 3, 9
    tables = Residency(num_layers=1, num_rows=1, num_heads=1, max_slots=16, max_blocks=24, device=CPU)
    order = first + torch.randperm(last - first, generator=generator)
    held = torch.cat((torch.tensor([0, 21, 22]), order[: 4 + 2 * seed]))[:num_slots]
    tables.place(0, held, torch.randperm(num_slots, generator=generator)[: held.numel()])
    tables.last_selected[0, 0, 0] = torch.randint(0, tick, (16,), generator=generator).int()
    tables.tick = tick
    chosen = torch.randperm(last - first, generator=generator)[:6].sort().values
    names = ("block_in_slot", "slot_of_block", "last_selected", "fetched")
    lists = reference.Slots(*(getattr(tables, name)[0, 0, 0].tolist() for name in names))
    slots, copies, _ = reference.plan_copies(chosen.tolist(), first, last, position, num_slots, 16, lists, tick)
    blocks = torch.tensor([[0, *(first + chosen).tolist(), 21, 22]])
    found = tables.lookup(0, 0, blocks)
    tables.stamp(0, 0, torch.where(found < 0, found[:, -1:], found))
    heads, columns = (found < 0).nonzero(as_tuple=True)
    new, _ = tables.replace(0, 0, num_slots, (first, last), heads, blocks[heads, columns], NOTHING)
    found[heads, columns] = new
    assert len(copies) == new.numel() > 0 and found[0].tolist() == slots
    wanted = torch.randperm(last - first, generator=generator)[:8]
    coming = reference.plan_ahead(wanted.tolist(), first, last, num_slots, 3, lists, tick)
    _, ahead, into = tables.fetch(0, 0, num_slots, (first, last), (first + wanted)[None], 3)
    assert coming == list(zip(ahead.tolist(), into.tolist(), strict=True))
    for name in names:
        assert getattr(tables, name)[0, 0, 0].tolist() == getattr(lists, name)


def test_a_rows_bits_do_not_depend_on_the_room_for_longer_ones() -> None:
    """A longer row in the batch, or a graph made for one, adds states that are empty for this row."""
    facts = RowFacts(
        table_row=0, first=0, last=4, budget=2, position=70, num_slots=9, resident=False, use_tail=True
    )  # fmt: skip
    rows = Rows.of([facts], 16, CPU)
    states, lse = torch.randn(1, 1, 2, 21, 64), 3 * torch.randn(1, 1, 2, 21)
    merged = merge_states.merge_states(states, lse, 13, rows, torch.float32)
    for more_attended, more_tail in ((1, 0), (19, 7)):
        parts = states.split([13, 8], 3), lse.split([13, 8], 3)
        padded = [
            torch.cat([inside, torch.full((*inside.shape[:3], more_attended, *inside.shape[4:]), fill),
                       outside, torch.full((*outside.shape[:3], more_tail, *outside.shape[4:]), fill)], 3)
            for (inside, outside), fill in zip(parts, (0.0, -torch.inf), strict=True)
        ]  # fmt: skip
        again = merge_states.merge_states(*padded, 13 + more_attended, rows, torch.float32)
        assert all(torch.equal(x, y) for x, y in zip(merged, again, strict=True))


def run_script(name: str, *arguments: str, interpret: bool, cache: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    script = Path(__file__).with_name(name)
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_offsets_past_2_to_the_31_elements(tmp_path: Path) -> None:
    assert "far offsets are right" in run_script("far_offsets.py", interpret=True, cache=tmp_path)


@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    made = json.loads(run_script("compile_kernels.py", target, interpret=False, cache=tmp_path))
    assert len({entry["kernel"] for entry in made}) == 17
    for entry in made:
        assert entry["binary"] == ["hsaco" if target.startswith("gfx") else "cubin"], entry
        assert entry["shared_bytes"] <= SHARED_LIMIT[target], entry
