"""OpenAI batch files: requests in from a JSONL file, answers appended to another, resumable at any point."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """`oasis-tp batch`, the same as `python -m oasis_tp.batch`."""
    from oasis_tp.batch.__main__ import main as run

    return run(argv)
