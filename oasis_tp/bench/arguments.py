"""Options that several benchmarks have: lists with commas, and least values."""

import argparse
from collections.abc import Callable


def numbers(text: str) -> list[int]:
    """`8192,32768` -> [8192, 32768]."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers with commas between them") from error


def names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A converter of `a,b` -> ["a", "b"], each of them one of `allowed`; nothing is an empty list."""

    def convert(text: str) -> list[str]:
        given = text.split(",") if text else []
        for name in given:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return given

    return convert


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raises ValueError for the first option (in Python's spelling) that is, or holds, less than its least value."""
    for option, lowest in least.items():
        value = getattr(args, option)
        for number in value if isinstance(value, list) else [value]:
            if number < lowest:
                raise ValueError(f"--{option.replace('_', '-')} {number}: at least {lowest}")
