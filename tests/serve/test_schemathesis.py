"""Schemathesis, by the OpenAPI document of the server itself: no request is the server's fault."""

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


def test_no_request_is_the_servers_fault(running):
    api = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    paths = set()
    for operation in api.get_all_operations():

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operation.ok().as_strategy())
        def attack(case):
            paths.add(case.path)
            assert case.call().status_code < 500

        attack()
    assert {"/v1/completions", "/v1/embeddings", "/inspect/lens"} < paths
