from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_tp.draft.ngram import NgramIndex


def index(tokens: list[int], **kwargs: int) -> NgramIndex:
    made = NgramIndex(min_ngram=kwargs.get("low", 2), max_ngram=kwargs.get("high", 3))
    made.extend(tokens)
    return made


def test_what_followed_the_latest_earlier_occurrence() -> None:
    assert index([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]).propose(4) == (4, 5, 6, 9)
    assert index([1, 2, 7, 7, 1, 2, 8, 8, 1, 2]).propose(2) == (8, 8)


def test_the_longest_match_wins() -> None:
    assert index([5, 1, 2, 30, 6, 1, 2, 40, 5, 1, 2]).propose(1) == (30,)


def test_no_match_no_draft() -> None:
    assert index([1, 2, 3, 4]).propose(4) == ()
    assert index([1]).propose(4) == ()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3))
def test_index_equals_a_search(tokens: list[int], low: int) -> None:
    """Grown token by token or at once, the index finds what a search from the end finds."""
    made = index(tokens[:1], low=low, high=3)
    for token in tokens[1:]:
        made.extend([token])
    expected: tuple[int, ...] = ()
    for size in range(3, low - 1, -1):
        ends = [at for at in range(size, len(tokens)) if tokens[at - size : at] == tokens[-size:]]
        if size < len(tokens) and ends:
            expected = tuple(tokens[ends[-1] : ends[-1] + 4])
            break
    assert made.propose(4) == expected == index(tokens, low=low, high=3).propose(4)
