"""Long-context retrieval: what sparse attention costs in answers, beside dense attention on the same samples.

Samples are generated anew (RULER's tasks, a pass key, key-value look-up, one like MRCR), at lengths counted by the
model's own tokenizer, or read from files with RULER's field names. Each is prefilled once, and every mode answers a
fork of it, greedily. Answers are kept in --out/answers.jsonl as they come: an interrupted run goes on where it was.
With --base-url an OpenAI endpoint answers instead. Also under torchrun. @FILE reads options from a file.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from tqdm import tqdm

from oasis_tp.bench.answers import Answer, AnswerFile, Mode, make_modes, read_answers
from oasis_tp.bench.ask_endpoint import Endpoint, ask_endpoint
from oasis_tp.bench.ask_engine import ask_engine, too_long
from oasis_tp.bench.retrieval_report import draw_figures, format_report, promises, summarise
from oasis_tp.bench.samples import TASK_SPECS, Sample, read_samples, write_samples
from oasis_tp.bench.tasks import generate, read_haystack, read_questions
from oasis_tp.comm import discover_ranks
from oasis_tp.config import SketchKind
from oasis_tp.llm import LLM
from oasis_tp.models.hub import resolve_model
from oasis_tp.models.registry import load_arch
from oasis_tp.models.tokenizer import load_tokenizer

DEFAULT_TASKS = [task for task in TASK_SPECS if task != "qa"]
MODES = ("dense", "resolve", "paper")
TAILS = {"on": True, "off": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sketches = get_args(SketchKind)
    parser.fromfile_prefix_chars = "@"
    parser.convert_arg_line_to_args = _file_line  # type: ignore[method-assign]
    parser.add_argument("--model", default="smollm2", help="as for oasis_tp.serve (default: smollm2)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hugging Face id")

    group = parser.add_argument_group("samples")
    group.add_argument(
        "--tasks", nargs="+", choices=list(TASK_SPECS), default=DEFAULT_TASKS, metavar="TASK",
        help=f"{', '.join(TASK_SPECS)} (default: all but qa, which needs --qa-file)",
    )  # fmt: skip
    group.add_argument(
        "--lengths", type=int, nargs="+", default=[4096], help="tokens of prompt and answer together (default: 4096)"
    )
    group.add_argument("--num-samples", type=int, default=10, help="of each task and length (default: 10)")
    group.add_argument("--seed", type=int, default=42, help="of the samples (default: 42)")
    group.add_argument("--haystack", type=Path, help="a UTF-8 text to hide needles in (default: Python's help topics)")
    group.add_argument(
        "--qa-file", type=Path, help='JSON lines of {"question": …, "paragraph": …, "answers": [...]} for the task qa'
    )
    group.add_argument("--samples", type=Path, nargs="+", default=[], help="files of samples, instead of generating")
    group.add_argument("--write-samples", type=Path, metavar="FILE", help="write the samples to FILE and ask nobody")

    group = parser.add_argument_group("modes")
    group.add_argument(
        "--modes", nargs="+", choices=MODES, default=None,
        help="default: all; with --base-url: as the server is set, else sent in the request's `sparsity`",
    )  # fmt: skip
    group.add_argument("--sketches", nargs="+", choices=sketches, default=["2bit"], help="default: 2bit")
    group.add_argument("--budgets", type=int, nargs="+", default=[512, 256], help="tokens per row (default: 512 256)")
    group.add_argument("--tail", nargs="+", choices=list(TAILS), default=["on"], help="tail estimate (default: on)")
    group.add_argument(
        "--hot-factor", type=float, default=2.0, help="budgets' worth of blocks on the device (default: 2)"
    )

    group = parser.add_argument_group("run")
    group.add_argument("--out", type=Path, default=Path("retrieval"), help="directory of answers, report and figures")
    group.add_argument(
        "--stop-when-found", action="store_true",
        help="end an answer where its only reference is complete: the same scores, sooner",
    )  # fmt: skip
    group.add_argument("--batch", type=int, default=4, help="modes that answer a sample at once (default: 4)")
    group.add_argument("--base-url", help="ask this OpenAI endpoint, such as http://localhost:8000")
    group.add_argument("--served-model", help="the endpoint's name of the model (default: the first that it lists)")
    group.add_argument("--concurrency", type=int, default=4, help="requests at once with --base-url (default: 4)")
    group.add_argument("--timeout-s", type=float, default=3600.0, help="of a request with --base-url (default: 3600)")
    group.add_argument("--report-only", action="store_true", help="report on the answers that are in --out")
    group.add_argument(
        "--check", action="store_true",
        help="exit 1 unless 2bit with tail estimate is as near to dense as promised (budgets 512 and 256)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Print the report, then one JSON line {"rows": [...]} (rank 0).

    Returns 0; 1 where samples were not answered, or with --check where a promise is not held or nothing shows it.

    Raises:
        ValueError: an option's value, or a file, that the user can mend.
    """
    _check(args)
    path = args.out / "answers.jsonl"
    if args.report_only:
        made_with, answers = read_answers(path)
        return _report(args, made_with, answers, [])
    samples, complaints = _samples(args)
    is_first = discover_ranks().rank == 0
    if is_first:
        for complaint in complaints:
            print(complaint, file=sys.stderr)
    if args.write_samples:
        if is_first:
            print(f"{write_samples(args.write_samples, samples)} samples written to {args.write_samples}")
        return 1 if complaints else 0
    made_with, answers = _run_endpoint(args, samples) if args.base_url else _run_engine(args, samples)
    # What this command asked for; the file may have more.
    wanted = {sample.digest for sample in samples}
    complaints += [answer.error for answer in answers if answer.error is not None and answer.digest in wanted]
    return _report(args, made_with, answers, complaints) if is_first else 1 if complaints else 0


