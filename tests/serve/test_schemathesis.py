"""Schemathesis, by the OpenAPI document of the server itself: no request is the server's fault."""

import pytest
from hypothesis import HealthCheck, settings

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


@pytest.fixture
def api(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@schemathesis.pytest.from_fixture("api").parametrize()
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_the_servers_fault(case):
    case.call_and_validate(checks=[schemathesis.checks.not_a_server_error])
