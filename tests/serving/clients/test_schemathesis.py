"""schemathesis makes requests out of the server's own description, valid ones and others, and checks every answer."""

import pytest

from tests.serving.clients.conftest import Server

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def described(server: Server) -> object:
    schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    schema.config.update(base_url=server.address)
    return schema


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@hypothesis.settings(
    derandomize=True, max_examples=200, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_every_answer_is_one_that_the_description_has(case: "schemathesis.Case") -> None:
    """Left out is one check: a description cannot say all of what makes a request wrong, such as a length in tokens."""
    case.call_and_validate(
        timeout=30, excluded_checks=[schemathesis.checks.positive_data_acceptance],
    )
