"""What the user got wrong: status 2 and one clear line, no traceback; a bad request harms no other."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oasis_tp import generate, serve
from oasis_tp.config import SparsityConfig
from oasis_tp.llm import LLM
from oasis_tp.request import QueueFullError, RequestSpec, SamplingParams
from tests.tiny import make_tiny

ROOT = Path(__file__).parents[2]
WINDOW, VOCAB = 512, 311
SMALL = ["--budget-tokens", "64", "--recent-tokens", "16", "--max-num-seqs", "2"]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with one fault each."""
    root = tmp_path_factory.mktemp("broken")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(model, root / name)) / "model.safetensors"

    copy("no-weights").unlink()
    truncated = copy("truncated")
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    header_only = copy("header-cut")
    header_only.write_bytes(header_only.read_bytes()[:100])
    for name, change in (
        ("wrong-shape", lambda tensors, key: tensors.update({key: tensors[key][:-1].clone()})),
        ("missing-tensor", lambda tensors, key: tensors.pop(key)),
        ("extra-tensor", lambda tensors, key: tensors.update({"model.surprise.weight": torch.zeros(3)})),
    ):
        path = copy(name)
        tensors = load_file(path)
        change(tensors, "model.layers.1.self_attn.k_proj.weight")
        save_file(tensors, path)
    config = json.loads((copy("unknown-family").parent / "config.json").read_text())
    config["architectures"] = ["MysteryForCausalLM"]
    (root / "unknown-family" / "config.json").write_text(json.dumps(config))
    (root / "empty").mkdir()
    (root / "notes.txt").write_text("no model")
    return root


def assert_refused(status: int, stderr: str, said: list[str]) -> None:
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert status == 2, stderr
    assert "Traceback" not in stderr
    assert [line for line in lines if line.startswith("usage:")] == lines[:-1], f"more than one line: {stderr}"
    assert all(part in lines[-1] for part in said), lines[-1]


CASES: list[tuple[list[str], list[str]]] = [
    (["GOOD", "--budget-token", "3"], ["--budget-token", "did you mean --budget-tokens?"]),
    (["GOOD", "--budget-tokens", "0"], ["--budget-tokens is 0"]),
    (["GOOD", "--recent-tokens", "3"], ["--recent-tokens is 3", "16"]),
    (["GOOD", "--max-model-len", "513"], ["--max-model-len 513", "512"]),
    (["GOOD", "--host-kv-gb", "0.0001"], ["--host-kv-gb", "512 tokens"]),
    (["GOOD", "--host-kv-gb", "99999"], ["--host-kv-gb 99999", "GiB"]),
    (["GOOD", "--device-kv-gb", "0.00001"], ["--device-kv-gb", "512 tokens", "pages"]),
    (["GOOD", "-tp", "3"], ["--tensor-parallel-size 3", "1 rank"]),
    (["GOOD", "--comm", "nccl", "--device", "cuda"], ["--device cuda"]),
    (["GOOD", "--chat-template", "/no/such/file"], ["--chat-template /no/such/file"]),
    (["nowhere-at-all"], ["--model nowhere-at-all", "smollm2"]),
    (["BROKEN/empty"], ["config.json"]),
    (["BROKEN/notes.txt"], ["notes.txt", ".gguf"]),
    (["BROKEN/unknown-family"], ["MysteryForCausalLM", "LlamaForCausalLM"]),
    (["BROKEN/no-weights"], ["no-weights", ".safetensors"]),
    (["BROKEN/truncated"], ["model.safetensors", "truncated"]),
    (["BROKEN/header-cut"], ["model.safetensors", "truncated"]),
    (["BROKEN/wrong-shape"], ["model.layers.1.self_attn.k_proj.weight", "[47, 144]", "[48, 144]"]),
    (["BROKEN/missing-tensor"], ["missing", "model.layers.1.self_attn.k_proj.weight"]),
    (["BROKEN/extra-tensor"], ["model.surprise.weight"]),
]
ENTRIES: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "generate": (generate.main, ["--prompt", "hello"]),
    "serve": (serve.main, ["--port", "0"]),
}


def arguments_of(case: list[str], model: Path, broken: Path) -> list[str]:
    return [part.replace("GOOD", str(model)).replace("BROKEN", str(broken)) for part in case]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("case", "said"), CASES, ids=[" ".join(case) for case, _ in CASES])
