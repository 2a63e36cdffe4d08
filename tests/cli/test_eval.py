"""`tiedgpt eval`."""

import gzip
import io
import json
import shutil
import sys
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models import TEXT
from tiedgpt import GPT
from tiedgpt.cli.main import main
from tiedgpt.evaluate.texts import score_text
from tiedgpt.infer import Engine


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_text_is_scored(directory, text, capsys):
    assert main(["eval", str(directory), str(text), "--stride", "10"]) == 0
    shown = capsys.readouterr().out
    with Engine(directory) as engine:
        expected = score_text(engine, TEXT, stride=10)
    assert f"perplexity     {expected.perplexity:.4f}" in shown
    assert "context 48, stride 10, the text's first token is not scored" in shown
    assert main(["eval", str(directory), str(text), "--stride", "10", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for name, value in expected.to_json().items():
        assert told[name] == (pytest.approx(value) if isinstance(value, float) else value)


def test_a_score_on_training_data_has_a_note(directory, text, tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other.txt"
    shutil.copytree(directory, run / "model")
    (run / "run.toml").write_text(f'[options]\ndata = ["{text}"]\n')
    other.write_text(TEXT)
    for data, noted in ((text, True), (other, False)):
        assert main(["eval", str(run), str(data)]) == 0
        assert ("was trained on" in capsys.readouterr().err) == noted


@pytest.mark.parametrize("name", ["out.gguf", "out.onnx", "directory/model.safetensors"])
def test_a_model_may_be_a_file(directory, text, tmp_path, name, capsys):
    shutil.copytree(directory, tmp_path / "directory")
    path, options = tmp_path / name, ["--tokenizer", str(directory)]
    if not path.exists():
        assert main(["convert", str(directory), str(path)]) == 0
    capsys.readouterr()
    scores = []
    for source in (directory, path):
        assert main(["eval", str(source), str(text), *options, "--format", "json"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["nats"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def test_a_run_that_is_a_file_is_refused(text, capsys):
    assert main(["train", str(text), "--out", str(text), "--steps", "1"]) == 1
    assert str(text) in capsys.readouterr().err


def test_choices_are_scored(directory, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    line = {"context": "the dog", "choices": [" ate", " sat on"], "answer": 0}
    path.write_text("\n".join([json.dumps(line)] * 3))
    assert main(["eval", str(directory), str(path), "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "by chance    50.00%" in shown
    assert "2 examples" in shown


def test_scores_are_saved_to_a_new_file(directory, text, tmp_path, capsys):
    command = ["eval", str(directory), str(text), "--format", "json", "--save"]
    assert main([*command, str(tmp_path / "a.jsonl")]) == 0
    result = json.loads(capsys.readouterr().out)
    conditions, *scores = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert conditions["context"] == 48 and conditions["stride"] == 24
    assert sum(score["tokens"] for score in scores) == result["tokens"]
    nats = sum(score["nats"] for score in scores)
    assert nats / result["tokens"] == pytest.approx(result["nats"])
    written = (tmp_path / "a.jsonl").read_bytes()
    assert main([*command, str(tmp_path / "a.jsonl")]) == 1
    assert "name another file" in capsys.readouterr().err
    assert (tmp_path / "a.jsonl").read_bytes() == written


def test_unusable_texts_are_refused(directory, text, tmp_path, capsys):
    assert main(["eval", str(text), str(directory)]) == 2
    assert f"the model comes first: tiedgpt eval {directory} {text}" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text("")
    assert main(["eval", str(directory), str(tmp_path / "empty.txt")]) == 1
    assert "every document is empty" in capsys.readouterr().err
    assert main(["eval", str(directory), str(tmp_path / "none.txt")]) == 1
    assert main(["eval", str(directory), str(text), "--context", "100"]) == 1
    assert "--context must be from 2 to the model's 48, got 100" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"caf\0\xe9")
    assert main(["eval", str(directory), str(tmp_path / "binary")]) == 3


def test_eval_reads_text_like_train(directory, text, monkeypatch, capsys):
    def bits(*arguments):
        assert main(["eval", str(directory), *arguments, "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)["bits_per_byte"]

    expected = bits(str(text))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert bits("-") == pytest.approx(expected, rel=1e-6)
    assert bits(str(text.parent)) == pytest.approx(expected, rel=1e-6)
    monkeypatch.setattr("sys.stdin", None)
    assert main(["eval", str(directory), "-"]) == 1
    assert "standard input is closed" in capsys.readouterr().err
    text.write_bytes(("a café, " * 9).encode("cp1252"))
    assert main(["eval", str(directory), str(text)]) == 0
    assert "is read as cp1252" in capsys.readouterr().err


def test_options_and_models_that_do_not_fit_the_data_are_refused(directory, text, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"context": "", "choices": ["a", "b"], "answer": 0}\n')
    GPT.from_pretrained(directory).save_pretrained(tmp_path / "bare")
    capsys.readouterr()
    for model, data, options, said in (
        (directory, path, ["--stride", "3"], "--stride and --bos are for texts"),
        (directory, text, ["--limit", "3"], "--limit is for files of records"),
        (tmp_path / "bare", path, [], "needs a tokenizer"),
        (tmp_path / "bare", text, [], "needs a tokenizer"),
    ):
        assert main(["eval", str(model), str(data), *options]) == 1
        out, err = capsys.readouterr()
        assert said in err and not out


UNREAD = {
    "a text": {"text": "the dog ate"},
    "a multiple choice": {"context": "the dog", "choices": [" ate", " sat"], "answer": 0},
    "a cloze": {"question": "the dog", "completion": " ate"},
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("case", UNREAD)
def test_fields_of_records_that_are_not_read_are_noted(directory, tmp_path, capsys, case, name):
    records = [UNREAD[case] | {"label": "x", "id": n, "note": None} for n in range(3)]
    path = tmp_path / name
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    assert main(["eval", str(directory), str(path)]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "2 fields were not read: label (3 lines), id (3)" in err


def test_scores_of_tasks_are_shown_and_are_json(directory, monkeypatch, capsys):
    results = {"animals": {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.25, "n,all": 3.0}}
    harness = mock.Mock(simple_evaluate=lambda *_, **__: {"results": results})
    monkeypatch.setitem(sys.modules, "tiedgpt.evaluate.harness", harness)
    assert main(["eval", str(directory), "--tasks", "animals", "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == results
    assert main(["eval", str(directory), "--tasks", "animals"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["animals"], ["acc", "0.5000", "+-", "0.2500"], ["n", "3.0000"]]
