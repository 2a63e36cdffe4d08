"""A trained head is asked for labels, spans, choices and answers; training reads texts alike."""

import json
from itertools import pairwise

import pytest
import torch

from tests.heads.conftest import OPTIONS, large
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.heads import (
    FeatureExtractor,
    MultipleChoice,
    SequenceClassifier,
    SpanFinder,
    TokenClassifier,
    best_spans,
    open_head,
    pad,
    predict,
)
from tiedgpt.heads.inputs import find_characters, find_token_spans, token_starts
from tiedgpt.train.objectives import LABELLED

TEXT = "Ada went to Zürich, 東京 and home."
RECORDS = {
    SequenceClassifier: [{"text": TEXT}, {"text": "Ada"}],
    TokenClassifier: [{"text": TEXT}, {"tokens": ["Ada", "went", "home"]}],
    MultipleChoice: [{"text": "Ada", "choices": ["went", "home", "x"]},
                     {"text": "Ada ", "choices": ["went", "home"]}],
    SpanFinder: [{"question": "where?", "context": TEXT}, {"question": "who", "context": "Ada"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT * 3, "where? who"], 300)


@pytest.fixture
def head(tokenizer):
    """Make a head whose weights are large."""

    def made(kind):
        torch.manual_seed(4)
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = GPTConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)
        return large(kind(GPT(config), **OPTIONS[kind]))

    return made


def test_a_label_has_the_probability_of_its_logit(head, tokenizer):
    model = head(SequenceClassifier)
    found = list(predict(model, tokenizer, RECORDS[SequenceClassifier]))
    ids, lengths = pad([tokenizer.encode(record["text"]) for record in RECORDS[SequenceClassifier]])
    with torch.no_grad():
        wanted = model(ids, lengths).softmax(-1)
    for answer, row in zip(found, wanted, strict=True):
        assert list(answer["probabilities"]) == list(model.labels)
        assert list(answer["probabilities"].values()) == pytest.approx(row.tolist())
        assert answer["label"] == model.labels[int(row.argmax())]
        assert answer["probability"] == max(answer["probabilities"].values())


def test_spans_are_the_runs_of_one_label_in_characters(head, tokenizer):
    model = head(TokenClassifier)
    spans, words = predict(model, tokenizer, RECORDS[TokenClassifier])
    ids = tokenizer.encode(TEXT)
    with torch.no_grad():
        labels = [model.labels[n] for n in model(torch.tensor([ids]))[0].argmax(-1)]
    covered = ["O"] * len(TEXT)
    for span in spans["spans"]:
        assert TEXT[span["from"] : span["to"]] == span["text"] == span["text"].strip() != ""
        assert 1 / 3 <= span["probability"] <= 1
        covered[span["from"] : span["to"]] = [span["label"]] * (span["to"] - span["from"])
    assert spans["spans"] and all(a["to"] <= b["from"] for a, b in pairwise(spans["spans"]))
    for at, (start, end) in enumerate(pairwise([*token_starts(ids, tokenizer, TEXT), None])):
        piece = TEXT.encode()[start:end]
        if piece.isascii() and (blank := piece.decode()).strip():
            place = len(TEXT.encode()[:start].decode()) + len(blank) - len(blank.lstrip())
            assert covered[place] == labels[at]
    assert len(words["labels"]) == len(words["probabilities"]) == 3
    assert set(words["labels"]) <= {*model.labels}


def test_characters_are_those_whose_tokens_they_are(tokenizer):
    ids = tokenizer.encode(TEXT)
    starts = token_starts(ids, tokenizer, TEXT)
    for word in ("Ada", "Zürich", "東京", "home."):
        start = TEXT.index(word)
        ((first, last),) = find_token_spans(ids, tokenizer, TEXT, [(start, start + len(word))])
        begin, end = find_characters(starts, TEXT, first, last)
        assert begin <= start and start + len(word) <= end and word in TEXT[begin:end]


def test_choices_are_scored_together_and_one_is_chosen(head, tokenizer):
    model = head(MultipleChoice)
    three, two = predict(model, tokenizer, RECORDS[MultipleChoice])
    assert len(three["probabilities"]) == 3 and sum(three["probabilities"]) == pytest.approx(1)
    assert three["choice"] in range(3)
    ids, lengths = pad([tokenizer.encode(f"Ada {word}") for word in ("went", "home")])
    with torch.no_grad():
        wanted = model(ids[None], lengths[None])[0].softmax(-1).tolist()
    assert two["probabilities"] == pytest.approx(wanted)


