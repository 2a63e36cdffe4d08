"""A server on this machine that speaks the part of the hub's API by which files go up and down.

All files go up within the commit, as small ones do: storage for large ones is the hub's alone.
"""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import huggingface_hub.constants
import pytest

TOKEN = "hf_test"
COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """Repositories by name: whether they are private, and their files."""

    def __init__(self, handler=None):
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private, self.files = {}, {}
        self.asked = []

    @contextmanager
    def running(self):
        thread = Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        hub, body = self.server, self.body()
        hub.asked.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        match self.path.split("?")[0].strip("/").split("/"):
            case ["api", "repos", "create"]:
                request = json.loads(body)
                repo = f"{request['organization']}/{request['name']}"
                if request["organization"] != "someone":
                    return self.answer({"error": "no rights"}, 403)
                if repo in hub.private:
                    return self.answer({"url": f"{hub.url}/{repo}", "error": "exists"}, 409)
                hidden = request.get("private", request.get("visibility") == "private")
                hub.private[repo], hub.files[repo] = hidden, {}
                return self.answer({"url": f"{hub.url}/{repo}"})
            case ["api", "validate-yaml"]:
                return self.answer({"errors": [], "warnings": []})
            case ["api", "models", *_, "preupload", "main"]:
                names = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
                return self.answer({"files": files})
            case ["api", "models", owner, name, "commit", "main"]:
                repo = f"{owner}/{name}"
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        hub.files[repo][value["path"]] = base64.b64decode(value["content"])
                url = f"{hub.url}/{repo}/commit/{COMMIT}"
                return self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
        return self.answer({"error": f"nothing at {self.path}"}, 404)

    def do_GET(self):
        self.server.asked.append(self.path.split("?")[0])
        match self.path.split("?")[0].strip("/").split("/"):
            case ["api", "models", owner, name, *_] if f"{owner}/{name}" in self.server.files:
                files = self.server.files[f"{owner}/{name}"]
                if "tree" in self.path:
                    tree = [{"type": "file", "path": item, "size": len(data), "oid": item}
                            for item, data in files.items()]  # fmt: skip
                    return self.answer(tree)
                siblings = [{"rfilename": item} for item in files]
                return self.answer(
                    {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "tags": [],
                     "private": True, "downloads": 0, "likes": 0}
                )  # fmt: skip
            case [owner, name, "resolve", _, file]:
                data = self.server.files.get(f"{owner}/{name}", {}).get(file)
                if data is not None:
                    tag = f'"{hashlib.sha256(data).hexdigest()}"'
                    return self.answer(data, ETag=tag, X_Repo_Commit=COMMIT)
        return self.answer({"error": f"nothing at {self.path}"}, 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that runs, and that huggingface_hub asks."""
    constants = huggingface_hub.constants
    with Hub().running() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
