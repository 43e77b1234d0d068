"""lm-eval's `local-completions` with the server's own tokenizer: a task of likelihoods and one of generation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams
from tests.e2e.served import served
from tests.tiny import make_tiny

LM_EVAL = shutil.which("lm_eval", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(LM_EVAL is None, reason="no lm_eval on the PATH (pip install 'lm-eval[api]')")

MAX_TOKENS = 16
DOCUMENTS = [
    {"question": "the quick brown", "options": [" fox", " dog", " number"]},
    {"question": "the lazy dog is not", "options": [" the", " amused", " magic"]},
    {"question": "the magic number is", "options": [" 12345", " Grüße", " dog"]},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOOSE = """\
output_type: multiple_choice
doc_to_choice: "{{options}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""
GENERATE = f"""\
output_type: generate_until
doc_to_target: ""
generation_kwargs:
  until: ["\\n\\n\\n"]
  max_gen_toks: {MAX_TOKENS}
metric_list:
  - metric: exact_match
"""


def write_tasks(folder: Path) -> None:
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, rest in (("choose", CHOOSE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)


def run_lm_eval(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Each task's samples, by document."""
    write_tasks(folder)
    assert LM_EVAL is not None
    arguments = f"model=tiny,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=2,max_length=512"
    command = [LM_EVAL, "--model", "local-completions", "--model_args", arguments, "--tasks", "choose,generate"]
    files = ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    result = subprocess.run([*command, *files], capture_output=True, text=True, timeout=240, env=os.environ | offline)
    assert result.returncode == 0, result.stderr
    samples = {}
    for name in ("choose", "generate"):
        (file,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = sorted(lines, key=lambda line: line["doc_id"])
    return samples


def likelihood(twin: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By transformers: the continuation's logprob, and whether greedy decoding would have given it."""
    with torch.inference_mode():
        logprobs = torch.log_softmax(twin(torch.tensor([context + continuation])).logits[0].float(), -1)
    rows = logprobs[len(context) - 1 : -1]
    own = rows.gather(1, torch.tensor(continuation)[:, None])
    return float(own.sum()), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def test_both_kinds_of_task_give_the_model_s_own_numbers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_tiny("llama", tmp_path / "model")
    with served(model, "--served-model-name", "tiny", "--max-num-seqs", "4", log=tmp_path / "log") as (_, url):
        samples = run_lm_eval(url, tmp_path)
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    llm = LLM(str(model), max_num_seqs=4)
    for document, sample in zip(DOCUMENTS, samples["choose"], strict=True):
        question = llm.tokenizer.encode(str(document["question"]))
        for option, ((got, greedy),) in zip(document["options"], sample["resps"], strict=True):
            expected = likelihood(twin, question, llm.tokenizer.encode(option))
            assert (float(got), str(greedy) == "True") == (pytest.approx(expected[0], abs=1e-3), expected[1])
    answers = llm.generate(
        [str(document["question"]) for document in DOCUMENTS], SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    )
    assert [sample["resps"][0][0] for sample in samples["generate"]] == [answer.outputs[0].text for answer in answers]
