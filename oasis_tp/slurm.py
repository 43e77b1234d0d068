"""`oasis-tp slurm`: a job script for sbatch, with what goes wrong in such scripts already handled.

It is printed, not submitted, so that it can be read and changed:

    oasis-tp slurm batch --gpus-per-node 8 --time 4:00:00 -- -i in.jsonl -o out.jsonl --model … > job.sbatch
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePath
from string import Template

PROG = "oasis-tp slurm"
COMMANDS = ("batch", "serve", "generate", "bench")
MAX_REQUEUES = 100

SCRIPT = Template(r"""#!/bin/bash
# Made by: $made_by
$directives
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@$signal_lead
set -uo pipefail

# Compiled kernels go to a folder of this node and job: ranks that share one in a home folder lose its files.
export TRITON_CACHE_DIR="$${SLURM_TMPDIR:-$${TMPDIR:-/tmp}}/oasis-tp-$$SLURM_JOB_ID/triton"

# The ranks meet on a port that nobody listens on now, outside the range that the system gives to any connection.
# This script runs on the first node, which is where they meet.
for port in $$(shuf -i 20000-31999 -n 100); do
    (exec 3<>"/dev/tcp/127.0.0.1/$$port") 2>/dev/null || break
done
export MASTER_PORT=$$port

# Slurm sends USR1 to this script only, $signal_lead seconds before the time limit (and TERM when it preempts the job).
# The ranks are told with scancel: srun itself would answer TERM by killing them.
told=0
tell() {
    told=$$((told + 1))
    scancel --signal=TERM "$$SLURM_JOB_ID"
}
trap tell USR1 TERM

$preparation# $launching
# --gpu-bind=none: ranks that cannot see each other's GPUs cannot copy between them.
srun $srun_options $command &
step=$$!

# A trap interrupts wait; the step's own status comes from the wait that no trap interrupted.
seen=-1
while [ "$$seen" != "$$told" ]; do
    seen=$$told
    wait "$$step"
    status=$$?
done
$ending""")

LAUNCHING = {
    "srun": "One task per rank, without a launcher in between: torchrun dies of SIGUSR1 and leaves its workers behind.",
    "torchrun": "One torchrun per node. It would die of SIGUSR1 and leave its workers behind; TERM it passes on.",
}
PLAIN_ENDING = 'exit "$status"\n'
BATCH_PREPARATION = Template("""# What an earlier run of this job said does not count for this one.
rm -f $status_file

""")
BATCH_ENDING = Template(r"""
# The job's own word counts, not an exit status that launchers and killed neighbours may change.
if grep -qs '"state": "preempted"' $status_file; then
    if [ "$${SLURM_RESTART_COUNT:-0}" -lt $max_requeues ]; then
        scontrol requeue "$$SLURM_JOB_ID"
    fi
    exit 75
