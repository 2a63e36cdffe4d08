"""The answers of a trained head, in Python and on the command line."""

import io
import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.heads.conftest import OPTIONS, enlarge
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.heads import (
    FeatureExtractor,
    MultipleChoice,
    SequenceClassifier,
    open_head,
    pad,
    predict,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

TEXT = "Ada went to Zürich, 東京 and home."
RECORDS = {
    SequenceClassifier: [{"text": TEXT}, {"text": "Ada"}],
    MultipleChoice: [{"text": "Ada", "choices": ["went", "home", "x"]},
                     {"text": "Ada ", "choices": ["went", "home"]}],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT * 3, "where? who"], 300)


@pytest.fixture
def head(tokenizer):
    """Return a function that makes a head with large weights."""

    def make_head(head_class):
        torch.manual_seed(4)
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = GPTConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)
        return enlarge(head_class(GPT(config), **OPTIONS[head_class]))

    return make_head


def test_a_label_has_the_softmax_of_its_logit(head, tokenizer):
    model = head(SequenceClassifier)
    answers = list(predict(model, tokenizer, RECORDS[SequenceClassifier]))
    ids, lengths = pad([tokenizer.encode(record["text"]) for record in RECORDS[SequenceClassifier]])
    with torch.no_grad():
        expected = model(ids, lengths).softmax(-1)
    for answer, row in zip(answers, expected, strict=True):
        assert list(answer["probabilities"]) == list(model.labels)
        assert list(answer["probabilities"].values()) == pytest.approx(row.tolist())
        assert answer["predicted"] == model.labels[int(row.argmax())]
        assert answer["probability"] == max(answer["probabilities"].values())


def test_choices_are_scored_together_and_one_is_chosen(head, tokenizer):
    model = head(MultipleChoice)
    three, two = predict(model, tokenizer, RECORDS[MultipleChoice])
    assert len(three["probabilities"]) == 3 and sum(three["probabilities"]) == pytest.approx(1)
    assert three["predicted"] == three["probabilities"].index(max(three["probabilities"]))
    assert three["probability"] == max(three["probabilities"])
    ids, lengths = pad([tokenizer.encode(f"Ada {word}") for word in ("went", "home")])
    with torch.no_grad():
        expected = model(ids[None], lengths[None])[0].softmax(-1).tolist()
    assert two["probabilities"] == pytest.approx(expected)


@pytest.mark.parametrize("head_class", RECORDS)
def test_the_batch_size_changes_no_answer(head_class, head, tokenizer):
    model, records = head(head_class), RECORDS[head_class] * 3
    one, many = (list(predict(model, tokenizer, records, batch_size=n)) for n in (1, 4))
    assert len(one) == 6
    for a, b in zip(one, many, strict=True):
        assert a["predicted"] == b["predicted"]
        assert list(a["probabilities"]) == pytest.approx(list(b["probabilities"]), abs=1e-5)


@pytest.mark.parametrize(
    ("head_class", "n", "longer"), [(SequenceClassifier, 64, "{}y"), (MultipleChoice, 62, "y{}")]
)
def test_a_text_longer_than_the_context_is_cut_at_its_end_or_beginning(
    head_class, n, longer, head, tokenizer
):
    texts = "x" * n, longer.format("x" * n)  # " p" and " q" are two tokens each
    records = [{"text": text, "choices": ["p", "q"]} for text in texts]
    fits, is_cut = predict(head(head_class), tokenizer, records)
    assert "cut" not in fits and is_cut == fits | {"cut": True}


def test_wrong_records_and_heads_are_refused(head, tokenizer, tmp_path):
    records = [{"text": "a"}, {"text": " "}]
    with pytest.raises(UserError, match=r"record 2: the field 'text' is empty; one is \{"):
        list(predict(head(SequenceClassifier), tokenizer, records))
    with pytest.raises(UserError, match="FeatureExtractor"):
        list(predict(head(FeatureExtractor), tokenizer, records))
    head(SequenceClassifier).gpt.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="train --task"):
        open_head(tmp_path)


