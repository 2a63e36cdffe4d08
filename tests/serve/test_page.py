"""The page without a browser: files, headers, requests and the exported file."""

import base64
import gzip
import json
import math
import os
import posixpath
import re
import shutil
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import safetensors.numpy
from starlette.testclient import TestClient

import tiedgpt
from tests.serve.page_run import HOSTILE, make_run
from tiedgpt import inspect
from tiedgpt.cli.main import main
from tiedgpt.data import TEMPLATES, ShardWriter
from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.inspect.registry import INSPECTIONS
from tiedgpt.serve.app import create_app
from tiedgpt.serve.assets import in_one_file, page_files
from tiedgpt.serve.export import export
from tiedgpt.serve.guards import Hosts
from tiedgpt.serve.page_data import opening_text
from tiedgpt.tie import ledger

FOLDER = Path(tiedgpt.__file__).parent / "serve" / "page"
TEXT = "the cat sat on the mat" + HOSTILE[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "cats")


@contextmanager
def page_of(source, name="cats", **options):
    """A client of the application that serves a source."""
    with Engine(str(source)) as engine:
        app = create_app(engine, name=name, source=source, **options)
        yield TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def page(run):
    with page_of(run) as page:
        yield page


def test_every_file_has_the_strict_policy_and_is_cached(page):
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    for path, data in page_files().items():
        response = page.get(path)
        assert response.status_code == 200 and response.content == data
        headers = response.headers
        assert headers["content-security-policy"] == policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        kind = {"js": "text/javascript", "css": "text/css"}.get(path.rsplit(".")[-1], "text/html")
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        again = page.get(path, headers={"if-none-match": headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert page.get("/page/nothing.js").status_code == 404
    assert page.get("/page/../app.py").status_code == 404
    assert page.get("/", headers={"host": "evil.example"}).status_code == 403


def test_the_files_are_few_and_name_only_each_other():
    files = page_files()
    vendored = [data for path, data in files.items() if "/vendor/" in path]
    assert sum(map(len, vendored)) <= 150_000
    assert sum(len(gzip.compress(data)) for data in vendored) <= 50_000
    served = (data for path, data in files.items() if "/model/" not in path)
    assert sum(map(len, served)) <= 221_000
    assert len(in_one_file({}, b"").encode()) <= 256_000  # without a model's weights
    for path, data in files.items():
        text = data.decode()
        for name in re.findall(r"""(?:from|import)\s*\(?\s*["']([\w./-]+)["']""", text):
            assert posixpath.normpath(f"{posixpath.dirname(path)}/{name}") in files, (path, name)
        if "/vendor/" in path:
            continue
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), (
            path
        )
        assert not re.search(r"""(?<!xmlns=)["'(](https?:)?//""", text), path
    for name in re.findall(r'(?:href|src)="([^"]+)"', files["/"].decode()):
        assert name.startswith("data:") or f"/{name}" in files
    on_disk = {path for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".html")}
    assert len(on_disk) == len(files)


