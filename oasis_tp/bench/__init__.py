"""Measurements, and the demo: they compose the product and are imported by none of it."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """`oasis-tp bench`, the same as `python -m oasis_tp.bench`."""
    from oasis_tp.bench.__main__ import main as run

    return run(argv)
