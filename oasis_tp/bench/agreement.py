"""Whether the engine's tokens stay what they are when its copies or its compute are slow, and on two ranks.

Run as a program, it is one rank of two: `agreement MODEL_DIR OUT_DIR` writes the rank's tokens to OUT_DIR.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from oasis_tp.engine.engine import Engine
from oasis_tp.kv.copy_worker import CopyEngine, Point
from oasis_tp.llm import make_config
from oasis_tp.request import KvStats, RequestSpec, SamplingParams, TokenOutput

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 311,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
LENGTHS = (333, 150, 20)
NUM_TOKENS = 48
CPU_DELAY_S = 0.002
GPU_DELAY_CYCLES = 2_000_000
"""About a millisecond."""
RANKS_TIMEOUT_S = 240

Tokens = list[list[tuple[int, float | None]]]
"""By prompt: ids with their logprobs (rank 0's)."""


@contextmanager
def model_dir() -> Iterator[Path]:
    """A directory from which --load-format dummy makes a small model."""
    with TemporaryDirectory(prefix="oasis_tp-") as name:
        (Path(name) / "config.json").write_text(json.dumps(MODEL))
        yield Path(name)


def make_engine(directory: Path, **options: Any) -> Engine:
    """The longer prompts are several times what stays of them on the device."""
    return Engine.create(
        make_config(
            model=str(directory),
            load_format="dummy",
            dtype="float32",
            budget_tokens=64,
            recent_tokens=32,
            hot_factor=2.0,
            prefetch="on",
            max_num_seqs=len(LENGTHS),
            max_num_batched_tokens=256,
            device_kv_gb=0.02,
            host_kv_gb=0.05,
            **options,
        )
    )


def decode(engine: Engine) -> tuple[Tokens, list[KvStats]]:
    """Greedy answers to random prompts, decoded together. Every rank makes the same call.

    Raises:
        RuntimeError: the model's output was not finite.
    """
    rng = random.Random(5)
    answers: Tokens = [[] for _ in LENGTHS]
    ended: list[KvStats] = []

    def receive(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.token_id is not None:
                logprob = None if output.logprobs is None else output.logprobs.logprob
                answers[output.request_id].append((output.token_id, logprob))
            if output.kv is not None:
                ended.append(output.kv)

    engine.on_output = receive
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    for index, length in enumerate(LENGTHS):
        ids = tuple(rng.randrange(3, engine.vocab_size) for _ in range(length))
        engine.submit(RequestSpec(request_id=index, prompt_ids=ids, sampling=sampling))
    engine.step()
    while engine.has_work:
        engine.step()
    engine.step()  # rows are released in the step after
    engine.check_integrity()
    return answers, ended


def pause(device: torch.device) -> None:
    """Hold up what comes after it: on CUDA, on the stream that is current."""
    if device.type == "cuda":
        torch.cuda._sleep(GPU_DELAY_CYCLES)
    else:
        time.sleep(CPU_DELAY_S)


class SlowCopies:
    """A copy engine whose copies beside the compute begin late."""

    def __init__(self, inner: CopyEngine, device: torch.device) -> None:
        self.inner, self.device = inner, device

    def now(self) -> Point:
        return self.inner.now()

    def run(self, copy: Callable[[], None]) -> None:
        self.inner.run(copy)

    def submit(self, copy: Callable[[], None], after: Sequence[Point]) -> Point:
        def slowly() -> None:
            pause(self.device)
            copy()

        return self.inner.submit(slowly, after)


def slow_copies(engine: Engine) -> AbstractContextManager[object]:
    """Stores and prefetches begin late: whoever needs them and does not wait finds what was there before."""
    transfers = engine.runner.cache.transfers
    assert transfers is not None
    return patch.object(transfers, "engine", SlowCopies(transfers.engine, engine.tp.device))


def slow_compute(engine: Engine) -> AbstractContextManager[object]:
    """Every layer's attention of decoded rows begins late: a copy that does not wait for it comes too early."""
    plain = engine.runner.cache.decode

    def decode_late(*args: Any) -> torch.Tensor:
        pause(engine.tp.device)
        return plain(*args)

    return patch.object(engine.runner.cache, "decode", decode_late)


SLOW: tuple[Callable[[Engine], AbstractContextManager[object]], ...] = (slow_copies, slow_compute)


def check_delays(device: torch.device) -> bool:
    """The same tokens and logprobs, to the bit, with slow copies and with slow compute."""
    with model_dir() as directory:
        plain, ended = _answers(directory, device, nullcontext)
        assert len({token for tokens in plain for token, _ in tokens}) >= 20, "too few tokens to tell answers apart"
        assert all(kv.missed_blocks > 0 for kv in ended if kv.context_tokens > 200), "nothing was fetched"
        assert any(kv.prefetch_used > 0 for kv in ended), "nothing was brought in ahead"
        return all(_answers(directory, device, slow)[0] == plain for slow in SLOW)


def check_ranks(device: torch.device) -> bool:
    """Two ranks over gloo, on one GPU where there is one: both have the tokens of a rank alone."""
    with model_dir() as directory, TemporaryDirectory(prefix="oasis_tp-") as out:
        alone = [[token for token, _ in tokens] for tokens in _answers(directory, device, nullcontext)[0]]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        program = ["-m", "oasis_tp.bench.agreement", str(directory), out]
        # Not ranks of a job that this process may be part of.
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, *launch, *program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RANKS_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            print(done.stderr[-3000:])
            return False
        return all(json.loads((Path(out) / f"{rank}.json").read_text()) == alone for rank in range(2))


def _answers(
    directory: Path, device: torch.device, slow: Callable[[Engine], AbstractContextManager[object]]
) -> tuple[Tokens, list[KvStats]]:
    engine = make_engine(directory, device=device.type)
    try:
        with slow(engine):
            return decode(engine)
    finally:
        engine.close()


def main(directory: str, out: str) -> None:
    engine = make_engine(Path(directory), comm="gloo", tensor_parallel_size=2)
    answers, _ = decode(engine)
    tokens = [[token for token, _ in answer] for answer in answers]
    (Path(out) / f"{engine.tp.rank}.json").write_text(json.dumps(tokens))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
