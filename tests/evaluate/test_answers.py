"""The score of a head on labelled lines, through `tiedgpt eval`."""

import gzip
import json
import math
import warnings

import pytest
import torch

from tests.heads.conftest import enlarge
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.evaluate.answers import AnswerScore, LabelsScore
from tiedgpt.heads import MultipleChoice, SequenceClassifier, predict

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForSequenceClassification

LABELS = ["bad", "so-so", "good"]
TEXTS = [f"{word} went {where}" for word in ("Ada", "a cat", "7 dogs") for where in ("home", "out")]
PROBLEMS = ["single_label_classification", "multi_label_classification", "regression"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([" ".join(TEXTS)] * 3, 280)


@pytest.fixture
def save(tokenizer, tmp_path):
    """Return a function that saves a head of a class, and returns it with its path."""

    def save_head(head_class, **options):
        torch.manual_seed(3)
        sizes = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = GPTConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)
        model = enlarge(head_class(GPT(config), **options))
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return model, str(tmp_path / "model")

    return save_head


def evaluate(model, records, tmp_path, capsys, *options):
    """Return the numbers and the lines that `tiedgpt eval` prints."""
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    assert main(["eval", model, str(path), "--format", "json", *options]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert main(["eval", model, str(path), *options]) == 0
    return numbers, capsys.readouterr().out


def test_the_accuracy_of_a_classifier_has_an_interval_and_a_table_by_label(
    save, tokenizer, tmp_path, capsys
):
    model, path = save(SequenceClassifier, labels=LABELS)
    answers = [a["predicted"] for a in predict(model, tokenizer, [{"text": t} for t in TEXTS])]
    labels = [next(label for label in LABELS if label != answers[0]), *answers[1:]]
    records = [{"text": t, "label": x} for t, x in zip(TEXTS, labels, strict=True)]
    numbers, printed = evaluate(path, records, tmp_path, capsys)
    assert numbers["accuracy"] == pytest.approx(5 / 6) and "83.33%" in printed
    # Wilson 1927 for 5 of 6, by hand: centre 0.7032, reach 0.2667
    assert numbers["accuracy_interval"] == pytest.approx([0.4365, 0.9699], abs=1e-4)
    assert "43.65% to 96.99%" in printed and f"always {max(labels, key=labels.count)}" in printed
    assert "recall" in printed and answers[0] in printed


def test_the_loss_of_every_problem_is_that_of_transformers(save, tokenizer, tmp_path, capsys):
    targets = {
        PROBLEMS[0]: [0, 2, 1, 1, 0, 2],
        PROBLEMS[1]: [[0], [1, 2], [], [0, 2], [1], [0, 1, 2]],
        PROBLEMS[2]: [[0.5, -1.0, 2.0], [1.0, 0.0, 0.0], [-3.0, 1.5, 0.25]] * 2,
    }
    for problem, rows in targets.items():
        _, path = save(SequenceClassifier, labels=LABELS, problem_type=problem)
        peer = AutoModelForSequenceClassification.from_pretrained(path).eval()
        losses, records = [], []
        for text, row in zip(TEXTS, rows, strict=True):
            label, targets_of_peer = row, torch.tensor([row])
            if problem == PROBLEMS[0]:
                label = LABELS[row]
            elif problem == PROBLEMS[1]:
                label = [LABELS[number] for number in row]
                targets_of_peer = torch.tensor([[float(number in row) for number in range(3)]])
            records.append({"text": text, "label": label})
            with torch.no_grad():
                losses.append(
                    float(peer(torch.tensor([tokenizer.encode(text)]), labels=targets_of_peer).loss)
                )
        numbers, _ = evaluate(path, records, tmp_path, capsys)
        assert numbers["loss"] == pytest.approx(sum(losses) / 6, rel=1e-4), problem
        assert ("accuracy" in numbers) == (problem != "regression")


def test_labels_are_counted_by_line_and_by_name():
    lines = [("ab", "ba"), ("ab", "a"), ("", "b"), ("b", ""), ("", "")]
    scores = [AnswerScore(n**2, (*x,), (*y,), n % 2 == 1) for n, (x, y) in enumerate(lines)]
    score = LabelsScore(scores)
    assert (score.n_right, score.commonest) == (2, ("a, b", 0.4))
    assert LabelsScore(scores[2:]).commonest == ("none", pytest.approx(2 / 3))
    assert score.to_json() == {
        "accuracy": 0.4, "accuracy_interval": pytest.approx((0.11762, 0.76928), abs=1e-5),
        "commonest": 0.4, "loss": 6, "examples": 5, "texts_cut": 2,
        "by_label": [
            {"label": "b", "examples": 3, "predicted": 2, "right": 1},
            {"label": "a", "examples": 2, "predicted": 2, "right": 2},
        ],
    }  # fmt: skip


def test_a_regression_has_its_errors(save, tokenizer, tmp_path, capsys):
    model, path = save(SequenceClassifier, labels=["stars"], problem_type="regression")
    (answer,) = predict(model, tokenizer, [{"text": TEXTS[0]}])
    records = [{"text": TEXTS[0], "label": answer["predicted"] + error} for error in (1, -2, 5)]
    numbers, printed = evaluate(path, records, tmp_path, capsys)
    assert numbers["loss"] == pytest.approx(10) and "10.0000" in printed
    assert numbers["absolute_error"] == pytest.approx(8 / 3) and "2.6667" in printed


def test_choices_are_counted_by_the_index_of_the_answer(save, tokenizer, tmp_path, capsys):
    model, path = save(MultipleChoice)
    records = [{"text": text, "choices": ["went", "home", "out"]} for text in TEXTS]
    answers = list(predict(model, tokenizer, records))
    for record, answer in zip(records, answers, strict=True):
        record["answer"] = answer["predicted"]
    records[2]["answer"] = (records[2]["answer"] + 1) % 3
    numbers, printed = evaluate(path, records, tmp_path, capsys)
    assert numbers["accuracy"] == pytest.approx(5 / 6) and "83.33%" in printed
    losses = [
        -math.log(a["probabilities"][r["answer"]]) for r, a in zip(records, answers, strict=True)
    ]
    assert numbers["loss"] == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert sum(row["examples"] for row in numbers["by_label"]) == 6


def test_numbers_name_the_labels_that_transformers_numbers(save, tmp_path, capsys):
    _, path = save(SequenceClassifier, labels=["LABEL_0", "LABEL_1", "LABEL_2"])
    records = [{"text": t, "label": x} for t, x in zip(TEXTS, [2, 1, 1, 0, 0, 0], strict=True)]
    numbers, _ = evaluate(path, records, tmp_path, capsys, "--limit", "4")
    counts = [(row["label"], row["examples"]) for row in numbers["by_label"]]
    assert counts == [("LABEL_1", 2), ("LABEL_0", 1), ("LABEL_2", 1)]


@pytest.mark.parametrize(
    ("options", "record", "says"),
    [
        ({"labels": LABELS}, {"text": "a", "label": "great"}, "'great', it has bad, so-so, good"),
        ({"labels": LABELS}, {"text": "a"}, "'label'; the record has 'text'"),
        ({"labels": LABELS}, {"text": "a", "label": None}, "no value in the field 'label'"),
        ({"labels": ["x"], "problem_type": "regression"}, {"text": "a"}, "no value in the field"),
        ({"labels": LABELS}, {"text": " ", "label": "bad"}, "jsonl:1: the field 'text' is"),
        ({"labels": ["x"]}, {"text": "a", "label": 1}, '"problem_type": "regression"'),
        ({"labels": ["x"], "problem_type": "regression"}, {"text": "a", "label": "y"}, "a number"),
        ({"labels": LABELS, "problem_type": "regression"}, {"text": "a", "label": 1}, "3 numbers"),
    ],
)
def test_lines_that_do_not_fit_the_head_are_refused(save, tmp_path, capsys, options, record, says):
    _, model = save(SequenceClassifier, **options)
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(record))
    assert main(["eval", model, str(path)]) in (1, 3)
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("option", [["--bos"], ["--precision", "int8"], ["--stride", "3"]])
def test_options_of_language_models_are_refused_for_a_head(save, tmp_path, capsys, option):
    _, model = save(SequenceClassifier, labels=LABELS)
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"text": "a", "label": "bad"}))
    assert main(["eval", model, str(path), *option]) == 1
    assert option[0] in capsys.readouterr().err
    assert main(["eval", model, str(path), "--threads", "1", "--save", str(tmp_path / "s")]) == 0
    conditions, score = map(json.loads, (tmp_path / "s").read_text().splitlines())
    assert conditions["model"] == model and score["expected"] == ["bad"]


def test_a_head_asked_for_a_text_names_the_lines_that_measure_it(save, tmp_path, capsys):
    _, model = save(SequenceClassifier, labels=LABELS)
    for name, text, code in (("text.txt", "Ada went home", 3), ("a.jsonl", "\n", 1)):
        (tmp_path / name).write_text(text)
        assert main(["eval", model, str(tmp_path / name)]) == code
        assert '{"text": .., "label": ..}' in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl.gz"])
def test_labelled_records_are_read_from_the_files_that_training_reads(save, tmp_path, capsys, name):
    _, model = save(SequenceClassifier, labels=LABELS)
    records = [{"text": text, "label": "bad", "id": 7} for text in TEXTS]
    expected, _ = evaluate(model, records, tmp_path, capsys)
    path, separator = tmp_path / name, "," if name == "a.csv" else "\t"
    if name == "a.jsonl.gz":
        lines = "".join(json.dumps(record) + "\n" for record in records)
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        rows = [["text", "label", "id"], *([r["text"], "bad", "7"] for r in records)]
        path.write_text("".join(separator.join(row) + "\n" for row in rows))
    assert main(["eval", model, str(path), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == expected
    assert "1 field was not read: id (6 lines)" in " ".join(err.split())
