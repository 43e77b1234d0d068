"""`python -m oasis_tp.batch`: answer a file of requests, one process per rank; also under torchrun, srun and mpirun."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from oasis_tp.batch.job import BatchJob
from oasis_tp.batch.lines import count_lines, read_lines
from oasis_tp.batch.progress import Progress
from oasis_tp.batch.results import ErrorFile, ResultFile, StatusFile
from oasis_tp.cli import parse_config
from oasis_tp.config import Config
from oasis_tp.lifetime import Watchdog, exit_with_parent
from oasis_tp.models.tokenizer import load_tokenizer, read_template
from oasis_tp.server.logs import set_up_logs

if TYPE_CHECKING:
    from oasis_tp.engine.engine import Engine

PROG = "oasis-tp batch"
PREEMPTED = 75
"""Exit status (EX_TEMPFAIL): told to stop; the same command goes on where this one ended."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 too: schedulers send it as a warning before the time limit."""

logger = logging.getLogger(__name__)


class _Preempted(BaseException):
    """A signal to stop came before the engine runs. No library's `except Exception` may swallow it."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch", "OpenAI's batch format. The same command again resumes.")
    group.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE",
        help="JSON lines with custom_id, method, url and body.",
    )  # fmt: skip
    group.add_argument(
        "-o", "--output-file", type=Path, required=True, metavar="FILE",
        help="Answers, appended in the order of completion; requests answered there are skipped.",
    )  # fmt: skip
    group.add_argument(
        "--error-file", type=Path, metavar="FILE",
        help="Lines without an answer, and why; written anew by each run. Default: the output file's name "
        "with .errors.jsonl added.",
    )  # fmt: skip
    group.add_argument(
        "--status-file", type=Path, metavar="FILE",
        help="One JSON line: state (running, preempted, completed, failed) and counts. Default: the output file's "
        "name with .status.json added.",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank of the job.

    Returns:
        0: every line has an answer or an error; 75: told to stop, resumable; 1: the engine failed, resumable;
        2: it cannot start as asked. Ranks other than 0 return 0 where rank 0 returns 75.
    """
    config, args = parse_config(argv, PROG, "Answer a file of requests in OpenAI's batch format.", _arguments)
    from oasis_tp.comm import discover_ranks  # torch takes seconds: not before the command line is known to be right

    try:
        ranks = discover_ranks()
        rank = ranks.rank
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr, flush=True)
        return 2
    set_up_logs(config.server.log_level, config.server.log_format, rank)
    if ranks.size > 1:
        exit_with_parent()
    try:
        return _lead(config, args) if rank == 0 else _follow(config)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        logger.exception("rank %d: the engine failed", rank)
        return 1


def _follow(config: Config) -> int:
    from oasis_tp.engine.engine import Engine

    engine = Engine.create(config)
    # The launcher signals every rank; this one leaves when rank 0 says so.
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    watchdog = _watch(engine, config, lambda: None)
    engine.run()
    watchdog.stop()
    engine.close()
    return 0


def _watch(engine: "Engine", config: Config, on_hang: Callable[[], None]) -> Watchdog:
    watchdog = Watchdog(config.server.watchdog_timeout, lambda: engine.stats().last_step_time, on_hang)
    watchdog.start()
    return watchdog


def _lead(config: Config, args: argparse.Namespace) -> int:
    """Rank 0: the files are its own. Raises ValueError for what the user can mend."""
    from oasis_tp.engine.engine import Engine

    output: Path = args.output_file
    template = read_template(config.model.chat_template)
    results = ResultFile(output)
    total, resumed = _count(args.input_file, results)
    errors = ErrorFile(args.error_file or output.with_name(output.name + ".errors.jsonl"))
    status = StatusFile(args.status_file or output.with_name(output.name + ".status.json"), total, resumed)
    status.write("running", completed=resumed, failed=0)
    names = config.model.served_model_name or (config.model.model,)
    lines = read_lines(args.input_file, names, results.done.__contains__)

    def leave_at_once(signum: int, _: FrameType | None) -> None:
        raise _Preempted

    def leave(signum: int, _: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)  # the second one does not wait
        job.stop()

    for signum in SIGNALS:
        signal.signal(signum, leave_at_once)
    try:
        engine = Engine.create(config)
        tokenizer = load_tokenizer(engine.model_dir, template)
        progress = Progress(total, resumed)
        job = BatchJob(engine, tokenizer, config, lines, results, errors, status, progress)
        for signum in SIGNALS:
            signal.signal(signum, leave)
    except _Preempted:
        status.write("preempted", completed=resumed, failed=0)
        return PREEMPTED
    except BaseException:
        status.write("failed", completed=resumed, failed=0)
        raise
    state = "failed"
    watchdog = _watch(engine, config, lambda: job.write_status("failed"))
    try:
        job.start()
        engine.run()
        state = "completed" if job.finished else "preempted"
    finally:
        watchdog.stop()
        progress.close()
        job.write_status(state)
        errors.close()
        results.close()
    engine.close()
    return 0 if job.finished else PREEMPTED


def _count(path: Path, results: ResultFile) -> tuple[int, int]:
    """Lines of the input, and those of them that have their answer."""
    try:
        return count_lines(path, results.done.__contains__)
    except OSError as error:
        raise ValueError(f"--input-file {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
