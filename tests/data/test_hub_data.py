"""`hf:OWNER/NAME`: the rows and the commit of a data set, and the refusals."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "1234567890abcdef1234567890abcdef12345678"


def lines(word: str) -> bytes:
    """Return 40 rows of .jsonl."""
    return "".join(json.dumps({"body": f"{word} {n}"}) + "\n" for n in range(40)).encode()


FILES = {
    "README.md": b"# Texts",
    "data/train-00000-of-00002.jsonl": lines("one"),
    "data/train-00001-of-00002.jsonl": lines("two"),
    "data/test-00000-of-00001.jsonl": b'{"body": "held"}\n' * 3,
}


class Hub(BaseHTTPRequestHandler):
    """The hub's API for one data set."""

    def entry(self, name: str) -> dict[str, object]:
        data = FILES[name]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid, "rfilename": name}

    def answer(self, path: str) -> bytes | None:
        api = "/api/datasets/me/texts"
        if path in (api, f"{api}/revision/{COMMIT}"):
            siblings = [self.entry(name) for name in FILES]
            return json.dumps({"id": "me/texts", "sha": COMMIT, "siblings": siblings}).encode()
        if match := re.fullmatch(rf"{api}/tree/{COMMIT}/?(.*)", path):
            folder = match[1].replace("%2F", "/")
            names = [name for name in FILES if name.startswith(folder)]
            folders = {"type": "directory", "path": "data", "oid": "0" * 40}
            tree = [self.entry(name) for name in names if "/" not in name[len(folder) + 1 :]]
            is_flat = "recursive=true" not in self.path.lower()
            if not folder:
                tree = [self.entry(n) for n in names if is_flat <= ("/" not in n)] + [folders]
            return json.dumps(tree).encode()
        return FILES.get(path.removeprefix(f"/datasets/me/texts/resolve/{COMMIT}/"))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = (
            json.loads(body)["paths"]
            if body.startswith("{")
            else re.findall(r"paths=([^&]+)", body)
        )
        paths = [path.replace("%2F", "/") for path in paths]
        known = [self.entry(path) for path in paths if path in FILES]
        known += [{"type": "directory", "path": "data", "oid": "0" * 40}] * ("data" in paths)
        self.send(json.dumps(known).encode())

    def do_GET(self, body=True):
        self.send(self.answer(self.path.partition("?")[0]), body)

    def do_HEAD(self):
        self.do_GET(body=False)

    def send(self, data: bytes | None, body: bool = True) -> None:
        status, n_bytes = (404 if data is None else 200), len(data or b"")
        first, last = 0, n_bytes - 1
        if data is not None and (
            match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        ):
            status, first = 206, int(match[1])
            last = min(last, int(match[2] or last))
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{n_bytes}")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data or b"").hexdigest()}"')
        if data is None:
            code = "EntryNotFound" if "me/texts" in self.path else "RepoNotFound"
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if body and data:
            self.wfile.write(data[first : last + 1])

    def log_message(self, *_):
        pass


@pytest.fixture
def tiedgpt(tmp_path):
    """Run the command line in a process whose hub is this one; return it when it ended."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}

    def run(*arguments):
        command = [sys.executable, "-m", "tiedgpt", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )

    yield run
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_data_set_is_streamed_at_one_commit_which_is_named(tiedgpt, tmp_path):
    options = ("--text-field", "body", "--tokenizer", "char", "--workers", "1", "--out")
    done = tiedgpt("data", "prepare", "hf:me/texts", *options, "out")
    assert done.returncode == 0, done.stderr
    assert f"hf:me/texts is hf:me/texts@{COMMIT}" in " ".join(done.stderr.split())
    record = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert [name for name, *_ in record["sources"]] == [f"hf:me/texts@{COMMIT}"]
    assert record["parts"] == 2, "one for each file"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 80
    test = tiedgpt("data", "prepare", f"hf:me/texts@{COMMIT}:test", *options, "test")
    assert test.returncode == 0, test.stderr
    problems = {
        "hf:me/none": "the hub says 404",
        "hf:texts": "write hf:OWNER/NAME",
        "hf:me/texts:dev": "it has train, test",
    }
    for source, problem in problems.items():
        refused = tiedgpt("data", "prepare", source, *options, "refused")
        assert refused.returncode == 1 and problem in " ".join(refused.stderr.split())
