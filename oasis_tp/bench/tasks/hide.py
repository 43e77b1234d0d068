"""Where a needle stands in its haystack."""

DEPTHS = tuple(index / 39 for index in range(40))
"""Where a needle may stand, 0 (before everything) to 1 (after everything); RULER's forty."""


def depth_of(index: int) -> float:
    """The `index`-th depth of a fixed order: all of DEPTHS in 40 of them, any few in a row far apart."""
    return DEPTHS[(17 * index + 20) % len(DEPTHS)]


def hide(hay: list[str], placed: list[tuple[float, str]]) -> str:
    """The haystack with each needle at its depth; needles of one place keep their order of depth."""
    pieces = list(hay)
    for depth, needle in sorted(placed, key=lambda item: item[0], reverse=True):
        pieces.insert(round(depth * len(hay)), needle)
    return "".join(pieces)
