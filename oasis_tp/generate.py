"""`python -m oasis_tp.generate`: one prompt to the terminal, with what the KV tiers did. Also under torchrun."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from oasis_tp.cli import parse_config
from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams


def _arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt", "What to answer, and how.")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="The prompt's text.")
    source.add_argument("--prompt-file", type=Path, help="A UTF-8 file with the prompt's text; - reads standard input.")
    group.add_argument("--max-tokens", type=int, default=64, help="Most tokens to generate. (default: 64)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy. (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="Nucleus sampling. (default: 1, off)")
    group.add_argument("--top-k", type=int, default=0, help="Sample among the k best. (default: 0, off)")
    group.add_argument("--min-p", type=float, default=0.0, help="Least share of the best's probability. (default: 0)")
    group.add_argument("--stop", nargs="+", default=[], help="Strings that end the answer.")
    group.add_argument("--ignore-eos", action="store_true", help="Generate on past the end-of-text token.")
    group.add_argument("--logprobs", action="store_true", help="With --json: each token's logprob too.")
    group.add_argument("--json", action="store_true", help="Print one JSON line: text, token_ids, prompt_tokens, kv.")


def main(argv: Sequence[str] | None = None) -> int:
    """Generate once. Returns 0, or 2 for what the user can mend (said in one line on stderr)."""
    config, args = parse_config(
        sys.argv[1:] if argv is None else argv,
        prog="oasis_tp.generate",
        description="Generate one answer and show what the KV tiers did.",
        extra=_arguments,
    )
    try:
        if args.max_tokens < 1:
            raise ValueError(f"--max-tokens is {args.max_tokens}; allowed: a whole number from 1")
        sampling = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            stop=tuple(args.stop),
            ignore_eos=args.ignore_eos,
            logprobs=0 if args.logprobs else None,
        )
        prompt = _prompt(args)
        llm = LLM.from_config(config)
        answer = llm.generate(prompt, sampling)[0]
    except ValueError as error:
        print(f"oasis_tp.generate: {error}", file=sys.stderr)
        return 2
    choice = answer.outputs[0]
    if llm.engine.tp.rank == 0:
        kv = asdict(choice.kv) if choice.kv else None
        if args.json:
            line = {
                "text": choice.text,
                "token_ids": choice.token_ids,
                "prompt_tokens": len(answer.prompt_token_ids),
                "finish_reason": choice.finish_reason,
                "kv": kv,
            }
            if args.logprobs:
                line["logprobs"] = [token.logprob for token in choice.logprobs]
            print(json.dumps(line), flush=True)
        else:
            print(choice.text)
            print(f"[{len(answer.prompt_token_ids)} prompt tokens, {len(choice.token_ids)} generated; {kv}]")
    llm.close()
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is None:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE")
    try:
        data = sys.stdin.buffer.read() if str(args.prompt_file) == "-" else args.prompt_file.read_bytes()
        return data.decode()
    except OSError as error:
        raise ValueError(f"--prompt-file {args.prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {args.prompt_file}: not UTF-8 at byte {error.start}") from error


if __name__ == "__main__":
    sys.exit(main())
