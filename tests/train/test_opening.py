"""The text that a run stores for the page: held-out, and well predicted."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.models import opinionated
from tiedgpt import Tokenizer
from tiedgpt.data import ShardWriter
from tiedgpt.files import OPENING
from tiedgpt.train.plan.options import TrainOptions
from tiedgpt.train.tasks.language import LanguageModelling
from tiedgpt.train.tasks.published_text import write_opening

SENTENCES = (
    "The old gardener watered the roses every morning before breakfast.",
    "My sister bought three red apples at the market near the station.",
    "The captain steered the little boat into the harbour at sunset.",
)
TEXT = " ".join(SENTENCES * 6)
MIXED = "My breakfast boat sunset old roses red apples at the market near the station."


@pytest.fixture(scope="module", params=["bpe", "char"])
def tokenizer(request):
    return Tokenizer.train([TEXT], 400) if request.param == "bpe" else Tokenizer.characters([TEXT])


@pytest.fixture(scope="module")
def model(tokenizer):
    """A model that has learned the sentences by heart."""
    model = opinionated(tokenizer, n_positions=64).train()
    ids = torch.tensor(tokenizer.encode(TEXT)).unfold(0, 33, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    return model.eval()


def write_held_out(run, tokenizer, text):
    (run / "data").mkdir(parents=True)
    (run / "model").mkdir()
    with ShardWriter(run / "data", "val", vocab_size=len(tokenizer)) as writer:
        writer.write(tokenizer.encode_array(text))


@pytest.mark.parametrize("held_out", [TEXT, f". {SENTENCES[0]} {MIXED}"])
def test_the_opening_breaks_off_before_a_predicted_token(tmp_path, model, tokenizer, held_out):
    write_held_out(tmp_path, tokenizer, held_out)
    task = LanguageModelling(TrainOptions())
    publisher = task.publisher(model.config, SimpleNamespace(tokenizer=tokenizer))
    publisher.publish(model, tmp_path / "model")
    opening = json.loads((tmp_path / "model" / OPENING).read_text())
    text, token = opening["text"], opening["next"]
    assert any(sentence.startswith(text + token) for sentence in SENTENCES) and len(text) >= 30
    with torch.inference_mode():
        (best,) = model(torch.tensor([tokenizer.encode(text)]))[:, -1].argmax(-1).tolist()
    assert [best] == tokenizer.encode(token)
    if tokenizer.kind == "bpe":
        assert token[0] == " " and token[1:].isalpha()


def test_without_a_suitable_text_an_older_opening_is_removed(tmp_path, model, tokenizer):
    write_held_out(tmp_path, tokenizer, "old roses")
    (tmp_path / "model" / OPENING).write_text('{"text": "The old"}')
    write_opening(model, tokenizer, tmp_path / "model")
    assert not (tmp_path / "model" / OPENING).exists()


@pytest.mark.parametrize("tokenizer", ["bpe"], indirect=True)
@pytest.mark.parametrize("prompt", ["My sister bought", f"{TEXT} My sister bought"])
def test_a_sample_continues_the_end_of_its_prompt(model, tokenizer, prompt):
    task = LanguageModelling(TrainOptions(sample_prompt=prompt))
    sample = task.sample(model, SimpleNamespace(tokenizer=tokenizer), 7, 0)
    assert sample.startswith(f"{prompt} three red apples")
