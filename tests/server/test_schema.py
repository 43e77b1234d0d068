"""Whatever /openapi.json allows, and what it forbids, gets an answer that it declares; never a 5xx."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra `test`)")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 100
"""Requests per route, of those that the schema allows and again of those that it forbids."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ROUTES = {
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize"),
    *("GET /v1/models", "GET /health", "GET /metrics", "GET /version", "GET /tokenizer_info"),
}


def statuses_of(url: str, operation: Any, mode: str) -> set[int]:
    """Ask one route; every answer is as the route declares it. Returns the answers' statuses."""
    found = set()

    @settings(
        max_examples=EXAMPLES if operation.method == "post" else 2,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(schemathesis.GenerationMode(mode)))
    def ask(case: Any) -> None:
        reply = case.call(base_url=url, timeout=20)
        case.validate_response(reply, checks=CHECKS)
        found.add(reply.status_code)

    ask()
    return found


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_route_answers_as_it_declares(served: Any, mode: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = {operation.ok().label: operation.ok() for operation in schema.get_all_operations()}
    assert set(operations) == ROUTES
    for label, operation in operations.items():
        if label.startswith("POST"):
            assert (200 if mode == "positive" else 400) in statuses_of(served.url, operation, mode), label
        elif mode == "positive":  # they take nothing that could be wrong
            assert statuses_of(served.url, operation, mode) == {200}, label