def _file_line(arg_line: str) -> list[str]:
    """A line of @FILE: options as in a shell, # begins a comment."""
    return shlex.split(arg_line, comments=True)


def _check(args: argparse.Namespace) -> None:
    for option, least in (("num_samples", 1), ("lengths", 64), ("budgets", 16), ("batch", 1), ("concurrency", 1)):
        value = getattr(args, option)
        if min(value if isinstance(value, list) else [value]) < least:
            raise ValueError(f"--{option.replace('_', '-')} {value}: at least {least}")
    if args.base_url and args.stop_when_found:
        raise ValueError("--stop-when-found works in process: an endpoint cuts the stop string from the text")


def _samples(args: argparse.Namespace) -> tuple[list[Sample], list[str]]:
    """The samples to ask, each once, and a complaint for each line of a file that is none."""
    if args.samples:
        samples, complaints = [], []
        for path in args.samples:
            read, faulty = read_samples(path)
            samples += read
            complaints += faulty
    else:
        tokenizer = load_tokenizer(resolve_model(args.model, args.revision))
        haystack = read_haystack(args.haystack) if args.haystack else None
        questions = read_questions(args.qa_file) if args.qa_file else ()
        complaints = []
        samples = list(
            generate(
                tokenizer,
                list(dict.fromkeys(args.tasks)),
                list(dict.fromkeys(args.lengths)),
                args.num_samples,
                args.seed,
                haystack=haystack,
                questions=questions,
            )
        )
    return list({sample.digest: sample for sample in samples}.values()), complaints


def _described(args: argparse.Namespace) -> dict[str, Any]:
    """What the samples were made of; answers to others do not belong into the same file."""
    if args.samples:
        return {"samples": ", ".join(path.name for path in args.samples)}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    prose = args.haystack.name if args.haystack else f"help topics of Python {version}"
    described = {"samples": f"generated, seed {args.seed}", "prose": prose}
    return described | ({"questions": args.qa_file.name} if args.qa_file else {})


def _modes(args: argparse.Namespace) -> list[Mode]:
    chosen = args.modes or (["endpoint"] if args.base_url else list(MODES))
    tails = [TAILS[name] for name in dict.fromkeys(args.tail)]
    return make_modes(chosen, list(dict.fromkeys(args.sketches)), list(dict.fromkeys(args.budgets)), tails)