def test_the_vendored_files_equal_the_published_ones():
    readme = (FOLDER / "vendor" / "README.md").read_text()
    import hashlib

    for path in (FOLDER / "vendor").glob("*.js"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest in readme, path.name


def test_the_page_requests_the_model(page, run):
    found = page.get("/inspect/model").json()
    model = tiedgpt.GPT.from_pretrained(run)
    assert found["parameters"] == ledger(model).total == found["ledger"]["total"]
    assert found["tied"] is True and found["tokenizer"] is True
    assert (found["name"], found["source"]) == ("cats", str(run))
    assert found["matrices"] == [{"name": "wte.weight", "does": "reads and predicts"}]
    (stored,) = found["stored"]["matrices"]
    assert stored["names"] == ["transformer.wte.weight"]
    assert stored["file"] == "model.safetensors" and stored["roles"] == ["reads", "predicts"]
    assert stored["n_bytes"] == 4 * model.wte.weight.numel() and stored["dtype"] == "float32"
    limited = [name for name, inspection in INSPECTIONS.items() if inspection.max_tokens]
    assert found["most_tokens"] == dict.fromkeys(limited, 48)  # the model's context
    curves = found["run"]["curves"]
    assert curves["val_loss"]["x"] == [500, 1000, 1500, 2000, 2500, 3000]
    assert curves["loss"]["x"][-1] == 3000 and len(curves["loss"]["y"]) == 30


@pytest.mark.parametrize(("max_turns", "single"), [(1, True), (2, False), (None, False)])
def test_the_page_knows_a_model_tuned_on_single_exchanges(engine, max_turns, single):
    app = create_app(engine, template=replace(TEMPLATES["plain"], max_turns=max_turns))
    page = TestClient(app, base_url="http://127.0.0.1")
    chat = {"single": single, "system": None, "question": None}
    assert page.get("/inspect/model").json()["chat"] == chat


def test_the_page_knows_the_system_message_and_a_question_of_the_tuning_data(engine, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/opening.json").write_text('{"question": "Where is the cat?"}')
    template = replace(TEMPLATES["plain"], default_system="Be kind.")
    app = create_app(engine, template=template, source=tmp_path)
    facts = TestClient(app, base_url="http://127.0.0.1").get("/inspect/model").json()
    chat = {"single": False, "system": "Be kind.", "question": "Where is the cat?"}
    assert (facts["chat"], facts["opening"]) == (chat, None)


def test_without_a_source_there_is_no_file_and_no_run(client):
    found = client.get("/inspect/model").json()
    assert found["stored"] is None and found["run"] is None and found["source"] is None
    assert found["parameters"] > 0


def test_the_page_requests_the_texts_of_tokens_once(page, run):
    response = page.get("/inspect/pieces")
    tokenizer = tiedgpt.Tokenizer.from_pretrained(run)
    pieces = response.json()["pieces"]
    assert len(pieces) == tiedgpt.GPT.from_pretrained(run).config.vocab_size
    assert list(HOSTILE) == [pieces[id] for id in range(len(tokenizer))][-4:]
    known = {"if-none-match": response.headers["etag"]}
    assert page.get("/inspect/pieces", headers=known).status_code == 304


def test_tokens_are_counted_in_the_run(page, run):
    found = page.post("/inspect/vocabulary", json={}).json()
    ours = inspect.vocabulary(run)
    assert found["count"] == ours.count.tolist() and sum(found["count"]) > 0
    assert found["counted_in"] == run.name
    assert found["unseen"] == ours.unseen.tolist()


@pytest.mark.parametrize("hosts", [Hosts.of("0.0.0.0"), Hosts.of("127.0.0.1", ["gpt.example"])])
def test_remote_clients_do_not_learn_the_models_path(run, hosts):
    with page_of(run, hosts=hosts) as page:
        answers = [page.get("/inspect/model"), page.post("/inspect/vocabulary", json={})]
    assert answers[0].json()["source"] is None and answers[0].json()["run"] is not None
    assert all(answer.status_code == 200 for answer in answers)
    assert not any(str(run.parent) in answer.text for answer in answers)


def test_errors_for_remote_clients_contain_no_path(run, tmp_path):
    damaged = tmp_path / "cats"
    shutil.copytree(run, damaged)
    (shard,) = (damaged / "data").glob("train_*.bin")
    shard.write_bytes(b"")
    with page_of(damaged, "it", hosts=Hosts.of("0.0.0.0")) as page:
        answer = page.post("/inspect/vocabulary", json={})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said.startswith(f"it/data/{shard.name} is damaged")


def test_a_directory_name_outside_utf8_has_a_page(run, tmp_path):
    odd = tmp_path / os.fsdecode(b"cats\xff")
    shutil.copytree(run, odd)
    with page_of(odd, odd.name) as page:
        assert page.get("/inspect/model").json()["name"] == "cats?"
        assert page.get("/v1/models").json()["data"][0]["id"] == "cats?"
        assert page.post("/inspect/vocabulary", json={}).json()["counted_in"] == "cats\ufffd"
    assert main(["export", str(odd), str(tmp_path / "p.html"), "--text", "cat"]) == 0


def test_the_page_opens_with_unfinished_validation_text(run, tmp_path):
    held_out = tmp_path / "cats"
    shutil.copytree(run, held_out)
    tokenizer = tiedgpt.Tokenizer.from_pretrained(run)
    text = "dog. the cat sat on the mat and the dog ate the hat that the cat saw on the mat. the"
    with ShardWriter(held_out / "data", "val", vocab_size=len(tokenizer)) as writer:
        writer.write(tokenizer.encode_array(text))
    assert opening_text(run, tokenizer) is None
    opening = opening_text(held_out, tokenizer)
    assert text.startswith(f"dog. {opening} ") and opening[-1].isalpha() and len(opening) > 30
    assert opening_text(held_out, None) == tokenizer.encode(text)[:12]
    for hosts, expected in ((None, opening), (Hosts.of("0.0.0.0"), None)):
        with page_of(held_out, hosts=hosts) as page:
            assert page.get("/inspect/model").json()["opening"] == expected
    (held_out / "model/opening.json").write_text('{"text": "without a tokenizer no use"}')
    (held_out / "model/tokenizer.json").unlink()
    assert main(["export", str(held_out), str(tmp_path / "page.html")]) == 0
    ids = tokenizer.encode(text)[:12]
    assert data_of((tmp_path / "page.html").read_text())["state"] == {"ids": ids}


@pytest.mark.parametrize("is_run", [True, False])
def test_the_page_opens_with_the_text_that_training_stored(run, tmp_path, is_run):
    chosen = tmp_path / "cats"
    shutil.copytree(run, chosen)
    source = chosen if is_run else chosen / "model"
    (chosen / "model" / "opening.json").write_text('{"text": "the dog sat", "next": " on"}')
    for hosts in (None, Hosts.of("0.0.0.0")):  # it belongs to the model, so all are told
        with page_of(source, hosts=hosts) as page:
            assert page.get("/inspect/model").json()["opening"] == "the dog sat"
    assert main(["export", str(source), str(tmp_path / "page.html")]) == 0
    assert data_of((tmp_path / "page.html").read_text())["state"] == {"text": "the dog sat"}


def test_the_page_tells_what_a_run_learned_from(run, tmp_path):
    copied = tmp_path / "cats"
    shutil.copytree(run, copied)
    (copied / "run.toml").write_text(
        '[options]\ndata = ["/home/me/my.txt", "hf:roneneldan/TinyStories"]\n'
        "[train_text]\nutf8_bytes = 1500000\n"
    )
    with page_of(copied) as page:
        data = page.get("/inspect/model").json()["run"]["data"]
    assert data == "my.txt, hf:roneneldan/TinyStories: 1.5 MB of text"


def test_a_second_model_is_described_and_predicts_with_its_weights(run, tmp_path):
    from tiedgpt.tie import untie

    model = tiedgpt.GPT.from_pretrained(run)
    untie(model)
    model.head.weight.data.mul_(0.5)
    model.save_pretrained(tmp_path / "other")
    tiedgpt.Tokenizer.from_pretrained(run).save_pretrained(tmp_path / "other")
    tokenizer = tiedgpt.Tokenizer.from_pretrained(run)
    with page_of(run, beside=tmp_path / "other") as page:
        assert page.get("/inspect/model").json()["beside"] == "other"
        assert page.get("/beside/inspect/model").json()["tied"] is False
        for body in ({"text": TEXT}, {"ids": [1, 2, 3]}):
            found = page.post("/beside/inspect/positions", json=body | {"top": 3}).json()
            ours = inspect.positions(model, tokenizer, *body.values(), top=3)
            assert found == json.loads(ours.to_json())
        refused = page.post("/beside/inspect/positions", json={"ids": [10**6]})
        assert refused.status_code == 400 and "vocabulary" in refused.json()["error"]["message"]
    with pytest.raises(UserError), page_of(run, beside=tmp_path / "nothing"):
        pass
    with page_of(run) as page:
        assert page.get("/inspect/model").json()["beside"] is None
        assert page.post("/beside/inspect/positions", json={"text": "a"}).status_code == 404


@pytest.mark.parametrize("body", [{}, {"token": -1}, {"token": 1, "top": 101}, {"token": 1.5}])
def test_neighbours_of_an_unknown_token_are_refused(page, body):
    response = page.post("/inspect/neighbours", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def data_of(html):
    """Return the data of an exported file as a browser reads them."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(text)


def weights_of(html):
    """The metadata and the tensors of the model in an exported file."""
    parts = re.findall(r'<script type="text/plain" class="weights">(.*?)</script>', html)
    data = zlib.decompress(b"".join(map(base64.b64decode, parts)))
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"], safetensors.numpy.load(data)


def test_an_exported_page_holds_the_model_once_and_no_address(run, tmp_path, capfd):
    path = tmp_path / "page.html"
    command = ["export", str(run), str(path), "--text", TEXT, "--precision", "int8"]
    assert main(command) == 0
    assert "page.html" in capfd.readouterr().out
    html = path.read_text()
    found = data_of(html)
    model, tokenizer = tiedgpt.GPT.from_pretrained(run), tiedgpt.Tokenizer.from_pretrained(run)
    assert found["state"] == {"text": TEXT}
    assert found["/inspect/model null"]["parameters"] == model.config.parameter_count()
    said = json.dumps({"text": TEXT}, ensure_ascii=False, separators=(",", ":"))
    first_view = found[f'/inspect/positions {said[:-1]},"top":10}}']
    assert len(first_view["top_ids"][0]) == 10 and not math.isnan(first_view["loss"])
    assert str(run.parent) not in html  # who gets the file learns nothing of this machine
    metadata, tensors = weights_of(html)
    matrices = [name for name, tensor in tensors.items() if tensor.shape == model.wte.weight.shape]
    assert matrices == ["wte.weight"] and tensors["wte.weight"].dtype == np.int8
    assert len(json.loads(metadata["tokenizer"])["tokens"]) == len(tokenizer)
    counts = json.loads(metadata["counts"])
    assert sum(counts["count"]) > 0 and counts["counted_in"] == run.name


def test_an_exported_page_names_no_other_file(run):
    html = in_one_file({}, b"")
    modules = json.loads(re.findall(r'<script type="importmap">(.*?)</script>', html)[0])["imports"]
    texts = [unquote(url.partition(",")[2]) for url in modules.values()]
    (worker,) = re.findall(r'<script type="text/plain" id="worker">(.*?)</script>', html, re.S)
    assert "class TiedEmbedding" in worker and "page/model/network.js" not in modules
    for name in re.findall(r"""(?:from|import)\s*\(?\s*["']([\w./-]+)["']""", "\n".join(texts)):
        assert name in modules
    assert not re.search(r"^(import|export)\b", worker, re.MULTILINE)
    shell = html.replace(worker, "")
    assert not re.search(r"""(?:src|href)=["']?(?!data:)\w""", shell)
    assert "http" not in re.sub(r'data:(?:[^"\\]|\\.)*|http-equiv', "", shell)
    (policy,) = re.findall(r'http-equiv="content-security-policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy and "connect-src" not in policy


def test_a_page_opens_with_a_text_of_the_run(run, tmp_path):
    path = tmp_path / "page.html"
    assert main(["export", str(run), str(path)]) == 0
    assert data_of(path.read_text())["state"]["text"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_page_holds_the_requested_precision(run, precision):
    model, tokenizer = tiedgpt.GPT.from_pretrained(run), tiedgpt.Tokenizer.from_pretrained(run)
    html = export(model, tokenizer, "the cat", name="cats", precision=precision)
    assert data_of(html)["/inspect/model null"]["precision"] == precision
    dtype = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[precision]
    _, tensors = weights_of(html)
    counted = data_of(html)["/inspect/model null"]["ledger"]
    assert counted["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    (w,) = (row for row in counted["rows"] if row["names"] == ["wte.weight"])
    assert w["dtype"] == np.dtype(dtype).name
    assert tensors["h.0.mlp.c_fc.weight"].dtype == dtype
    assert tensors["h.0.mlp.c_fc.bias"].dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["page.html", "--text", "a", "--top", "3"], "has no option --top"),
        (["page.html", "--text", ""], "text is empty"),
        (["page.html", "--text", "cat " * 99], "to 48 tokens"),
        (["page.html", "--text", "a", "--ids", "3"], "exclude each other"),
        (["page.html", "--max-size", "0.01"], "serve shows the same page"),
        (["page.txt"], "end it in .html"),
    ],
)
def test_unexportable_models_are_refused_and_nothing_is_written(
    run, tmp_path, capfd, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), *arguments]) in (1, 2)
    assert said in capfd.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.page
def test_the_wheel_holds_the_page(tmp_path):
    import zipfile

    from hatchling.builders.wheel import WheelBuilder

    root = FOLDER.parents[3]
    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path))
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"tiedgpt/serve/page/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.*")} <= {
        *names
    }
