"""No request, however odd, is the server's fault."""

import json
from urllib.parse import quote

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.serve import schemas
from tiedgpt.serve.responses import ResponsesRequest

PATHS = {
    "/v1/completions": schemas.CompletionRequest,
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": schemas.EmbeddingRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
    **{f"/inspect/{name}": schemas.inspection_body(each) for name, each in INSPECTIONS.items()},
}
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 300) | st.text(max_size=9)
    | st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 2)
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)
REQUIRED = {"prompt": "a", "input": "a", "tokens": [5], "text": "the cat"}


AS_JSON = {"content-type": "application/json"}


def bodies(path):
    fields = PATHS[path].model_fields
    needed = {name: value for name, value in REQUIRED.items() if name in fields}
    odd = st.dictionaries(st.sampled_from([*fields, "unknown"]), JSON, max_size=3)
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