def _run_engine(args: argparse.Namespace, samples: list[Sample]) -> tuple[dict[str, Any], list[Answer]]:
    modes = _modes(args)
    model_dir = resolve_model(args.model, args.revision)
    window = load_arch(model_dir).max_position_embeddings
    tokenizer = load_tokenizer(model_dir)
    longest = max(len(tokenizer.encode(sample.prompt)) + sample.tokens_to_generate for sample in samples)
    if all(too_long(tokenizer, sample, window) for sample in samples):
        raise ValueError(f"no sample fits: {too_long(tokenizer, samples[0], window)}")
    sparse = [mode for mode in modes if mode.mode != "dense"]
    options: dict[str, Any] = {"attention": "dense"}
    if sparse:
        options = {"sketch": sparse[0].sketch, "budget_tokens": max(args.budgets), "hot_factor": args.hot_factor}
    llm = LLM(
        args.model,
        extra_sketches=[mode.sketch for mode in sparse if mode.sketch],
        revision=args.revision,
        max_model_len=min(window, longest),
        max_num_seqs=1 + args.batch,  # the held prompt's blocks and the forks'
        **options,
    )
    dtype = str(llm.engine.runner.model.dtype).removeprefix("torch.")
    made_with = {
        "model": args.model,
        "where": f"in process, {llm.engine.tp.device.type}, {dtype}",
        "hot_factor": args.hot_factor,
        "stop_when_found": args.stop_when_found,
        **_described(args),
    }
    is_first = llm.engine.tp.rank == 0
    file = _opened_together(llm, args.out / "answers.jsonl", made_with)
    pending = torch.ones(len(samples), len(modes), dtype=torch.bool)
    if file is not None:
        done = file.done
        pending = torch.tensor([[(sample.digest, mode) not in done for mode in modes] for sample in samples])
    try:
        ask_engine(
            llm,
            tqdm(samples, desc="retrieval", unit="sample", disable=not is_first),
            modes,
            pending,
            file.append if file is not None else lambda answer: None,
            hot_factor=args.hot_factor,
            batch=args.batch,
            stop_when_found=args.stop_when_found,
        )
    finally:
        if file is not None:
            file.close()
    llm.close()
    return made_with, list(file.answers.values()) if file is not None else []


def _opened_together(llm: LLM, path: Path, made_with: dict[str, Any]) -> AnswerFile | None:
    """Rank 0's file. Where it cannot be opened every rank raises, so that none waits for the others.

    Raises:
        ValueError: as AnswerFile, at rank 0 with its words.
    """
    file, problem = None, None
    if llm.engine.tp.rank == 0:
        try:
            file = AnswerFile(path, made_with)
        except ValueError as error:
            problem = error
    failed = llm.engine.tp.broadcast(torch.tensor([int(problem is not None)]))
    if failed.item():
        llm.close()
        raise problem or ValueError("rank 0 could not open the file of answers")
    return file


def _run_endpoint(args: argparse.Namespace, samples: list[Sample]) -> tuple[dict[str, Any], list[Answer]]:
    if discover_ranks().size > 1:
        raise ValueError("--base-url asks from one process; the server has the ranks")
    modes = _modes(args)
    endpoint = Endpoint(args.base_url, args.served_model, timeout_s=args.timeout_s)
    made_with = {"model": endpoint.model, "where": endpoint.url, **_described(args)}
    file = AnswerFile(args.out / "answers.jsonl", made_with)
    try:
        done = file.done
        work = [(sample, mode) for sample in samples for mode in modes if (sample.digest, mode) not in done]
        came: Iterable[Answer] = ask_endpoint(endpoint, work, args.concurrency)
        for answer in tqdm(came, total=len(work), desc="retrieval", unit="answer"):
            file.append(answer)
    finally:
        file.close()
    return made_with, list(file.answers.values())


def _report(args: argparse.Namespace, made_with: dict[str, Any], answers: list[Answer], complaints: list[str]) -> int:
    rows = summarise(answers)
    try:
        figures = draw_figures(answers, rows, args.out)
    except ValueError as error:
        figures = []
        print(f"oasis_tp.bench retrieval: {error}", file=sys.stderr)
    text = format_report(rows, made_with, figures)
    (args.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    if complaints:
        print(f"{len(complaints)} not answered:", *complaints[:20], sep="\n", file=sys.stderr)
    held = promises(rows)
    if args.check and not held:
        print("--check: no pooled row of 2bit with tail estimate at budget 512 or 256")
    print(json.dumps({"rows": rows}), flush=True)
    return 1 if complaints or (args.check and (not held or not all(is_held for is_held, _ in held))) else 0
