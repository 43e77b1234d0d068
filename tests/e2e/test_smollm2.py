"""SmolLM2 through `torchrun -m oasis_tp.generate --json`: what must not change an answer does not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oasis_tp.bench.haystack import prose
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 1200
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    ids = tokenizer.encode(prose()[60_000:80_000])[:PROMPT_TOKENS]
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text(tokenizer.decode(ids))
    return path


def generate(prompt_file: Path, ranks: int, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    command += ["oasis_tp.generate", "--model", "smollm2", "--json", "--logprobs", "--prompt-file", str(prompt_file)]
    command += [
        "--max-tokens",
        str(NUM_TOKENS),
        "--ignore-eos",
        "--max-num-seqs",
        "1",
        "--max-model-len",
        "2k",
        *options,
    ]
    run = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


SPARSE = ("--budget-tokens", "128", "--recent-tokens", "64")


@pytest.fixture(scope="module")
def reference(prompt_file: Path) -> dict[str, Any]:
    answer = generate(prompt_file, 1, *SPARSE, "--hot-factor", "2")
    assert len(set(answer["token_ids"])) >= 20
    assert answer["kv"]["missed_blocks"] > 0
    assert answer["prompt_tokens"] > 8 * 128
    return answer


@pytest.mark.parametrize(
    "options", [("--hot-factor", "1"), ("--hot-factor", "4"), ("--hot-factor", "2", "--host-kv-gb", "0")], ids=str
)
def test_bit_equal_wherever_blocks_are(prompt_file: Path, reference: dict[str, Any], options: tuple[str, ...]) -> None:
    answer = generate(prompt_file, 1, *SPARSE, *options)
    assert answer["token_ids"] == reference["token_ids"]
    assert answer["logprobs"] == reference["logprobs"]
    assert answer["kv"]["missed_blocks"] != reference["kv"]["missed_blocks"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_same_tokens_on_any_number_of_ranks(prompt_file: Path, reference: dict[str, Any], ranks: int) -> None:
    answer = generate(prompt_file, ranks, *SPARSE, "--hot-factor", "2")
    assert answer["token_ids"] == reference["token_ids"]
    assert answer["logprobs"] == pytest.approx(reference["logprobs"], abs=1e-4)
    assert answer["kv"]["missed_blocks"] > 0
    assert answer["kv"]["hot_kv_bytes"] == reference["kv"]["hot_kv_bytes"]


def test_budget_of_the_context_is_dense(prompt_file: Path, reference: dict[str, Any]) -> None:
    whole = generate(prompt_file, 1, "--budget-tokens", "2048")
    dense = generate(prompt_file, 2, "--attention", "dense")
    assert whole["token_ids"] == dense["token_ids"]
    assert whole["logprobs"] == pytest.approx(dense["logprobs"], abs=1e-4)
    assert whole["kv"]["selected_blocks"] == 0
    assert dense["logprobs"] != pytest.approx(reference["logprobs"], abs=1e-4), "the small budget changed nothing"
