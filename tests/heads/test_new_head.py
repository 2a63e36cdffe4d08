"""A head that the table does not know yet: a class and its line are enough."""

import json

import pytest
import torch
from torch import nn

from tests.heads.conftest import enlarge
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.heads import AnsweringHead, open_head, predict, predictions
from tiedgpt.heads.head import take_tensors
from tiedgpt.heads.inputs import read_field

TEXTS = ["Ada went home", "a cat", "where? out"]


class Brightness(AnsweringHead):
    """Whether the first token's state is bright, from three levels."""

    architecture = "ForBrightness"
    head_tensors = ("classifier.weight",)

    def __init__(self, gpt):
        super().__init__(gpt)
        self.classifier = nn.Linear(gpt.config.n_embd, 3, bias=False)

    def forward(self, ids, lengths=None):
        return self.classifier(self.gpt.body(ids)[:, 0])

    def losses(self, *batch):
        ids, lengths, levels = take_tensors(self, batch, "ids, lengths, levels")
        return (self.criterion(self(ids, lengths), levels),)

    def answer(self, logits):
        return {"predicted": int(logits.argmax()), "probabilities": logits.softmax(-1).tolist()}

    def describe(self, record, answer):
        return f"level {answer['predicted']}: {record['text']}"

    def expected_fields(self):
        return {"level": "0 to 2"}

    def read_expected(self, record):
        return "level", (read_field(record, "level"),)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A saved head with its tokenizer, by its path."""
    monkeypatch.setattr(predictions, "HEADS", (*predictions.HEADS, Brightness))
    torch.manual_seed(2)
    tokenizer = Tokenizer.train(TEXTS * 3, 280)
    sizes = {"n_positions": 23, "n_embd": 21, "n_layer": 2, "n_head": 3}
    config = GPTConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id)
    head = enlarge(Brightness(GPT(config)))
    head.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        levels = [int(head(torch.tensor([tokenizer.encode(x)])).argmax()) for x in TEXTS]
    return str(tmp_path / "model"), tokenizer, levels


def test_a_new_head_is_opened_and_predicts(saved, tmp_path):
    path, tokenizer, levels = saved
    head = open_head(path)
    assert type(head) is Brightness
    answers = predict(head, tokenizer, [{"text": text} for text in TEXTS])
    assert [answer["predicted"] for answer in answers] == levels
    card = (tmp_path / "model/README.md").read_text()
    assert f"{__name__}.Brightness.from_pretrained" in card


def test_classify_and_eval_go_by_what_a_new_head_declares(saved, tmp_path, capsys):
    path, _, levels = saved
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    assert main(["classify", path, str(tmp_path / "in.txt")]) == 0
    expected = [f"level {level}: {text}" for level, text in zip(levels, TEXTS, strict=True)]
    assert capsys.readouterr().out.splitlines() == expected
    lines, wrong = tmp_path / "lines.jsonl", [(levels[0] + 1) % 3, *levels[1:]]
    records = [{"text": t, "level": n, "id": 7} for t, n in zip(TEXTS, wrong, strict=True)]
    lines.write_text("\n".join(map(json.dumps, records)))
    assert main(["eval", path, str(lines), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["accuracy"] == pytest.approx(2 / 3)
    assert "id (3 lines)" in err
    lines.write_text('{"text": "a"}')
    assert main(["eval", path, str(lines)]) == 3
    assert '{"text": .., "level": 0 to 2}' in " ".join(capsys.readouterr().err.split())
