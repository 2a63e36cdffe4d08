"""Access checks: hosts, origins, keys and sizes."""

import io
import json
import logging

import pytest
from starlette.testclient import TestClient

from tiedgpt.errors import UserError
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


def test_all_routes_but_health_and_the_pages_files_need_the_key(locked):
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
            answer = response.status_code, response.headers.get("www-authenticate")
            assert answer == (401, "Bearer"), (path, given)
            assert response.json()["error"]["code"] == "invalid_api_key"
    twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")]
    assert client.get("/v1/models", headers=twice).status_code == 401
    assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


HOSTILE = [
    "", "evil.example", "evil.example:8000", "0.0.0.0", "192.168.0.1:8000", "[::2]", "127.1",
    # what stands beside an allowed name
    "127.0.0.1.evil.example", "localhost.", "localhost.evil", "a@localhost", "localhost@evil",
    "localhost/", "localhost?", "localhost#", "localhost\\evil", "localhost evil", "localhost,evil",
    "localhost;evil", "localhost%00", "localhost%2eevil", "local\thost", " localhost", "localhost ",
    "\x1flocalhost", "localhost\xa0", "http://localhost",
    # brackets
    "[::1]evil", "[::1]evil:80", "[::1].evil.example", "evil[::1]", "[::1]:80evil", "[::1", "::1]",
    "::1", "::1:8000", "[[::1]]", "[::1][::1]", "[::1%evil]", "[::1]@evil", "[localhost]",
    "[127.0.0.1]", "[127.0.0.1]:80", "[]", "[::1]80",
    # ports
    "localhost:port", "localhost:80:80", "localhost:80evil", "localhost:-1", "localhost:+80",
    "localhost:8_0", "localhost: 80", "localhost:0x50", "localhost:65536", "localhost:99999999",
    "localhost:\xb2",
]  # fmt: skip
"""Invalid Host headers. A lenient parser finds the name of a local server in some."""


@pytest.mark.parametrize("host", HOSTILE)
def test_other_hosts_and_their_pages_are_refused(client, host):
    """A public server refuses them too, unless they are an address."""
    for header, value in {"host": host, "origin": f"http://{host}"}.items():
        response = client.get("/health", headers={header: value.encode("latin-1")})
        assert response.status_code == 403
        assert response.json()["error"]["code"] == f"{header}_not_allowed"
    is_address = host in ("0.0.0.0", "192.168.0.1:8000", "[::2]")
    assert Hosts.of("0.0.0.0").allow(host) == is_address


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:9", "[::1]:8000", "[::1]", "LocalHost:80", "localhost:65535"]
)
def test_localhost_is_allowed(client, host):
    headers = {"host": host, "origin": f"http://{host}"}
    assert client.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("option", "host"),
    [("gpt.example", "gpt.example"), ("GPT.example", "gpt.example:8000"),
     ("gpt.example:8000", "gpt.example"), ("::2", "[::2]:80"), ("[::2]", "[::2]")],
)  # fmt: skip
def test_an_allowed_host_may_be_given_as_clients_write_it(option, host):
    assert Hosts.of("127.0.0.1", [option]).allow(host)


@pytest.mark.parametrize("option", ["", "http://gpt.example", "gpt.example/v1", "[::1]x", "a b"])
def test_an_allowed_host_that_no_client_can_send_is_an_error(option):
    with pytest.raises(UserError) as caught:
        Hosts.of("127.0.0.1", [option])
    assert caught.value.options == ("allow_host",)


def test_a_public_server_accepts_its_address_and_allowed_hosts():
    hosts = Hosts.of("0.0.0.0", ["gpt.example"])
    assert hosts.allow("192.168.0.7:8000") and hosts.allow("[fe80::1]") and hosts.allow("localhost")
    assert hosts.allow("gpt.example:80") and not hosts.allow("evil.example")
    assert not Hosts.of("127.0.0.1").allow("192.168.0.7")


def test_pages_of_other_origins_are_refused_and_no_cors_is_granted(client):
    body = {"prompt": "a", "max_tokens": 1}
    for origin in (
        "https://evil.example", "null", "http://localhost.evil.example", "http://[", "localhost",
        "file://localhost", "http://localhost/", "x://localhost", "",
    ):  # fmt: skip
        response = client.post("/v1/completions", json=body, headers={"origin": origin})
        assert response.status_code == 403
    response = client.post(
        "/v1/completions", json=body, headers={"origin": "http://localhost:8000"}
    )
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_log_has_a_line_for_each_request_without_prompt_or_key(locked, monkeypatch):
    stream, log = io.StringIO(), logging.getLogger("tiedgpt.serve.access")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(stream)])
    log.setLevel(logging.INFO)
    client = TestClient(locked, base_url="http://localhost")
    headers = {"authorization": f"Bearer {KEY}"}
    response = client.post(
        "/v1/completions?x=1", json={"prompt": "a secret", "max_tokens": 2}, headers=headers
    )
    text = stream.getvalue()
    line = json.loads(text.splitlines()[-1])
    assert line["id"] == response.headers["x-request-id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["completion_tokens"] >= 1 and line["seconds"] > 0
    assert "secret" not in text and KEY not in text


DEEP = b'{"prompt": ' + b"[" * 99_000 + b"]" * 99_000 + b"}"


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "said"),
    [
        ("GET", "/v1/nothing", {}, 404, "there is no route /v1/nothing"),
        ("GET", "/v1/completions", {}, 405, "/v1/completions takes POST, not GET"),
        ("POST", "/health", {}, 405, "/health takes GET, not POST"),
        ("POST", "/", {}, 405, "/ takes GET, not POST"),
        ("POST", "/v1/completions", {"content-encoding": "gzip"}, 415, "compressed (gzip)"),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, 415, "application/json"),
        ("POST", "/v1/completions", {"content": b'{"prompt": "\xff"}'}, 400, "must be UTF-8"),
        ("POST", "/v1/completions", {"content": DEEP}, 400, "nested less deeply"),
        ("GET", "/health", {"x": "x" * 66_000}, 431, "65,536 bytes"),
        ("GET", "/health?" + "x" * 40_000, {"x": "x" * 40_000}, 431, "65,536 bytes"),
    ],
)
def test_unknown_routes_get_one_sentence_in_openais_format(
    client, method, path, options, status, said
):
    body = options.pop("content", b"{}") if method == "POST" else None
    headers = {"content-type": "application/json"} | options
    response = client.request(method, path, content=body, headers=headers)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert said in error["message"] and "\n" not in error["message"]


def test_head_is_get_without_the_body(client):
    for path in ("/", "/health", "/v1/models"):
        head, get = client.head(path), client.get(path)
        assert head.status_code == 200 and not head.content
        assert head.headers["content-length"] == str(len(get.content))
    assert client.head("/v1/completions").status_code == 405


FINE = {"role": "a", "content": "b"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [FINE, {"role": "a", "content": 5}]},
         "messages.1.content"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("chat/completions", {"messages": [{"role": "a", "content": [{"type": "image_url"}]}]},
         "messages.0.content"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias.x"),
        ("completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
         "response_format.json_schema.schema"),
        ("completions", {"stream_options": {"x": 1}}, "stream_options.x"),
        ("completions", {"prompt": ["a", 5]}, "prompt"),
        ("embeddings", {}, "input"),
    ],
)  # fmt: skip
def test_an_error_names_the_path_of_the_field(client, path, body, param):
    response = client.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert error["message"].startswith(f"{param} ")
