"""schemathesis makes requests out of the server's own description, valid ones and others, and checks every answer."""

from typing import Any

import pytest

from tests.serving.clients.conftest import Server, client

schemathesis = client("schemathesis")
hypothesis = client("hypothesis")
pytestmark = pytest.mark.slow
EXAMPLES = 15


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_answer_is_one_that_the_description_has(server: Server, mode: str) -> None:
    """Left out is one check: a description cannot say all of what makes a request wrong, such as a length in tokens."""
    described = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    asked = 0
    for found in described.get_all_operations():
        operation = found.ok()
        if mode == "negative" and operation.method.upper() != "POST":
            continue  # there is nothing to be wrong about

        @hypothesis.settings(
            derandomize=True, max_examples=EXAMPLES, deadline=None, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def check(case: Any) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(
                base_url=server.address, timeout=60, excluded_checks=[schemathesis.checks.positive_data_acceptance]
            )

        check()
    assert asked > 6 * EXAMPLES / 2
