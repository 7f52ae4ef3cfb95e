"""Requests made up from the OpenAPI document: no answer is a 5xx or differs from what the document says.

KVGUARD_SCHEMA_EXAMPLES sets how many for each operation (CI: 25).
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as configure
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.service.conftest import started

EXAMPLES = int(os.environ.get("KVGUARD_SCHEMA_EXAMPLES", "25"))
ENDLESS = "/v1/events"
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.response_headers_conformance,
]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    rates = {"KVGUARD_SERVE_READ_RATE": "0", "KVGUARD_SERVE_WRITE_RATE": "0"}
    with started(tmp_path_factory.mktemp("schema") / "state", **rates) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_answers_are_what_the_document_says(schema: Any) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 14
    for operation in operations:
        if operation.path != ENDLESS:
            play(operation)


def play(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @configure(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def once(case: Any) -> None:
        if "wait" in (case.query or {}):
            case.query["wait"] = 0.01  # how long it waits says nothing here
        case.call_and_validate(checks=CHECKS)

    once()
