"""The model card that a run writes."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.train.conftest import TEXT
from tiedgpt import GPT, GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.cli.options import parse
from tiedgpt.cli.train import Arguments
from tiedgpt.train.card import exact_command, model_card
from tiedgpt.train.metrics import parse_history, read_history
from tiedgpt.train.options import DEFAULT_SIZE
from tiedgpt.train.storage import RunDirectory
from tiedgpt.weights.formats.transformers.writer import OUR_CARD

NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w])")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    (folder / "cats.txt").write_text(TEXT)
    options = ["--size", "tiny", "--steps", "20", "--context", "16", "--batch-size", "3"]
    arguments = [str(folder / "cats.txt"), *options, "--tokenizer", "char", "--seed", "5"]
    assert main(["train", *arguments, "--out", str(folder / "run")]) == 0
    return folder / "run"


def numbers_of(value) -> list[float]:
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers_of(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in numbers_of(inner)]
    return [value] if isinstance(value, (int, float)) else []


def texts_of(value) -> list[str]:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return [text for each in inner for text in texts_of(each)]
    return [value] if isinstance(value, str) else []


def test_every_number_on_the_card_is_the_runs_own(trained):
    card = (trained / "model" / "README.md").read_text()
    record = tomllib.loads((trained / "run.toml").read_text())
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    config = GPTConfig(**record["model"])
    w = config.vocab_size * config.n_embd
    known = numbers_of(record) + numbers_of(lines) + [float(record["training"]["seed"])]
    known += [config.parameter_count(), config.parameter_count() + w]
    known += [sum(48 / line["tokens_per_second"] for line in lines if "loss" in line)]
    text = record["train_text"]
    known += [text["utf8_bytes"] / 1e6, text["utf8_bytes"] / text["tokens"]]
    known += [line["machine_memory_bytes"] / 1e9 for line in lines if "grad_norm_w_input" in line]
    text = card
    for said in sorted(texts_of(record), key=len, reverse=True):
        text = text.replace(said, " ") if any(map(str.isdigit, said)) else text
    found = NUMBER.findall(text)
    assert len(found) > 60
    for number in found:
        digits = len(number.partition(".")[2]) if "e" not in number else 12
        value = float(number.replace(",", ""))
        assert any(round(k, digits) == value for k in known), number


def test_the_card_tells_of_tie_data_result_and_hardware(trained):
    card = (trained / "model" / "README.md").read_text()
    record = tomllib.loads((trained / "run.toml").read_text())
    final = read_history(trained).final
    assert OUR_CARD in card and card.startswith("---\nlibrary_name: transformers\n")
    assert "**Tied**: one matrix of " in card and "counted once" in card
    assert "`cats.txt`" in card and record["text"]["sha256"] in card
    assert f"bits per byte **{final['val_bits_per_byte']:.4f}**" in card
    assert record["machine"]["processor"] in card and record["versions"]["torch"] in card
    assert not re.search(r"more information|nan|none|\{|\}", card, re.IGNORECASE)


def test_the_command_on_the_card_asks_for_the_same_run(trained):
    record = tomllib.loads((trained / "run.toml").read_text())
    words = shlex.split(exact_command(record))
    assert (
        words[:2] == ["tiedgpt", "train"]
        and exact_command(record) in (trained / "model" / "README.md").read_text()
    )
    again = parse(Arguments, "train", words[2:], "").options
    assert (again.steps, again.minutes) == (20, None)
    for name in ("batch_size", "micro_batch", "optimizer", "lr", "dtype", "seed"):
        assert getattr(again, name) == record["training"][name], name
    assert (again.data, again.tokenizer, again.context) == (
        tuple(record["options"]["data"]), "char", 16,
    )  # fmt: skip


def test_the_card_prints_the_command_as_it_was_given_and_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cats.txt").write_text(TEXT * 9)
    asked = ["cats.txt", "--size", "nano", "--minutes", "0.01", "--no-bias"]
    assert main(["train", *asked, "--out", "run", "--verbose"]) == 0
    record = RunDirectory(Path("run")).read_record()
    card = Path("run/model/README.md").read_text()
    (printed,) = (line for line in card.splitlines() if "--minutes" in line)
    assert sorted(printed.split()) == sorted(["$", "tiedgpt", "train", *asked])
    assert f"{record['training']['steps']:,} steps" in card and exact_command(record) in card


def test_minutes_become_the_steps_that_they_were(trained):
    record = tomllib.loads((trained / "run.toml").read_text())
    record["options"] |= {"minutes": 3.0, "size": "mini", "val": "a b.txt"}
    del record["options"]["steps"]
    assert "--minutes" not in exact_command(record)
    assert "--steps 20" in exact_command(record) and "--val 'a b.txt'" in exact_command(record)


@pytest.mark.parametrize("asked", [["--tokenizer", "char", "--warmup", "0.1"], []])
def test_the_command_of_a_run_whose_size_was_chosen_names_it(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    Path("cats.txt").write_text(TEXT * 9)
    assert main(["train", "cats.txt", "--out", "run", "--minutes", "0.01", *asked]) == 0
    first = RunDirectory(Path("run")).read_record()
    assert first["training"]["reason"] and first["training"]["size"] != DEFAULT_SIZE
    assert main([*shlex.split(exact_command(first))[1:], "--out", "again"]) == 0
    again = RunDirectory(Path("again")).read_record()
    assert again["model"] == first["model"]
    timed = ("reason", "minutes", "since", "final_batches", "eval_batches")
    plans = [{k: v for k, v in r["training"].items() if k not in timed} for r in (first, again)]
    assert plans[0] == plans[1]


def test_the_command_of_a_run_that_was_planned_again_warms_up_for_as_many_steps(trained):
    record = RunDirectory(trained).read_record()
    record["options"]["schedule"] = "wsd"
    record["training"] |= {"steps": 4321, "warmup": 33, "cooldown": 1000}
    again = parse(Arguments, "train", shlex.split(exact_command(record))[2:], "").options
    assert (round(again.warmup * 4321), round(again.cooldown * 4321)) == (33, 1000)
    record["training"]["since"] = 9
    card = str(model_card(parse_history("a", ""), record, GPT(GPTConfig(**record["model"])), {}))
    assert "planned again after step 9" in card


@pytest.mark.parametrize(
    "counts",
    [
        {"steps": 6, "warmup": 6, "cooldown": 0},  # a slow run that is cut to its warm-up
        {"steps": 3, "warmup": 0, "cooldown": 3},
    ],
)
def test_the_command_of_a_run_cut_short_is_one_that_can_be_given(trained, counts):
    record = RunDirectory(trained).read_record()
    record["options"] |= {"schedule": "wsd"}
    record["training"] |= counts
    again = parse(Arguments, "train", shlex.split(exact_command(record))[2:], "").options
    shares = {
        name: round(getattr(again, name) * counts["steps"]) for name in counts.keys() - {"steps"}
    }
    assert {"steps": again.steps, **shares} == counts


def test_the_command_starts_as_many_processes(trained):
    tables = {**RunDirectory(trained).read_record(), "processes": {"number": 2, "parallel": "fsdp"}}
    words = shlex.split(exact_command(tables))
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", "tiedgpt", "train"]
    assert words[words.index("--parallel") + 1] == "fsdp"


def test_a_run_that_stopped_says_so_and_an_untied_model_too(trained):
    record = tomllib.loads((trained / "run.toml").read_text())
    config = GPTConfig(**(record["model"] | {"tie_word_embeddings": False}))
    text = (trained / "metrics.jsonl").read_text()
    some = "".join(line + "\n" for line in text.splitlines() if json.loads(line)["step"] <= 9)
    predicts = {"predicts": "a matrix reads and another predicts"}
    card = str(model_card(parse_history("half", some), record, GPT(config), predicts))
    assert "stopped at step 9 of 20" in card and "**Untied**" in card
    assert "On all" not in card
    nothing = str(model_card(parse_history("new", ""), record, GPT(config), predicts))
    assert "Not validated yet" in nothing


def test_a_card_that_someone_wrote_stays(trial, trained):
    run = trial()
    run.run.record.write_text((trained / "run.toml").read_text())
    run.run.model.mkdir()
    (run.run.model / "README.md").write_text("# Mine\n")
    run.train()
    assert (run.run.model / "README.md").read_text() == "# Mine\n"
