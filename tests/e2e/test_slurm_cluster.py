"""A batch job in a real Slurm: told to end in the middle, queued again, and as complete as an undisturbed one."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oasis_tp import generate, slurm
from oasis_tp.batch.__main__ import SIGNALS
from oasis_tp.batch.__main__ import main as batch
from tests.e2e.slurm_cluster import Cluster, cluster, wait_for, why_not
from tests.tiny import make_tiny

ROOT = Path(__file__).parents[2]
NUM_REQUESTS = 20
OPTIONS = ["--max-num-seqs", "2", "--budget-tokens", "64", "--recent-tokens", "16", "--comm", "gloo"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        made.environment = made.environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        yield made


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def write_input(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(NUM_REQUESTS):
            body: dict[str, Any] = {"prompt": f"the quick brown fox {number}", "max_tokens": 80, "ignore_eos": True}
            if number % 2:
                body["temperature"] = 0
            line = {"custom_id": f"req-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def answers(path: Path) -> dict[str, tuple[str, int]]:
    """By custom_id: text and number of tokens; none twice."""
    found = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        assert entry["custom_id"] not in found, "answered twice"
        body = entry["response"]["body"]
        found[entry["custom_id"]] = body["choices"][0]["text"], body["usage"]["completion_tokens"]
    return found


def test_srun_gives_the_tokens_of_one_rank(running: Cluster, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [str(model), "--prompt", "the quick brown fox", "--max-tokens", "24", "--json", *OPTIONS]
    assert generate.main(options) == 0
    lines = [capfd.readouterr().out]
    lines.append(running.run("srun", "-n", "2", "--overcommit", sys.executable, "-m", "oasis_tp.generate", *options))
    one, two = ([json.loads(x)["token_ids"] for x in text.splitlines() if x.startswith("{")] for text in lines)
    assert len(two) == 1, "one rank speaks"
    assert one == two and len(one[0]) == 24


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """The answers of one rank that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    files = ["-i", str(write_input(folder / "in.jsonl")), "-o", str(folder / "out.jsonl")]
    assert batch([str(model), *files, *OPTIONS]) == 0
    return answers(folder / "out.jsonl")


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_preempted_job_is_requeued_and_ends_with_every_answer(
    launcher: str,
    running: Cluster,
    model: Path,
    undisturbed: dict[str, tuple[str, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.jsonl"
    files = ["-i", str(write_input(tmp_path / "in.jsonl")), "-o"]
    own = ["batch", "--tasks-per-node", "2", "--time", "10:00", "--python", sys.executable, "--launcher", launcher]
    capsys.readouterr()
    assert slurm.main([*own, "--", str(model), *files, str(output), *OPTIONS]) == 0
    script = tmp_path / "job.sbatch"
    script.write_text(capsys.readouterr().out.replace("srun ", "srun --overcommit "))  # the host may have one core
    job = running.run(
        "sbatch", "--parsable", "--overcommit", f"--chdir={tmp_path}", f"--output={tmp_path}/log", str(script)
    ).strip()

    def log() -> str:
        return (tmp_path / "log").read_text() if (tmp_path / "log").exists() else running.state(job)

    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3, f"answers: {log()}")
    running.run("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@… does before the time limit
    wait_for(lambda: running.state(job) == "PENDING/1", f"the requeue: {log()}")
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert status["state"] == "preempted"
    first = answers(output)
    assert 3 <= len(first) < NUM_REQUESTS

    # Slurm lets a requeued job wait for two minutes; nothing here needs that.
    running.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: running.state(job).split("/")[0] == "COMPLETED", f"the end: {log()}", 120)
    assert running.state(job) == "COMPLETED/1"
    assert answers(output) == undisturbed and len(undisturbed) == NUM_REQUESTS
    assert {name: first[name] for name in first} == {name: answers(output)[name] for name in first}
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert (status["state"], status["completed"], status["resumed"]) == ("completed", NUM_REQUESTS, len(first))
