"""Scores of answers, 0 to 1: RULER's two string matches, and MRCR's."""

import difflib
import re

from oasis_tp.bench.samples import Sample

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(sample: Sample, answer: str) -> float:
    """How right an answer is, 0 to 1.

    `all`: the share of references that stand in the answer; `part`: 1 if any does (RULER's string_match_all and
    string_match_part: letters' case does not count, control characters are line ends). `mrcr`: nothing unless the
    answer begins with `answer_start`, then difflib's ratio of what follows to the reference's (OpenAI MRCR).
    """
    if sample.metric == "mrcr":
        return _mrcr(answer.lstrip(), sample.answer_start, sample.outputs[0])
    text = _CONTROL.sub("\n", answer).lower()
    found = [reference.lower() in text for reference in sample.outputs]
    return sum(found) / len(found) if sample.metric == "all" else float(any(found))


def _mrcr(answer: str, start: str, reference: str) -> float:
    if not answer.startswith(start):
        return 0.0
    given, wanted = answer.removeprefix(start), reference.removeprefix(start)
    return difflib.SequenceMatcher(None, given, wanted).ratio()
