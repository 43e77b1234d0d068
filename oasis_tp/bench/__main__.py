"""`python -m oasis_tp.bench BENCHMARK`: one measurement, its table, and one JSON line at the end."""

import argparse
import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "sketch": "how well each sketch chooses blocks: mass covered, output error",
    "needles": "needles found with each sketch and budget, beside dense attention",
    "retrieval": "answers to long-context tasks, every mode beside dense attention",
    "lookahead": "blocks that are there before they are selected, and what drafts bring",
    "decode": "time of a decode step, beside its ceiling and other engines",
    "kernels": "time of each kernel, beside torch and its byte ceiling",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that `argv` (without the program's name) begins with.

    Returns its exit code: 0, 1 when a check failed, 2 for what the user can mend (said in one line on stderr).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="oasis_tp.bench",
        description="Measure a model on this machine. The last line printed is JSON.",
        epilog="oasis_tp.bench BENCHMARK --help lists a benchmark's options.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK", required=True)
    module = None
    for name, text in BENCHMARKS.items():
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        if arguments[:1] == [name]:  # the others need not be loaded
            module = importlib.import_module(f"oasis_tp.bench.{name}")
            command.description = module.__doc__
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(command)
    args = parser.parse_args(arguments)
    assert module is not None
    try:
        return module.main(args)
    except ValueError as error:
        print(f"oasis_tp.bench {args.benchmark}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
