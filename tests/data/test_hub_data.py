"""`hf:OWNER/NAME`: which files of a data set are read, at which commit; and what is refused."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tiedgpt.data.hub import select_data
from tiedgpt.errors import UserError

COMMIT = "1234567890abcdef1234567890abcdef12345678"
LINES = "".join(json.dumps({"body": f"text {n}"}) + "\n" for n in range(40))
FILES = {
    "README.md": b"# Texts",
    "data/train-00000-of-00002.jsonl": LINES.encode(),
    "data/train-00001-of-00002.jsonl.gz": gzip.compress(LINES.replace("text", "more").encode()),
    "data/test-00000-of-00001.jsonl": b'{"body": "held"}\n',
    "small/validation.csv": b"text\nheld\n",
}


@pytest.mark.parametrize(
    ("folder", "split", "expected"),
    [
        ("", None, ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl.gz"]),
        ("", "test", ["data/test-00000-of-00001.jsonl"]),
        ("small", "validation", ["small/validation.csv"]),
        (
            "data",
            "train",
            ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl.gz"],
        ),
    ],
)
def test_the_files_of_a_split_are_those_with_its_name(folder, split, expected):
    assert select_data("me/texts", list(FILES), folder, split) == expected


def test_a_data_set_without_splits_is_read_whole_and_in_one_format():
    files = ["b.parquet", "a.parquet", "a.csv", "notes.txt"]
    assert select_data("me/texts", files, "", None) == ["a.parquet", "b.parquet"]
    with pytest.raises(UserError, match="no split 'train'") as caught:
        select_data("me/texts", files, "", "train")
    assert "leave it out" in caught.value.hint


def test_the_card_says_which_files_are_a_split():
    files = ["en/a.parquet", "en/b.parquet", "de/c.parquet"]
    configs = [
        {"config_name": "de", "data_files": [{"split": "train", "path": "de/*"}]},
        {
            "config_name": "en",
            "default": True,
            "data_files": [
                {"split": "train", "path": ["en/a*"]},
                {"split": "extra", "path": "en/b.parquet"},
            ],
        },
    ]
    assert select_data("me/texts", files, "", None, configs) == ["en/a.parquet"]
    assert select_data("me/texts", files, "", "extra", configs) == ["en/b.parquet"]
    assert select_data("me/texts", files, "de", None, configs) == ["de/c.parquet"]
    with pytest.raises(UserError, match="no split 'test'") as caught:
        select_data("me/texts", files, "", "test", configs)
    assert "train, extra" in caught.value.hint


@pytest.mark.parametrize("files", [[], ["model.safetensors"], ["data.arrow", "script.py"]])
def test_a_data_set_without_files_of_text_is_refused(files):
    with pytest.raises(UserError, match=r"hf:me/texts has no \.parquet, \.jsonl"):
        select_data("me/texts", files, "", None)


class Hub(BaseHTTPRequestHandler):
    """What the hub's API says of one data set."""

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        siblings = [{"rfilename": name} for name in FILES]
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in FILES.items()
        ]
        answers = {
            "/api/datasets/me/texts": {"id": "me/texts", "sha": COMMIT, "siblings": siblings},
            f"/api/datasets/me/texts/tree/{COMMIT}": tree,
        }
        answers[f"/api/datasets/me/texts/revision/{COMMIT}"] = answers["/api/datasets/me/texts"]
        file = path.removeprefix(f"/datasets/me/texts/resolve/{COMMIT}/")
        data = FILES.get(file) or (json.dumps(answers[path]).encode() if path in answers else None)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data or b"").hexdigest()}"')
        if data is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if body:
            self.wfile.write(data or b"")

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *_):
        pass


@pytest.fixture
def tiedgpt(tmp_path):
    """Run the command line in a fresh process with a hub of its own; return it when it ended."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}

    def run(*arguments, **more):
        command = [sys.executable, "-m", "tiedgpt", *map(str, arguments)]
        return subprocess.run(
            command, env=environment | more, capture_output=True, text=True, cwd=tmp_path
        )

    yield run
    server.shutdown()
    server.server_close()


def test_a_data_set_is_fetched_at_one_commit_which_is_named(tiedgpt, tmp_path):
    options = ("--text-field", "body", "--tokenizer", "char", "--workers", "1", "--out")
    done = tiedgpt("data", "prepare", "hf:me/texts", *options, "out")
    assert done.returncode == 0, done.stderr
    assert f"hf:me/texts is hf:me/texts@{COMMIT}" in " ".join(done.stderr.split())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [name for name, *_ in manifest["sources"]] == [
        f"hf:me/texts@{COMMIT}/data/train-0000{n}-of-00002.jsonl{'.gz' * n}" for n in range(2)
    ]
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 80
    offline = tiedgpt(
        *("data", "prepare", f"hf:me/texts@{COMMIT}", *options, "again"), HF_HUB_OFFLINE="1"
    )
    assert offline.returncode == 0, offline.stderr
    shards = ("000000/train_000000.bin", "000000/val_000000.bin")
    same = [(tmp_path / out / file).read_bytes() for file in shards for out in ("out", "again")]
    assert same[0] == same[1] and same[2] == same[3]
    missing = tiedgpt("data", "prepare", "hf:me/none", *options, "none")
    assert missing.returncode == 1 and "the hub says 404" in missing.stderr
    wrong = tiedgpt("data", "prepare", "hf:texts", *options, "wrong")
    assert wrong.returncode == 1 and "write hf:OWNER/NAME" in wrong.stderr
