"""Job scripts: what they say, and that bash runs them as Slurm's tools would have it."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from oasis_tp.slurm import main

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "launcher").glob("*.sbatch"))
BATCH = ["batch", "--tasks-per-node", "2", "--", "-i", "in.jsonl", "-o", "out put.jsonl", "--seed", "1"]


def render(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_what_the_command_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text()
    made_by = text.splitlines()[1].removeprefix("# Made by: oasis-tp slurm ")
    assert render(capsys, *shlex.split(made_by)) == text


def test_there_are_examples_and_bash_can_read_them() -> None:
    assert len(EXAMPLES) >= 3
    for path in EXAMPLES:
        subprocess.run(["bash", "-n", path], check=True, timeout=30)


def test_the_known_traps_are_handled(capsys: pytest.CaptureFixture[str]) -> None:
    text = render(capsys, "batch", "--gpus-per-node", "8", "--nodes", "2", "--", "-i", "a", "-o", "b")
    for part in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue",
        "#SBATCH --open-mode=append", "#SBATCH --signal=B:USR1@120", "--gpu-bind=none", "TRITON_CACHE_DIR=",
        "MASTER_PORT=", "scancel --signal=TERM", "b.status.json",
    ):  # fmt: skip
        assert part in text, part
    assert "gpus-per-task" not in text and "torchrun -" not in text
    assert 'requeue "$SLURM_JOB_ID"' not in render(capsys, "serve", "--gpus-per-node", "1"), "a server starts anew"


def test_torchrun_as_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    text = render(
        capsys, "serve", "--launcher", "torchrun", "--tasks-per-node", "4", "--cpus-per-task", "3", "--nodes", "2"
    )
    (step,) = [line for line in text.splitlines() if line.startswith("srun ")]
    for part in ("--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12", "--nnodes=2", "--nproc-per-node=4"):
        assert part in step.split(), part
    assert '--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HOSTNAME:$MASTER_PORT" -m oasis_tp.serve &' in step
    assert "#SBATCH --ntasks-per-node=4" in text, "the job has room for every rank"


def test_containers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "apptainer exec --nv x.sif python" in render(capsys, "serve", "--gpus-per-node", "1", "--container", "x.sif")
    assert "--container-image=x:1 python" in render(capsys, "serve", "--tasks-per-node", "1", "--container", "x:1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "--gpus-per-node"),
        (["serve", "--gpus-per-node", "4", "--tasks-per-node", "2"], "one rank has one GPU"),
        (["batch", "--tasks-per-node", "2"], "-i in.jsonl -o out.jsonl"),
        (["serve", "--tasks-per-node", "2", "--job-name", "a b"], "--job-name is 'a b'"),
        (["serve", "--tasks-per-node", "2", "--partition", "a\n#SBATCH --x"], "--partition"),
    ],
)
def test_what_cannot_be_a_job_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


SRUN = """#!/bin/bash
echo "srun $*" >> log
kill -USR1 $PPID
read -r word < told
echo "{\\"state\\": \\"$STATE\\"}" > "out put.jsonl.status.json"
exit $STATUS
"""


@pytest.mark.parametrize(
    ("state", "status", "restarts", "code", "requeued"),
    [
        ("preempted", 137, 0, 75, True),
        ("preempted", 75, 100, 75, False),
        ("completed", 0, 0, 0, False),
        ("failed", 1, 0, 1, False),
    ],
)
def test_a_signalled_job_tells_its_ranks_waits_and_requeues_when_preempted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: str,
    status: int,
    restarts: int,
    code: int,
    requeued: bool,
) -> None:
    """Slurm's tools are stand-ins: srun signals its script, as Slurm would, and ends when scancel has told it to."""
    os.mkfifo(tmp_path / "told")
    tools = {
        "srun": SRUN,
        "scancel": '#!/bin/bash\necho "scancel $*" >> log\necho now > told\n',
        "scontrol": '#!/bin/bash\necho "scontrol $*" >> log\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "out put.jsonl.status.json").write_text('{"state": "preempted"}')
    (tmp_path / "job").write_text(render(capsys, *BATCH))
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "STATE": state, "STATUS": str(status),
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip
    result = subprocess.run(["bash", "job"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr
    srun, *others = (tmp_path / "log").read_text().splitlines()
    assert srun.endswith("python -m oasis_tp.batch -i in.jsonl -o out put.jsonl --seed 1")
    assert others == ["scancel --signal=TERM 42"] + ["scontrol requeue 42"] * requeued