fi
exit "$$status"
""")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script. Returns 0, or 2 for what the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, rest = _split(arguments)
    args = _parser().parse_args(own)
    try:
        script = render(args, rest, made_by=shlex.join([*PROG.split(), *arguments]))
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    print(script, end="")
    return 0


def render(args: argparse.Namespace, rest: Sequence[str], made_by: str) -> str:
    """The script's text.

    Args:
        args: this command's own options (see `_parser`).
        rest: options of the command that the job runs.
        made_by: the command line that asked for it, for whoever finds the script later.

    Raises:
        ValueError: a value that sbatch could not read, or an option of the job that it cannot do without.
    """
    tasks = args.gpus_per_node or args.tasks_per_node
    if not tasks:
        raise ValueError("give --gpus-per-node N, or --tasks-per-node N for ranks on CPUs")
    if args.gpus_per_node and args.tasks_per_node not in (None, args.gpus_per_node):
        raise ValueError(
            f"--tasks-per-node {args.tasks_per_node} with --gpus-per-node {args.gpus_per_node}: one rank has one GPU; "
            "leave --tasks-per-node out"
        )
    directives = {
        "job-name": args.job_name or f"oasis-{args.command}",
        "output": "%x-%j.out",
        "nodes": args.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": args.gpus_per_node,
        "cpus-per-task": args.cpus_per_task,
        "mem": args.mem,
        "time": args.time,
        "partition": args.partition,
        "account": args.account,
    }
    for name, value in directives.items():
        if value is not None and not re.fullmatch(r"[\w%.:/,+@=-]+", str(value)):
            raise ValueError(f"--{name} is {value!r}; allowed: letters, digits and %.:/,+@=-_")
    # Only a batch can go on where it was ended; other jobs end for good.
    preparation, ending = "", PLAIN_ENDING
    if args.command == "batch":
        status_file = shlex.quote(_status_file(rest))
        preparation = BATCH_PREPARATION.substitute(status_file=status_file)
        ending = BATCH_ENDING.substitute(status_file=status_file, max_requeues=MAX_REQUEUES)
    srun_options = ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    if args.gpus_per_node:
        srun_options.append("--gpu-bind=none")
    ranks_per_task = tasks if args.launcher == "torchrun" else 1
    if args.launcher == "torchrun":
        srun_options += [f"--ntasks={args.nodes}", "--ntasks-per-node=1"]
    if args.cpus_per_task:
        srun_options.append(f"--cpus-per-task={args.cpus_per_task * ranks_per_task}")  # not taken from sbatch
    return SCRIPT.substitute(
        made_by=made_by.replace("\n", " "),
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in directives.items() if value),
        signal_lead=args.signal_lead,
        srun_options=" ".join(srun_options),
        launching=LAUNCHING[args.launcher],
        command=_command(args, rest, tasks),
        preparation=preparation,
        ending=ending,
    )


def _command(args: argparse.Namespace, rest: Sequence[str], tasks: int) -> str:
    """What each task of the step runs; the shell fills in torchrun's meeting place, named after the job."""
    before = []
    if args.container is not None and args.container.endswith(".sif"):
        before = ["apptainer", "exec", *(["--nv"] if args.gpus_per_node else []), args.container]
    elif args.container is not None:
        before = [f"--container-image={args.container}"]
    text = shlex.join([*before, args.python])
    if args.launcher == "torchrun":
        text += (
            f" -m torch.distributed.run --nnodes={args.nodes} --nproc-per-node={tasks} --rdzv-backend=c10d"
            ' --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HOSTNAME:$MASTER_PORT"'
        )
    return f"{text} {shlex.join(['-m', f'oasis_tp.{args.command}', *rest])}"


def _status_file(rest: Sequence[str]) -> str:
    """Where the batch job will say how it ended."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-i", "--input-file")
    parser.add_argument("-o", "--output-file")
    parser.add_argument("--status-file")
    known, _ = parser.parse_known_args(rest)
    if known.input_file is None or known.output_file is None:
        raise ValueError("a batch needs its files: … -- -i in.jsonl -o out.jsonl")
    if known.status_file is not None:
        return known.status_file
    output = PurePath(known.output_file)
    return str(output.with_name(output.name + ".status.json"))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Before and after the first `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage="%(prog)s {batch,serve,generate,bench} [options] -- OPTIONS OF THE COMMAND > job.sbatch",
        description="Print a Slurm job script that runs a command on all its ranks and survives preemption.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", choices=COMMANDS, help="What the job runs; its own options follow after --.")
    add("--nodes", type=_positive, default=1, metavar="N", help="Nodes. (default: 1)")
    add("--gpus-per-node", type=_positive, metavar="N", help="GPUs on each node; one rank per GPU.")
    add("--tasks-per-node", type=_positive, metavar="N", help="Ranks on each node, for jobs without GPUs.")
    add("--cpus-per-task", type=_positive, metavar="N", help="Cores per rank. Default: the cluster's.")
    add("--mem", metavar="SIZE", help="Memory per node (0: all of it); host KV lives there. Default: the cluster's.")
    add("--time", default="04:00:00", metavar="TIME", help="Time limit as sbatch takes it. (default: 04:00:00)")
    add(
        "--signal-lead", type=_positive, default=120, metavar="SECONDS",
        help="How long before the time limit the ranks are told to end. (default: 120)",
    )  # fmt: skip
    add("--partition", metavar="NAME", help="Partition. Default: the cluster's.")
    add("--account", metavar="NAME", help="Account. Default: your own.")
    add("--job-name", metavar="NAME", help="Default: oasis- and the command.")
    add("--container", metavar="IMAGE", help="A .sif file (run by apptainer), or an image for srun's own containers.")
    add(
        "--launcher", choices=sorted(LAUNCHING), default="srun",
        help="Who starts the ranks: srun one task each, or a torchrun on each node. (default: srun)",
    )  # fmt: skip
    add("--python", default="python", metavar="PATH", help="The Python that has oasis_tp. (default: python)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
