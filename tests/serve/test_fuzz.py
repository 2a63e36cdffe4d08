"""No request, however odd, is the server's fault."""

import json
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.serve.conftest import LIMITS
from tiedgpt.data import TEMPLATES
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.serve import schemas
from tiedgpt.serve.app import create_app
from tiedgpt.serve.responses import ResponsesRequest

PATHS = {
    "/v1/completions": schemas.CompletionRequest,
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": schemas.EmbeddingRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
    **{
        f"/inspect/{name}": schemas.inspection_body(each)
        for name, each in INSPECTIONS.items()
        if each.is_served
    },
}
TEXT = st.text(st.characters(), max_size=9)
"""Texts, some with lone surrogates."""
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 300) | TEXT
    | st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 2)
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
REQUIRED = {"prompt": "a", "input": "a", "tokens": [5], "text": "the cat"}


AS_JSON = {"content-type": "application/json"}


def bodies(path):
    fields = PATHS[path].model_fields
    needed = {name: value for name, value in REQUIRED.items() if name in fields}
    odd = st.dictionaries(st.sampled_from([*fields, "unknown", "\ud800"]), JSON, max_size=3)
    return st.tuples(st.just(path), odd.map(lambda given: needed | given) | JSON)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(PATHS)).flatmap(bodies))
def test_odd_requests_are_answered_or_refused(client, request_made):
    path, body = request_made
    response = client.post(path, content=json.dumps(body), headers=AS_JSON)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 99), st.text(max_size=9), st.dictionaries(st.text(), st.text(), max_size=2))
def test_odd_addresses_are_answered_or_refused(client, number, tail, query):
    paths = [route.path for route in client.app.routes if "GET" in getattr(route, "methods", ())]
    path = paths[number % len(paths)].replace("{", "").replace("}", "")
    response = client.get(path + quote(tail, safe=""), params=query)
    assert response.status_code < 500, (path, tail, query)


def test_a_page_with_a_newline_behind_its_name_is_missing(client):
    paths = [route.path for route in client.app.routes if "GET" in getattr(route, "methods", ())]
    for path in (path for path in paths if "{" not in path):
        assert client.get(f"{path}%0A").status_code in (200, 404), path


@pytest.fixture(scope="module")
def chatting(engine):
    app = create_app(engine, name="tiny", limits=LIMITS, template=TEMPLATES["plain"])
    return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)


NO_JSON = [float("nan"), float("inf"), "\ud800", ["\ud800"], {"\ud800": 1}]
"""Values that Python reads from a body and that an answer cannot hold."""


def error_of(client, path, body):
    """Return the error of a request that is refused."""
    response = client.post(path, content=json.dumps(body), headers=AS_JSON)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("value", NO_JSON, ids=ascii)
@pytest.mark.parametrize(
    ("path", "field", "schema_of"),
    [
        ("/v1/responses", "text.format.schema", lambda schema: {
            "input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        }),
        ("/v1/responses", "text.format.schema", lambda schema: {
            "input": "a", "text": {"format": {"type": "text", "schema": schema}}
        }),
        ("/v1/completions", "response_format.json_schema.schema", lambda schema: {
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
        }),
        ("/v1/completions", "json_schema", lambda schema: {"json_schema": schema}),
    ],
)  # fmt: skip
def test_a_schema_that_is_no_json_is_refused(chatting, path, field, schema_of, value):
    error = error_of(chatting, path, schema_of({"enum": [1, 2], "default": value}))
    assert error["param"] == field and "JSON" in error["message"], error


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_name_that_is_no_utf_8_is_named(chatting, path):
    fields = PATHS[path].model_fields
    needed = {name: value for name, value in REQUIRED.items() if name in fields}
    for name in ("\ud800", "promp\udfff"):
        assert error_of(chatting, path, needed | {name: 1})["param"] == ascii(name)[1:-1]
    if "stream_options" in fields:
        error = error_of(chatting, path, needed | {"stream_options": {"\ud800": 1}})
        assert error["param"] == r"stream_options.\ud800", error
