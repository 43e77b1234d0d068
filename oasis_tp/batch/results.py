"""The files a batch writes: answers that survive any end of the job, errors beside them, and a status to look at."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO


class ResultFile:
    """Answers, one JSON line each, on disk when `append` returns.

    Opening it is how a job resumes: a last line without its end (the job died while writing it) is dropped, and the
    custom_ids of all others are in `done`. The file is locked against a second job for as long as it is open.

    Raises:
        ValueError: the file cannot be written, is in use, or holds something else than answers.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"--output-file {path}: {error.strerror}") from error
        try:
            _lock(self._file, path)
            self._resume(path)
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: dict[str, Any]) -> None:
        """Add one answer; it is on disk when this returns."""
        _write(self._file, entry)
        self.done.add(entry["custom_id"])

    def close(self) -> None:
        """Closes the file and gives up its lock."""
        self._file.close()

    def _resume(self, path: Path) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                self.done.add(json.loads(line)["custom_id"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"--output-file {path}: line {number} is no answer of a batch; name another file"
                ) from error
            end += len(line)
        self._file.truncate(end)
        os.fsync(self._file.fileno())


class ErrorFile:
    """Lines that got no answer, one JSON line each; written anew by each run, because each run tries them again."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ValueError(f"--error-file {path}: {error.strerror}") from error

    def append(self, entry: dict[str, Any]) -> None:
        """Add one fault; it is on disk when this returns."""
        _write(self._file, entry)
        self.count += 1

    def close(self) -> None:
        self._file.close()


class StatusFile:
    """Where a job stands, for scripts and schedulers: the launcher's exit status does not tell (torchrun's is 1
    whenever it was sent a signal). Replaced as a whole, so a reader never sees half of it.
    """

    def __init__(self, path: Path, total: int, resumed: int) -> None:
        """
        Args:
            total: requests in the input.
            resumed: those of them that earlier runs answered.
        """
        self._path = path
        self._total = total
        self._resumed = resumed
        self._started = time.time()

    def write(self, state: str, *, completed: int, failed: int) -> None:
        """
        Args:
            state: running, preempted (run the same command again), completed or failed (the engine ended).
            completed: requests that have an answer, those of earlier runs included.
            failed: lines in the error file.
        """
        content = {
            "state": state,
            "total": self._total,
            "completed": completed,
            "resumed": self._resumed,
            "failed": failed,
            "started_at": round(self._started, 3),
            "updated_at": round(time.time(), 3),
        }
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.write_text(json.dumps(content) + "\n")
            temporary.replace(self._path)
        except OSError as error:
            raise ValueError(f"--status-file {self._path}: {error.strerror}") from error


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"--output-file {path}: another job is writing it") from error


def _write(file: BinaryIO, entry: dict[str, Any]) -> None:
    file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
