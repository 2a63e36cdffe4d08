"""Who may ask what: hosts, origins, keys, sizes."""

import json
import logging

import pytest
from starlette.testclient import TestClient

from tiedgpt.serve.app import create_app
from tiedgpt.serve.assets import page_files
from tiedgpt.serve.guards import Hosts

KEY = "a-key"


@pytest.fixture(scope="module")
def locked(engine):
    return create_app(engine, name="tiny", key=KEY)


def routes(app):
    """Every (method, path) of the application, those that FastAPI adds among them."""
    schema = app.openapi()["paths"]
    found = [(method, path) for path, methods in schema.items() for method in methods]
    return [*found, ("get", "/openapi.json"), ("get", "/nowhere"), ("post", "/health/")]


def test_all_but_health_and_the_pages_files_need_the_key(locked):
    client = TestClient(locked, base_url="http://localhost")
    for path in ("/health", *page_files()):
        assert client.get(path).status_code == 200
    known = [route for route in routes(locked) if route != ("get", "/health")]
    assert len(known) > 22 and ("get", "/inspect/model") in known
    wrong = [None, "a-key", "Bearer", "Bearer a-ke", "Bearer a-key2", "Basic a-key", "Bearer é"]
    for method, path in known:
        for given in wrong:
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            response = client.request(method, path.replace("{name}", "x"), headers=headers)
            assert response.status_code == 401, (path, given)
            assert response.json()["error"]["code"] == "invalid_api_key"
    twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")]
    assert client.get("/v1/models", headers=twice).status_code == 401
    assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.", "", "a@localhost", "localhost/",
     "0.0.0.0", "192.168.0.1:8000", "localhost:port", "[::2]", "localhost#", "[::1"],
)  # fmt: skip
def test_other_hosts_are_refused(client, host):
    response = client.get("/health", headers={"host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:8000", "LocalHost:80"])
def test_this_machine_is_allowed(client, host):
    assert client.get("/health", headers={"host": host}).status_code == 200


def test_a_server_for_all_is_called_by_address_or_by_a_name_that_is_given():
    hosts = Hosts.of("0.0.0.0", ["gpt.example"])
    assert hosts.allow("192.168.0.7:8000") and hosts.allow("[fe80::1]") and hosts.allow("localhost")
    assert hosts.allow("gpt.example:80") and not hosts.allow("evil.example")
    assert not Hosts.of("127.0.0.1").allow("192.168.0.7")


def test_pages_of_other_origins_are_refused_and_no_cors_is_granted(client):
    body = {"prompt": "a", "max_tokens": 1}
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://["):
        response = client.post("/v1/completions", json=body, headers={"origin": origin})
        assert response.status_code == 403
    response = client.post(
        "/v1/completions", json=body, headers={"origin": "http://localhost:8000"}
    )
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]
    plain = {"content-type": "text/plain"}
    assert (
        client.post("/v1/completions", content=json.dumps(body), headers=plain).status_code == 400
    )


def test_a_large_body_is_refused(client):
    response = client.post("/v1/completions", content=b" " * (1 << 20) + b"{}")
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_the_log_has_a_line_for_each_request_without_prompt_or_key(locked, caplog):
    caplog.set_level(logging.INFO, "tiedgpt.serve.access")
    client = TestClient(locked, base_url="http://localhost")
    headers = {"authorization": f"Bearer {KEY}"}
    response = client.post(
        "/v1/completions?x=1", json={"prompt": "a secret", "max_tokens": 2}, headers=headers
    )
    line = json.loads(caplog.messages[-1])
    assert line["id"] == response.headers["x-request-id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["completion_tokens"] >= 1 and line["seconds"] > 0
    assert "secret" not in caplog.text and KEY not in caplog.text


def test_unknown_paths_and_methods_are_errors_in_the_same_format(client):
    for response, status in (
        (client.get("/v1/nothing"), 404), (client.get("/v1/completions"), 405)
    ):  # fmt: skip
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
