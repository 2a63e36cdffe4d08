"""Texts that are hardly texts, from the command to the published weights."""

import json
import math
import random
import re
import tomllib
from pathlib import Path

import pytest

from tests.train.conftest import CHARACTERS, reopen_trial
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import documents, encode_corpus, plan_split
from tiedgpt.errors import UserError
from tiedgpt.train import TrainOptions, train
from tiedgpt.train.events import Encoded
from tiedgpt.train.tasks.texts import TextRows

OF_CHARACTERS = ("--tokenizer", "char")


@pytest.mark.parametrize(
    ("text", "tokens_per_byte", "options"),
    [
        ("a" * 30, 3 / 2, OF_CHARACTERS),  # of the last three two are predicted, and the end
        ("one short line of thirty bytes", 3 / 2, OF_CHARACTERS),
        ("é" * 15, 1, OF_CHARACTERS),  # only the end, which has no bytes
        ("\n".join("xy" * 40), 15 / 14, OF_CHARACTERS),
        ("\n".join("xy" * 40), None, ()),
    ],
)
def test_tiny_texts_are_trained_on(folder, text, tokens_per_byte, options):
    Path("text.txt").write_text(text)
    command = ["train", "text.txt", "--out", "run", "--minutes", "0.005", "--dtype", "fp32"]
    assert main([*command, *options]) == 0
    *lines, last = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    scored = [line["val_loss"] for line in [*lines, last] if "val_loss" in line]
    assert last["final"] and last["val_loss"] <= min(scored) + 1e-6
    if tokens_per_byte:
        bits = tokens_per_byte * last["val_loss"] / math.log(2)
        assert last["val_bits_per_byte"] == pytest.approx(bits)
    assert tomllib.loads(Path("run/run.toml").read_text())["training"]["reason"]


@pytest.mark.parametrize("n_bytes", [30_000, 300_000])
def test_a_small_text_publishes_the_weights_with_the_best_validation(n_bytes, folder, capfd):
    words = random.Random(1).choices(
        "a cat and two old dogs sat on my mat again".split(), k=n_bytes
    )
    Path("text.txt").write_text(" ".join(words)[:n_bytes])
    rising = ("--lr", "0.4", "--warmup", "1", "--eval-every", "2", "--sample-prompt", "two old")
    quick = "--size nano --steps 12 --context 32 --dtype fp32 --score all".split()
    assert main(["train", "text.txt", "--out", "run", *quick, *rising]) == 0
    *lines, last = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    scored = [line["val_loss"] for line in lines if "val_loss" in line] + [last["part_val_loss"]]
    assert len(scored) >= 4 and min(scored) < scored[-1]
    run = reopen_trial(Path("run"))
    part, held = (
        run.score(run.model(), run.plan.micro_batch, n).nats for n in (run.plan.eval_batches, None)
    )
    assert part == pytest.approx(min(scored), abs=1e-5)
    assert held == pytest.approx(last["val_loss"], abs=1e-5)
    assert "| two old" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("x1 y\n", ("", "x1 y")),
        ("a cat. two old dogs sat\n", ("", "two old dogs")),
        ("天地玄黄\n", ("", "天地玄黄")),
        ("x\ny\n", ("", "x")),
        ("\nKING JOHN.\nNow speak.\n\nARTHUR.\nMadam!\n", ("ARTHUR.", "KING JOHN.")),
        ("\ndef close(self):\n    pass\n\n# Files\n\n", ("# Files", "def close(self):")),
    ],
)
def test_prompts_of_samples_are_held_out_lines_or_words(tmp_path, text, prompts):
    (tmp_path / "text.txt").write_text(text * 40)
    tokenizer = Tokenizer.characters([text])
    encode_corpus(plan_split(documents([str(tmp_path / "text.txt")])), tokenizer, tmp_path / "data")
    data = TextRows(tmp_path / "data", tokenizer, is_fresh=False).at(16)
    first, second = sorted(data.find_prompts())
    assert first == prompts[0] and second.startswith(prompts[1]) and len(second) <= 24
    assert tokenizer.encode(second)  # all of its characters are in the vocabulary


def test_a_validation_text_of_one_token_is_refused(trial):
    with pytest.raises(UserError, match="validation text has 1 token,"):
        rows = TextRows(trial().run.data, CHARACTERS, is_fresh=False)
        rows.validation = ["one token"]
        rows.at(16)


@pytest.mark.parametrize("more", ["--context 3000000", "--context 9999 --memory 1MB"])
def test_a_text_shorter_than_the_context_is_refused_before_memory_is_planned(more, folder, capfd):
    Path("text.txt").write_text("a cat sat on a mat. " * 20)
    assert main(["train", "text.txt", "--size", "nano", "--steps", "1", *more.split()]) == 1
    assert "for a context of" in capfd.readouterr().err


def test_a_training_that_is_left_while_text_is_encoded_leaves_nothing(folder):
    Path("text.txt").write_text("a cat sat on a mat. " * 20)
    events = train(TrainOptions(data=("text.txt",), size="nano", steps=1, context=16), "run")
    next(event for event in events if isinstance(event, Encoded))
    events.close()
    assert not Path("run").exists()


def test_one_of_a_thing_is_no_plural(folder, capfd):
    Path("text.txt").write_text("a cat sat on a mat. " * 60)
    Path("val.txt").write_text("ca")
    Path("labels.jsonl").write_text("".join('{"text": "a", "label": "x"}\n' for _ in range(9)))
    quick = "--size nano --steps 1 --context 16 --dtype fp32 --batch-size 1".split()
    commands = (
        ["train", "text.txt", "--val", "val.txt", "--tokenizer", "char", "--out", "run", *quick],
        ["train", "labels.jsonl", "--task", "classify", "--start", "run", *quick[2:], "--out", "c"],
        ["train", "text.txt", "--val", "val.txt", *quick, "--dry-run", "--memory", "900MB"],
        ["train", "text.txt", *quick, "--memory", "900MB", "--verbose", "--out", "m"],
        ["plot", "run", "--samples"],
        ["convert", "run"],
    )
    texts = []
    for command in commands:
        main(command)
        texts += capfd.readouterr()
    texts += [card.read_text() for card in folder.glob("*/model/README.md")]
    plural = re.compile(r"(?<![\d.,])1 (?!x )[a-z]+s\b(?! ?\()")
    wrong = {match[0] for text in texts for match in plural.finditer(text)}
    assert wrong <= {"1 loss"}, wrong
