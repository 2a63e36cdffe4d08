"""The defaults learn a few examples, and the result says so."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.train.conftest import write_lines
from tiedgpt import GPT, GPTConfig, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data import read_template
from tiedgpt.data.templates import encode_pieces
from tiedgpt.infer import Engine
from tiedgpt.train.store.metrics import read_metrics

COLOURS = "red green blue white black grey brown pink gold cyan".split()
THINGS = (
    "apple river stone cloud paper window garden letter silver bridge candle market winter summer "
    "kitten rabbit pocket button mirror ladder needle basket hammer carpet pencil bottle ticket "
    "orange pepper butter"
)
NAMES = "abcdefghijklmnopqrstuvwxyzABCD"
PAIRS = [(f"{name}?", f"it is {COLOURS[n * 7 % 10]}") for n, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with a tiny model that has learned nothing."""
    place = tmp_path_factory.mktemp("base")
    text = "".join(f"{asked}\n{reply}\nuser\nassistant\n" for asked, reply in PAIRS)
    tokenizer = Tokenizer.train([text * 9], 350)
    torch.manual_seed(0)
    shape = {"n_positions": 48, "n_embd": 128, "n_layer": 1, "n_head": 4}
    GPT(GPTConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def write_pairs(folder, pairs=PAIRS):
    roles = "user", "assistant"
    lines = [
        {"messages": [{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)]}
        for pair in pairs
    ]
    return write_lines(folder / "pairs.jsonl", lines)


def count_right(run, pairs):
    """Return how many replies of a run's model are those of the pairs."""
    template = read_template(run / "model")
    with Engine(run / "model") as engine:
        ends = template.end_ids(engine.tokenizer)

        def reply(asked):
            prompt = template.prompt([{"role": "user", "content": asked}])
            ids, _ = encode_pieces(prompt, engine.tokenizer)
            return engine.generate(ids, max_new_tokens=60, temperature=0, stop_ids=ends).text

        return sum(reply(asked) == right for asked, right in pairs)


def test_thirty_pairs_are_learned_by_the_defaults_and_called_memorized(folder, base, capfd):
    assert main(["tune", write_pairs(folder), "--from", base, "--out", "run"]) == 0
    out, err = (" ".join(text.split()) for text in capfd.readouterr())
    assert "this score measures memorization, not new prompts" in err and "memorized" in out
    assert re.search(r"few examples: 300 steps see each about \d+ times", err)
    assert "trained on" in out and "held out" not in out
    card = (folder / "run/model/README.md").read_text()
    assert "on all examples that it was trained on" in card and "held-out" not in card
    assert count_right(folder / "run", PAIRS) >= 25


@pytest.mark.slow
def test_thirty_pairs_are_learned_through_adapters_too(folder):
    """By a model that has learned some English: adapters on random weights learn little."""
    things = THINGS.split()
    pairs = [
        (
            f"What is the colour of the {thing}?",
            f"The {thing} is {COLOURS[n * 7 % 10]}, and so is the {things[(n * 11 + 3) % 30]}.",
        )
        for n, thing in enumerate(things)
    ]
    assert main(["train", "--size", "tiny", "--steps", "300", "--out", "base"]) == 0
    command = ["tune", write_pairs(folder, pairs), "--from", "base", "--lora", "8"]
    assert main([*command, "--out", "run"]) == 0
    assert count_right(folder / "run", pairs) >= 25


def test_pairs_that_are_not_learned_are_not_called_memorized(folder, base, capfd):
    pairs = write_pairs(folder)
    assert main(["tune", pairs, "--from", base, "--out", "run", "--steps", "3"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "not memorized yet" in out and "--steps" in out


def write_labels(folder):
    lines = [{"text": f"it is {name} {n}", "label": n % 2} for n, name in enumerate(NAMES)]
    write_lines(folder / "held.jsonl", [{"text": f"is {n}", "label": n % 2} for n in range(8)])
    return write_lines(folder / "rows.jsonl", lines)


@pytest.mark.parametrize("verb", ["tune", "classify"])
def test_the_final_score_takes_all_of_a_few_examples(folder, base, capfd, verb):
    command = ["tune", write_pairs(folder), "--from", base, "--packing", "off"]
    if verb == "classify":
        command = ["train", write_labels(folder), "--task", "classify", "--start", base]
        command += ["--val", "held.jsonl"]
    assert main([*command, "--steps", "1", "--micro-batch", "1", "--out", "run"]) == 0
    last = read_metrics((folder / "run/metrics.jsonl").read_text())[-1]
    assert last["final"] and "scored" not in last
    every = {"tune": "examples that it was trained on", "classify": "held-out data"}[verb]
    assert f"on all {every}" in (folder / "run/model/README.md").read_text()
    assert last["part_val_loss"] != last["val_loss"], "evaluations take four rows"


def test_a_score_of_some_of_the_examples_trained_on_says_so(folder, base, capfd):
    pairs, record = write_pairs(folder), folder / "run/run.toml"
    command = ["tune", pairs, "--from", base, "--out", "run", "--steps", "3", "--packing", "off"]
    assert main(command) == 0
    assert "memorized" in capfd.readouterr().out
    plan = record.read_text().replace("since = 0", "since = 3\nfinal_batches = 1")
    record.write_text(re.sub("(?m)^micro_batch = .*$", "micro_batch = 5", plan))
    assert main(command) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "on 240 tokens of the examples trained on" in out and "memorized" not in out
    card = (folder / "run/model/README.md").read_text()
    assert "on 240 tokens of the examples that it was trained on" in card


def test_replies_to_examples_of_both_sides_are_shown_by_their_side(folder, base, capfd):
    lines = [{"prompt": f"{n}:", "completion": f" it is {n}"} for n in range(120)]
    data = write_lines(folder / "lines.jsonl", lines)
    assert main(["tune", data, "--from", base, "--steps", "2"]) == 0
    out, err = capfd.readouterr()
    assert out.count("trained on") == out.count("held out") == 2
    assert "memorized" not in out + err


def test_no_sample_is_shown_twice(folder, base, capfd):
    lines = [{"prompt": "how?", "completion": f" like {n}"} for n in range(20)]
    data = write_lines(folder / "lines.jsonl", lines)
    assert main(["tune", data, "--from", base, "--steps", "2"]) == 0
    assert capfd.readouterr().out.count("--- reply to 'how?', trained on") == 1
    text = folder / "words.txt"
    text.write_text("".join(f"{n} {name}\n" for n, name in enumerate(NAMES * 9)))
    command = ["train", str(text), "--size", "nano", "--context", "16", "--steps", "2"]
    for prompt in ("", "0"):
        assert main([*command, "--sample-prompt", prompt]) == 0
        titles = re.findall("--- sample .*", capfd.readouterr().out)
        froms = [title.partition(": ")[2] for title in titles]
        assert len(froms) == len(set(froms)) >= 1


def test_a_classifier_learns_two_hundred_easy_rows_by_the_defaults(folder, base, capfd):
    words = "red green blue", "white black grey"
    lines = [
        {"text": f"it is {words[n % 2].split()[n // 2 % 3]} {n % 13}", "label": n % 2}
        for n in range(200)
    ]
    data = write_lines(folder / "rows.jsonl", lines)
    command = ["train", data, "--task", "classify", "--start", base, "--format", "json"]
    assert main(command) == 0
    assert json.loads(capfd.readouterr().out)["val_accuracy"] > 0.98


SYSTEM = "kind"


@pytest.mark.parametrize(
    ("systems", "default"),
    [
        ([SYSTEM, SYSTEM, SYSTEM], SYSTEM),
        (["", "", ""], ""),
        ([SYSTEM, SYSTEM, "rude"], None),
        ([SYSTEM, None, SYSTEM], None),
        ([None, None, None], None),
    ],
)
def test_a_system_message_that_all_examples_have_is_the_default(folder, base, systems, default):
    """A second tuning without it does not inherit it."""

    def write(name, systems):
        lines = []
        for number, system in enumerate(systems):
            pair = zip(("user", "assistant"), PAIRS[number], strict=True)
            messages = [{"role": role, "content": content} for role, content in pair]
            system = [] if system is None else [{"role": "system", "content": system}]
            lines.append({"messages": system + messages})
        return write_lines(folder / f"{name}.jsonl", lines)

    tune = ["tune", "--steps", "1"]
    assert main([*tune, write("first", systems), "--from", base, "--out", "run"]) == 0
    assert read_template("run").default_system == default
    opening = json.loads(Path("run/model/opening.json").read_text())
    assert opening["question"] in [pair[0] for pair in PAIRS[:3]]
    if default == SYSTEM:
        assert main([*tune, write("second", [None] * 3), "--from", "run", "--out", "again"]) == 0
        assert read_template(Path("again")).default_system is None
