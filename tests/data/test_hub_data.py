"""`hf:OWNER/NAME`: the rows and the commit of a data set, and the refusals."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from tests.weights.fake_hub import COMMIT, Handler, Hub


def lines(word: str) -> bytes:
    """Return 40 rows of .jsonl."""
    return "".join(json.dumps({"body": f"{word} {n}"}) + "\n" for n in range(40)).encode()


FILES = {
    "README.md": b"# Texts",
    "data/train-00000-of-00002.jsonl": lines("one"),
    "data/train-00001-of-00002.jsonl": lines("two"),
    "data/test-00000-of-00001.jsonl": b'{"body": "held"}\n' * 3,
    "data/flawed-00000-of-00001.jsonl": b'{"body": "a"}\n{"body": "b"}\n{"body": null}\n',
}
FOLDER = {"type": "directory", "path": "data", "oid": "0" * 40}


class DataHandler(Handler):
    """The hub's API for one data set."""

    def entry(self, name: str) -> dict[str, object]:
        data = FILES[name]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid, "rfilename": name}

    def find(self, path: str) -> object:
        api = "/api/datasets/me/texts"
        if path in (api, f"{api}/revision/{COMMIT}"):
            siblings = [self.entry(name) for name in FILES]
            return {"id": "me/texts", "sha": COMMIT, "siblings": siblings}
        if match := re.fullmatch(rf"{api}/tree/{COMMIT}/?(.*)", path):
            folder = match[1].replace("%2F", "/")
            names = [name for name in FILES if name.startswith(folder)]
            tree = [self.entry(name) for name in names if "/" not in name[len(folder) + 1 :]]
            is_flat = "recursive=true" not in self.path.lower()
            if not folder:
                tree = [self.entry(n) for n in names if is_flat <= ("/" not in n)] + [FOLDER]
            return tree
        return FILES.get(path.removeprefix(f"/datasets/me/texts/resolve/{COMMIT}/"))

    def do_POST(self):
        body = self.body().decode()
        paths = json.loads(body)["paths"] if "{" in body else re.findall(r"paths=([^&]+)", body)
        paths = [path.replace("%2F", "/") for path in paths]
        entries = [self.entry(path) for path in paths if path in FILES]
        self.answer(entries + [FOLDER] * ("data" in paths))

    def do_GET(self):
        found = self.find(self.path.partition("?")[0])
        if found is None:
            code = "EntryNotFound" if "me/texts" in self.path else "RepoNotFound"
            return self.answer({}, 404, X_Error_Code=code)
        headers = {"X_Repo_Commit": COMMIT, "ETag": '"1"'}
        match = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or not isinstance(found, bytes):
            return self.answer(found, **headers)
        first, last = int(match[1]), min(int(match[2] or len(found)), len(found) - 1)
        place = f"bytes {first}-{last}/{len(found)}"
        return self.answer(found[first : last + 1], 206, Content_Range=place, **headers)

    do_HEAD = do_GET


@pytest.fixture
def tiedgpt(tmp_path):
    """Run the command line in a process whose hub is this one; return it when it ended."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with Hub(DataHandler).running() as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}

        def run(*arguments):
            command = [sys.executable, "-m", "tiedgpt", *map(str, arguments)]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, cwd=tmp_path
            )

        yield run


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
        "hf:me/texts:flawed": f"hf:me/texts@{COMMIT}:flawed:3: the field 'body'",
    }
    for source, problem in problems.items():
        refused = tiedgpt("data", "prepare", source, *options, "refused")
        assert refused.returncode in (1, 3) and problem in " ".join(refused.stderr.split())
