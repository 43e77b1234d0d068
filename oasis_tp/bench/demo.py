"""`make demo`: one long prompt through the real server, `resolve` beside `dense`, and what each held on the device.

A server under torchrun is started as a child, asked the same needle question twice by HTTP with streaming, and ended.
The exit code says whether the needle was found with the KV on the device well below dense.
"""

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from oasis_tp.bench.haystack import noise_needle
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.tokenizer import load_tokenizer

MAX_DEVICE_SHARE = 0.35
"""Hot KV plus sketches over dense KV: above this the demo has failed."""
READY_LINE = re.compile(r"\boasis_tp ready\b.*?(http://[^\s,]+)")
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 45.0
MARKER = "OASIS_TP_DEMO_ID"
"""Environment variable that every process of the demo's server inherits; the launcher gives each rank a session of
its own, so a process group does not hold them all."""


@dataclass(kw_only=True)
class Answer:
    """One streamed completion. Times are `time.monotonic()` seconds."""

    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    first_text_s: float = 0.0
    last_text_s: float = 0.0
    kv: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: the first token, which ends the prefill, is not counted."""
        elapsed = self.last_text_s - self.first_text_s
        return (self.num_tokens - 1) / elapsed if elapsed > 0 else 0.0


class Server:
    """A server process and its ranks, from `start` to `stop`."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.identity = uuid.uuid4().hex
        self.process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Start it, relay what it prints until it is ready, and return its URL.

        Raises:
            RuntimeError: it ended, or was not ready in time.
        """
        environment = {**os.environ, MARKER: self.identity, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader.start()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise RuntimeError(f"the server was not ready within {timeout_s:.0f} s") from None
            if line is None:
                raise RuntimeError(f"the server ended before it was ready, exit code {self.process.wait()}")
            print(line, flush=True)
            if ready := READY_LINE.search(line):
                return ready[1]

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End every process of the server: SIGTERM to the launcher's group, SIGKILL to what is left after the time.

        Raises:
            RuntimeError: a process is still there.
        """
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                print(f"the server did not end within {timeout_s:.0f} s of SIGTERM; killing it", file=sys.stderr)
        for process in self.processes():
            process.kill()
        self.process.wait(timeout_s)
        _, alive = psutil.wait_procs(self.processes(), timeout=timeout_s)
        self._reader.join(timeout_s)
        if alive:
            raise RuntimeError(f"processes left behind: {[process.pid for process in alive]}")

    def processes(self) -> list[psutil.Process]:
        """Every living process that carries this server's marker, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == self.identity and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def unseen_lines(self) -> list[str]:
        """What it printed and `start` did not relay, the last 40 lines at most."""
        lines: deque[str] = deque(maxlen=40)
        while not self._lines.empty():
            if (line := self._lines.get()) is not None:
                lines.append(line)
        return list(lines)

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)


def complete(url: str, body: dict[str, Any]) -> Answer:
    """POST a streaming completion, print its text as it comes, and collect it.

    Raises:
        RuntimeError: the server refused it or sent an error event, or the stream ended early.
    """
    answer = Answer()
    for event in _events(url + "/v1/completions", body):
        if error := event.get("error"):
            raise RuntimeError(f"the server answered: {error['message']}")
        if usage := event.get("usage"):
            answer.num_tokens = usage["completion_tokens"]
            answer.num_prompt_tokens = usage["prompt_tokens"]
        for choice in event["choices"]:
            answer.kv = choice.get("kv") or answer.kv
            if text := choice.get("text"):
                answer.last_text_s = time.monotonic()
                answer.first_text_s = answer.first_text_s or answer.last_text_s
                answer.text += text
                print(text, end="", flush=True)
    print(flush=True)
    return answer


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        url, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    # The server is on this machine: a proxy from the environment has no part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        response = opener.open(request, timeout=ANSWER_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the server refused: {error.read().decode()}") from error
    with response:
        for raw in response:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
    raise RuntimeError("the stream ended without [DONE]")


def table(answers: dict[str, Answer]) -> str:
    """What each mode answered, how fast, and what it held on the device."""
    lines = [f"{'mode':<9}{'answer':<26}{'tokens/s':>9}{'hot KV MiB':>12}{'sketch MiB':>12}{'hit rate':>10}"]
    for mode, answer in answers.items():
        hit_rate = answer.kv["hit_rate"]
        lines.append(
            f"{mode:<9}{' '.join(answer.text.split())[:24]:<26}{answer.tokens_per_s:>9.1f}"
            f"{answer.kv['hot_kv_bytes'] / 2**20:>12.1f}{answer.kv['sketch_bytes'] / 2**20:>12.1f}"
            f"{'-' if hit_rate is None else f'{hit_rate:.3f}':>10}"
        )
    return "\n".join(lines)


def summary(answers: dict[str, Answer], expected: str, tp_size: int) -> dict[str, Any]:
    """The last line's figures. Bytes are of the whole model, for this one request."""
    sparse, dense = answers["resolve"], answers["dense"]
    kv = sparse.kv
    return {
        "answer_ok": expected in sparse.text,
        "dense_answer_ok": expected in dense.text,
        "tp": tp_size,
        "prompt_tokens": sparse.num_prompt_tokens,
        "budget_tokens": kv["budget_tokens"],
        "hot_kv_bytes": kv["hot_kv_bytes"],
        "sketch_bytes": kv["sketch_bytes"],
        "dense_kv_bytes": kv["dense_kv_bytes"],
        "device_share": round((kv["hot_kv_bytes"] + kv["sketch_bytes"]) / kv["dense_kv_bytes"], 4),
        "hit_rate": kv["hit_rate"],
        "tokens_per_s": round(sparse.tokens_per_s, 2),
        "dense_tokens_per_s": round(dense.tokens_per_s, 2),
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="oasis_tp.bench.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="what oasis_tp.serve takes (default: %(default)s)")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=6200, help="prompt length (default: %(default)s)")
    parser.add_argument("--budget-tokens", type=int, default=512, help="tokens selected (default: %(default)s)")
    parser.add_argument(
        "--depth", type=float, default=0.4, help="where the needle stands, 0 to 1 (default: %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when the needle was found and the device held no more than it may."""
    args = _parse(argv)
    tokenizer = load_tokenizer(resolve_model(args.model, None))
    needle = noise_needle(tokenizer, args.prompt_tokens, args.depth, seed=42)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", str(args.tensor_parallel_size)]
    flags = ["--model", args.model, "--port", "0", "--hot-factor", "2", "--budget-tokens", str(args.budget_tokens)]
    server = Server([*launcher, "-m", "oasis_tp.serve", *flags])
    # The launcher would give each rank one thread, and say so at length.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.tensor_parallel_size)))
    # A supervisor's SIGTERM must reach the `finally` below, or the ranks would outlive the demo.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    answers: dict[str, Answer] = {}
    try:
        url = server.start()
        print(f"\nhidden {args.depth:.0%} into {args.prompt_tokens} tokens of noise: {needle.key} is {needle.answer}")
        for mode in ("resolve", "dense"):
            print(f"{mode}: ...{needle.prompt[-70:]}", end="", flush=True)
            answers[mode] = complete(
                url,
                {
                    "model": args.model,
                    "prompt": needle.prompt,
                    "max_tokens": 32,
                    "temperature": 0,
                    "sparsity": {"attention": mode},
                    "return_kv_stats": True,
                    "stream_options": {"include_usage": True},
                },
            )
    except (OSError, RuntimeError) as error:
        server.stop()  # its last words come with its end
        print(f"demo failed: {error}", *server.unseen_lines(), sep="\n", file=sys.stderr)
        return 1
    finally:
        server.stop()
    figures = summary(answers, needle.answer, args.tensor_parallel_size)
    print(f"\n{table(answers)}\n\n{json.dumps(figures)}")
    return 0 if figures["answer_ok"] and figures["device_share"] <= MAX_DEVICE_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