def test_an_answer_is_a_part_of_the_context_alone(head, tokenizer):
    model = head(SpanFinder)
    for record, answer in zip(
        RECORDS[SpanFinder], predict(model, tokenizer, RECORDS[SpanFinder]), strict=True
    ):
        assert record["context"][answer["from"] : answer["to"]] == answer["text"] != ""
        assert 0 < answer["probability"] <= 1
    ids = tokenizer.encode(f"where?\n{TEXT}")
    asked = len(tokenizer.encode("where?\n"))
    with torch.no_grad():
        logits = model(torch.tensor([ids]))
    logits[0, :asked] = -torch.inf
    first, last = best_spans(logits)[0].tolist()
    found = next(predict(model, tokenizer, RECORDS[SpanFinder]))
    assert found["text"] == tokenizer.decode(ids[first : last + 1]).strip()


@pytest.mark.parametrize("kind", RECORDS)
def test_the_size_of_a_batch_changes_nothing(kind, head, tokenizer):
    model, records = head(kind), RECORDS[kind] * 3
    one, many = (list(predict(model, tokenizer, records, batch_size=n)) for n in (1, 4))
    assert str(one)[:40] == str(many)[:40] and len(one) == 6
    for a, b in zip(one, many, strict=True):
        assert a.get("text") == b.get("text") and a.get("label") == b.get("label")


@pytest.mark.parametrize("kind", RECORDS)
def test_a_text_that_is_longer_than_the_context_is_cut_and_says_so(kind, head, tokenizer):
    long = {name: value * 400 if name in ("text", "context") else value
            for name, value in RECORDS[kind][0].items()}  # fmt: skip
    (answer,) = predict(head(kind), tokenizer, [long])
    assert answer["cut"] is True
    assert "cut" not in next(predict(head(kind), tokenizer, RECORDS[kind]))


def test_what_is_no_record_and_no_head_is_told(head, tokenizer, tmp_path):
    records = [{"text": "a"}, {"text": " "}]
    with pytest.raises(UserError, match=r"record 2: the field 'text' is empty; one is \{"):
        list(predict(head(SequenceClassifier), tokenizer, records))
    with pytest.raises(UserError, match="FeatureExtractor has nothing to say"):
        list(predict(head(FeatureExtractor), tokenizer, records))
    with pytest.raises(UserError, match="leaves no room"):
        list(predict(head(SpanFinder), tokenizer, [{"question": "who " * 99, "context": "I"}]))
    head(SequenceClassifier).gpt.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no head that labels.*train --task"):
        open_head(tmp_path)


@pytest.mark.parametrize("kind", RECORDS)
def test_a_head_is_opened_by_what_the_file_holds(kind, head, tmp_path):
    head(kind).save_pretrained(tmp_path)
    assert type(open_head(tmp_path)) is kind


def test_training_reads_a_text_as_predict_does(head, tokenizer):
    """What was learned is asked for in the form in which it was learned."""
    model = head(SpanFinder)
    objective = LABELLED["answer"](model.gpt.config, tokenizer)
    example = objective.parse({"question": "who", "context": TEXT, "answer": "Ada"})
    row = objective.encode(example, 64)
    assert row.rows[0] == tokenizer.encode(f"who\n{TEXT}")
    words = LABELLED["tag"](model.gpt.config, tokenizer, labels=("O", "P"))
    row = words.encode(words.parse({"tokens": ["Ada", "Zürich"], "labels": ["O", "P"]}), 64)
    assert row.rows[0] == tokenizer.encode("Ada") + tokenizer.encode(" Zürich")
    assert [n for n in row.answer if n >= 0] == [0, 1] and row.answer[-1] == 1


@pytest.fixture
def saved(head, tokenizer, tmp_path):
    def made(kind):
        head(kind).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return made


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        (SequenceClassifier, [TEXT], TEXT),
        (TokenClassifier, [TEXT], "Ada"),
        (MultipleChoice, ["Ada", "--choices", "went", "home"], "0."),
        (SpanFinder, [TEXT, "--question", "who?"], "0."),
    ],
)
def test_the_command_answers_a_text(kind, arguments, says, saved, capsys):
    assert main(["classify", saved(kind), *arguments]) == 0
    assert says in capsys.readouterr().out
    assert main(["classify", saved(kind), *arguments, "--format", "json"]) == 0
    assert "probabilit" in capsys.readouterr().out


@pytest.mark.parametrize("kind", RECORDS)
def test_the_command_answers_a_file_line_by_line(kind, saved, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[kind]))
    assert main(["classify", saved(kind), str(path), "--format", "json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2
    for record, answer in zip(RECORDS[kind], found, strict=True):
        assert {**answer, **record} == answer and len(answer) > len(record)
    assert main(["classify", saved(kind), str(path)]) == 0


def test_the_command_reads_lines_of_text_and_says_what_it_lacks(saved, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Ada went\n\nhome\n")
    assert main(["classify", saved(SequenceClassifier), str(tmp_path / "in.txt")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["classify", saved(MultipleChoice), "Ada"]) == 2
    assert "--choices" in capsys.readouterr().err
    assert main(["classify", saved(SpanFinder), "Ada"]) == 2
    assert "--question" in capsys.readouterr().err