def test_an_entry_refuses(
    entry: str, case: list[str], said: list[str], model: Path, broken: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main, own = ENTRIES[entry]
    try:
        status = main([*arguments_of(case, model, broken), *own])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert_refused(status, capfd.readouterr().err, said)


@pytest.mark.parametrize(
    ("module", "case", "said"),
    [
        ("oasis_tp.generate", ["BROKEN/wrong-shape", "--prompt", "x"], ["[47, 144]"]),
        ("oasis_tp.serve", ["BROKEN/truncated", "--port", "0"], ["truncated"]),
    ],
)
def test_a_process_of_its_own_ends_the_same_way(
    module: str, case: list[str], said: list[str], model: Path, broken: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments_of(case, model, broken)],
        cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    assert_refused(result.returncode, result.stderr, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["--prompt"]),
        (["--prompt", ""], ["prompt is empty"]),
        (["--prompt-file", "/no/such/file"], ["/no/such/file"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature is -1.0"]),
        (["--prompt", "x", "--max-tokens", "0"], ["--max-tokens is 0"]),
        (["--prompt", "fox " * 600], ["tokens", "--max-model-len is 512"]),
    ],
)
def test_generate_refuses_a_prompt(
    arguments: list[str], said: list[str], model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = generate.main([str(model), *SMALL, *arguments])
    assert_refused(status, capfd.readouterr().err, said)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), budget_tokens=64, recent_tokens=16, max_num_seqs=2, max_num_queued_reqs=4)


@pytest.fixture
def expected(llm: LLM) -> list[int]:
    return llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("", ["empty"]),
        ([[]], ["empty"]),
        ([[5, 6, 7], []], ["empty"]),
        ([5] * WINDOW, ["512 tokens", "--max-model-len is 512", "511"]),
        ([5] * (WINDOW - 3), ["509", "(4)", "513", "512"]),
        ([5, VOCAB, 6], ["311", "0 to 310"]),
        ([5, -1], ["-1", "0 to 310"]),
        ([[5, 6], [10**30]], [str(10**30)]),
    ],
)
def test_the_engine_refuses_a_prompt_and_answers_the_next(
    llm: LLM, expected: list[int], prompts: list[int], said: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        llm.generate(prompts, GREEDY)
    assert all(part in str(error.value) for part in said), error.value
    assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == expected
    llm.engine.step()
    llm.engine.check_integrity()
    assert llm.engine.scheduler.pages.num_free == llm.engine.scheduler.pages.num_pages


def test_the_longest_prompt_gives_one_token(llm: LLM) -> None:
    (answer,) = llm.generate([5] * (WINDOW - 1), SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 1 and answer.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("sparsity", "said"),
    [
        (SparsityConfig(sketch="minmax"), "keeps 2bit"),
        (SparsityConfig(budget_tokens=320, recent_tokens=16, hot_factor=1.3), "budget_tokens 320"),
    ],
)
def test_a_request_that_this_engine_was_not_planned_for_is_refused(
    model: Path, sparsity: SparsityConfig, said: str
) -> None:
    llm = LLM(str(model), budget_tokens=64, recent_tokens=16, max_num_seqs=2, hot_factor=1)
    with pytest.raises(ValueError, match=said):
        llm.generate([5] * 400, SamplingParams(max_tokens=100), sparsity=sparsity)


def test_a_seed_at_its_limit_serves_several_choices(llm: LLM, expected: list[int]) -> None:
    answer = llm.generate([5, 6, 7], SamplingParams(max_tokens=2, seed=2**63 - 1, n=3))[0]
    assert [len(choice.token_ids) for choice in answer.outputs] == [2, 2, 2]
    assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == expected


def test_a_sink_longer_than_the_prompt_is_served(model: Path) -> None:
    llm = LLM(str(model), budget_tokens=32, recent_tokens=16, sink_blocks=3, hot_factor=1)
    answer = llm.generate([5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))[0].outputs[0]
    assert len(answer.token_ids) == 200
    assert answer.kv is not None and answer.kv.selected_blocks > 0
    llm.engine.check_integrity()


def test_a_full_queue_is_said_so(llm: LLM, expected: list[int]) -> None:
    specs = [RequestSpec(request_id=1000 + i, prompt_ids=(5,), sampling=GREEDY) for i in range(5)]
    with pytest.raises(QueueFullError, match=r"4 requests.*--max-num-queued-reqs"):
        for spec in specs:
            llm.engine.submit(spec)
    while llm.engine.has_work or llm.engine._inbox.qsize():
        llm.engine.step()
    assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == expected