@pytest.fixture
def saved(head, tokenizer, tmp_path):
    """Return a function that saves a head with its tokenizer and returns the path."""

    def save(head_class):
        head(head_class).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.mark.parametrize(
    ("head_class", "arguments", "expected"),
    [
        (SequenceClassifier, [TEXT], TEXT),
        (MultipleChoice, ["Ada", "--choices", "went", "home"], "0."),
    ],
)
def test_classify_answers_a_text(head_class, arguments, expected, saved, capsys):
    model = saved(head_class)
    assert type(open_head(model)) is head_class
    assert main(["classify", model, *arguments]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("name", ["in.txt", "-", "in.jsonl", "in.csv", "in.tsv"])
def test_classify_ends_lines_at_newlines_only_and_reads_no_byte_order_mark(
    saved, tmp_path, capsys, monkeypatch, name
):
    texts = ["Ada\u2028went\u2029home", "Ada\x85went", "Ada\x0b\x0c\x1c\x1d\x1ewent", "home\rhome"]
    lines = [*texts, ""] if name in ("in.txt", "-") else ["text", *(f'"{text}"' for text in texts)]
    if name == "in.jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    data = "\r\n".join(lines).encode("utf-8-sig")
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    source = name if name == "-" else str(tmp_path / name)
    assert main(["classify", saved(SequenceClassifier), source, "--format", "json"]) == 0
    answers = [json.loads(line)["text"] for line in capsys.readouterr().out.split("\n")[:-1]]
    assert answers == texts


@pytest.mark.parametrize(
    ("head_class", "record"),
    [
        (SequenceClassifier, {"text": "Ada", "label": "good", "id": 7, "score": None}),
        (MultipleChoice, {"text": "Ada", "choices": ["a", "b"], "answer": 1, "choice": "b"}),
    ],
)
def test_classify_keeps_every_field_of_a_line(head_class, record, saved, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(record))
    assert main(["classify", saved(head_class), str(path), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed.pop(name) for name in record} == record
    assert set(printed) == {"predicted", "probability", "probabilities"}
    path.write_text(json.dumps(record | printed))  # the answer's own fields are not overwritten
    assert main(["classify", saved(head_class), str(path), "--format", "json"]) == 1
    assert "'predicted'" in capsys.readouterr().err


PROBLEMS = [
    (problem, n_labels)
    for problem in (None, "regression", "single_label_classification", "multi_label_classification")
    for n_labels in (1, 2, 3)
    if (problem, n_labels) != ("single_label_classification", 1)  # transformers refuses it
]


@pytest.mark.parametrize(("problem", "n_labels"), PROBLEMS)
@pytest.mark.parametrize("family", ["GPT2", "OpenAIGPT"])
def test_answers_are_those_of_transformers_pipeline(
    family, problem, n_labels, tokenizer, tmp_path, capsys
):
    torch.manual_seed(3)
    names = {number: f"name {number}" for number in range(n_labels)}
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), **sizes, id2label=names, problem_type=problem, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    peer = enlarge(getattr(transformers, f"{family}ForSequenceClassification")(config))
    with torch.no_grad():
        peer.score.weight.mul_(9)
    peer.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipeline = transformers.TextClassificationPipeline(
        model=peer, tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path)
    )
    texts = [record["text"] for record in RECORDS[SequenceClassifier]]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    command = ["classify", str(tmp_path), str(tmp_path / "in.txt")]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert main([*command, "--format", "json"]) == 0
    for text, line, words in zip(texts, capsys.readouterr().out.splitlines(), printed, strict=True):
        answer, (best,) = json.loads(line), pipeline(text)
        scores = {score["label"]: score["score"] for score in pipeline(text, top_k=None)}
        if problem == "regression":
            predicted = answer["predicted"]
            predicted = predicted if n_labels > 1 else {"name 0": predicted}
            assert predicted == pytest.approx(scores, rel=1e-4)
            first = words.removeprefix("name 0 ").split()[0].rstrip(",")
            assert float(first) == pytest.approx(scores["name 0"], rel=2e-3)
            assert "probability" not in answer
        else:
            assert answer["probabilities"] == pytest.approx(scores, rel=1e-4)
            assert answer["predicted"] == best["label"]
            assert answer["probability"] == pytest.approx(best["score"], rel=1e-4)
            assert f"{best['label']}  {best['score']:.2f}" in words
    again = SequenceClassifier.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "again")
    back = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert (back.problem_type, back.num_labels) == (problem, n_labels)


RECORD_LINES = '{"text": "Ada"}\n{"text": "home"}\n'
REFUSED_INPUTS = {
    "a missing file": (["tset.jsonl"], 1, "did you mean test.jsonl?"),
    "a missing compressed file": (["x.csv.gz"], 1, "there is no file x.csv.gz"),
    "a missing file in a folder": (["data/none"], 1, "there is no file data/none"),
    "a misspelt file in a folder": (["data/tets.txt"], 1, "did you mean data/test.txt?"),
    "a folder": (["data"], 1, "name a file in it"),
    "records in .json": (["test.json"], 1, "mv test.json test.jsonl"),
    "choices for labels": (["Ada", "--choices", "a", "b"], 1, "--choices is for models of"),
}


@pytest.mark.parametrize("case", REFUSED_INPUTS)
def test_classify_refuses_input_that_it_would_misread(case, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.txt").write_text("Ada")
    for name in ("test.jsonl", "test.json"):
        (tmp_path / name).write_text(RECORD_LINES)
    arguments, code, remedy = REFUSED_INPUTS[case]
    assert main(["classify", saved(SequenceClassifier), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and remedy in " ".join(err.split())


@pytest.mark.parametrize("text", ["he or/and she", "Ada. home", "e.g. https", "a\nb.txt"])
def test_classify_labels_texts_that_are_no_names(text, saved, capsys):
    assert main(["classify", saved(SequenceClassifier), text, "--format", "json"]) == 0
    printed = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert printed == text.splitlines()


def test_classify_notes_records_that_are_read_as_text(saved, capsys, monkeypatch):
    data = SimpleNamespace(buffer=io.BytesIO(RECORD_LINES.encode()))
    monkeypatch.setattr("sys.stdin", data)
    assert main(["classify", saved(SequenceClassifier), "-"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "texts in lines of JSON" in err and "save them in a .jsonl file" in err


@pytest.mark.parametrize(
    "arguments", [["a text"], ["in.txt"], ["in.txt", "model"], ["a b", "model"]]
)
def test_classify_names_the_order_of_its_arguments(arguments, saved, tmp_path, capsys, monkeypatch):
    saved(SequenceClassifier)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    assert main(["classify", *arguments]) == 2
    assert "the model comes first: tiedgpt classify" in " ".join(capsys.readouterr().err.split())


def test_classify_reads_lines_of_text_and_names_missing_choices(saved, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Ada went\n\nhome\n")
    assert main(["classify", saved(SequenceClassifier), str(tmp_path / "in.txt")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["classify", saved(MultipleChoice), "Ada"]) == 2
    assert "--choices" in capsys.readouterr().err
