"""Documents that name tests name tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_a_document_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text())
    assert len(named) > 40
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {getattr(node, "name", None) for node in tree.body}, f"{path}::{name}"
