"""A real Slurm of one node on loopback, for as long as a test needs it: munge, controller and node daemon."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONFIG = """\
ClusterName=oasis
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Why there can be no cluster here; empty when there can."""
    missing = [tool for tool in TOOLS if _find(tool) is None]
    if missing:
        return f"Slurm is not installed ({missing[0]} is missing; Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "Slurm's daemons must start jobs as any user: root only"


class Cluster:
    """Runs Slurm's commands against this cluster."""

    def __init__(self, folder: Path) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}

    def run(self, *command: str, check: bool = True) -> str:
        """What a command prints."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, …; how many times it was queued again follows after a slash."""
        fields = dict(
            item.split("=", 1) for item in self.run("scontrol", "show", "-o", "job", job).split() if "=" in item
        )
        return f"{fields['JobState']}/{fields['Restarts']}"


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Ask until it holds; Slurm has no way to wait for most of what happens in it."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A running cluster whose every file is in `folder`."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=socket.gethostname(), folder=folder, ctld_port=ports[0], slurmd_port=ports[1], cpus=os.cpu_count()
        )
    )
    made = Cluster(folder)
    options = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    log = (folder / "daemons.log").open("wb")

    def start(*command: str) -> None:
        daemons.append(subprocess.Popen(command, env=made.environment, stdout=log, stderr=log))

    try:
        start(_need("munged"), "--foreground", "--force", f"--key-file={key}", *options)
        wait_for((folder / "munge.socket").exists, "munged")
        start(_need("slurmctld"), "-D")
        start(_need("slurmd"), "-D", "-N", socket.gethostname())
        wait_for(lambda: "State=IDLE" in made.run("scontrol", "show", "node", check=False), "the node", 30)
        yield made
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        log.close()


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _need(tool: str) -> str:
    found = _find(tool)
    assert found is not None
    return found
