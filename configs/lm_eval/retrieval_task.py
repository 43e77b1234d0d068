"""What lm-eval needs of retrieval samples: reading, prompt, score. Everything happens on this machine."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oasis_tp.bench import samples, scoring


def load(**_: Any) -> dict[str, Any]:
    """The samples of $OASIS_TP_SAMPLES as a data set.

    Raises:
        ValueError: the variable is not set, or the file has a faulty line.
    """
    from datasets import Dataset

    if "OASIS_TP_SAMPLES" not in os.environ:
        raise ValueError("set OASIS_TP_SAMPLES to a file of samples (oasis_tp.bench retrieval --write-samples FILE)")
    found, complaints = samples.read_samples(Path(os.environ["OASIS_TP_SAMPLES"]))
    if complaints:
        raise ValueError(complaints[0])
    return {"test": Dataset.from_list([asdict(sample) for sample in found])}


def prompt(doc: dict[str, Any]) -> str:
    return _sample(doc).prompt


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """0 to 100, as in the report of `oasis_tp.bench retrieval`."""
    return {"score": 100 * scoring.score(_sample(doc), results[0])}


def _sample(doc: dict[str, Any]) -> samples.Sample:
    return samples.Sample(**(doc | {"outputs": tuple(doc["outputs"])}))
