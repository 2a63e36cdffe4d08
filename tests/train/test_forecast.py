"""`--dry-run`: what a run would take, by formulas that hold for what training allocates."""

import json
import re
from dataclasses import replace

import pytest

from tests.train.conftest import CHARACTERS, CPU, PLAN
from tiedgpt import GPTConfig
from tiedgpt.cli.main import main
from tiedgpt.errors import UserError
from tiedgpt.train.forecast import (
    Fleet,
    count_memory,
    count_step,
    describe_here,
    draft_for,
    find_remedy,
    has_room,
    parse_devices,
)
from tiedgpt.train.measures import TensorMemory
from tiedgpt.train.objective import Data
from tiedgpt.train.objectives.language import LanguageModelling
from tiedgpt.train.optim import make_optimizers
from tiedgpt.train.options import TrainOptions
from tiedgpt.train.step import train_step

GPT2 = GPTConfig.preset("gpt2", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
N = 124_439_808
XL = GPTConfig.preset("gpt2-xl")
HERE = Fleet("this machine (cpu)", 1, 8e9, 1e11, is_here=True)


def run_of(config, **plan):
    """Return the objective, the data and the plan of a run whose rows fill the context."""
    data = Data(batches=None, held_out=None, row_tokens=config.n_positions)
    return (
        LanguageModelling(config, CHARACTERS),
        data,
        replace(PLAN, **{"optimizer": "adamw"} | plan),
    )


def total(*run):
    return sum(term.n_bytes for term in count_memory(*run).values())


@pytest.mark.parametrize(
    ("text", "name", "gigabytes", "link"),
    [
        ("8xH100-80GB", "8xH100-80GB", 80, 450e9),
        ("h200", "1xH200-141GB", 141, 450e9),
        ("4 x A100-40GB", "4xA100-40GB", 40, 300e9),
        ("2xRTX-4090", "2xRTX-4090-24GB", 24, 32e9),
        ("1xH100 PCIe", "1xH100-PCIe-80GB", 80, 64e9),
        ("64xH100", "64xH100-80GB", 80, 50e9),
    ],
)
def test_devices_are_read_as_people_write_them(text, name, gigabytes, link):
    fleet = parse_devices(text)
    assert fleet.name == name and fleet.link == link
    assert 0.9e9 * gigabytes < fleet.memory < 1e9 * gigabytes


@pytest.mark.parametrize("text", ["", "8", "8x", "0xH100", "9999xH100", "8xTPU", "8xH100-80"])
def test_what_is_no_device_is_refused_with_those_that_are(text):
    with pytest.raises(UserError, match="H100") as error:
        parse_devices(text)
    assert error.value.options == ("devices",)


def test_what_lasts_is_twelve_bytes_a_parameter_and_shards_divide_it():
    run = run_of(GPT2, dtype="bf16")
    fleet = parse_devices("8xH100-80GB")
    replicated, sharded = (
        count_memory(*run, replace(fleet, parallel=kind)) for kind in ("ddp", "fsdp")
    )
    lasting = "weights", "gradients", "optimizer state"
    assert [replicated[part].n_bytes for part in lasting] == [4 * N, 4 * N, 8 * N]
    assert [sharded[part].n_bytes for part in lasting] == [4 * N // 8, 4 * N // 8, N]
    assert sharded["weights"].formula == "4 N / 8"
    assert replicated["gradient buckets"].n_bytes == 4 * N


def test_a_step_takes_the_longer_of_compute_and_traffic():
    *run, plan = run_of(GPT2, dtype="bf16", batch_size=8, micro_batch=1)
    fast = parse_devices("8xH100")
    compute, traffic = (seconds for seconds, _ in count_step(*run, plan, fast).values())
    per_token = 6 * (N - 1024 * 768) + 12 * 12 * 768 * 1024
    assert compute == pytest.approx(1024 * per_token / (0.4 * 989e12))
    assert traffic == pytest.approx(8 * N * 7 / 8 / 450e9)
    alone = count_step(*run, plan, parse_devices("H100"))
    assert alone.keys() == {"compute"} and alone["compute"][0] == pytest.approx(8 * compute)
    again = count_step(*run, replace(plan, recompute="blocks"), fast)
    assert again["compute"][0] == pytest.approx(compute * 4 / 3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_formulas_hold_for_what_a_step_allocates(trial, dtype, dropout):
    names = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
    shape = {"n_positions": 128, "n_embd": 128, "n_layer": 3, "n_head": 4}
    run = trial(config=shape | dict.fromkeys(names, dropout), dtype=dtype)
    plan = replace(run.plan, batch_size=16, micro_batch=16, optimizer="adamw")
    memory = TensorMemory(CPU)
    with memory.counting():
        model = run.objective.build().train()
        _, rules = make_optimizers(run.objective, model, plan)
    for _ in range(2):
        with memory.counting():
            train_step(model, rules, run.data.batches(16, 0)(0), plan, objective=run.objective)
    counted = total(run.objective, run.data, plan, HERE)
    assert counted == pytest.approx(memory.peak, rel=0.25)
    assert total(run.objective, run.data, replace(plan, recompute="blocks"), HERE) < counted


def test_rows_are_halved_until_they_fit_and_recomputing_is_only_as_asked(trial):
    run = trial()
    options = TrainOptions(size="gpt2", batch_size=64)
    gpt2, data, _ = run_of(GPT2)
    large, small = (Fleet("GPU", 1, memory, 1e12) for memory in (80e9, 4e9))
    assert draft_for(options, gpt2, data, large).micro_batch == 8
    less = draft_for(options, gpt2, data, small)
    assert less.micro_batch < 8 and less.recompute == "off"
    assert draft_for(replace(options, recompute="blocks"), gpt2, data, small).micro_batch == 8
    assert run.data.row_tokens == 16


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("1xA100-32GB", "--recompute blocks"),
        ("8xL4", "--parallel fsdp"),
        ("1xL4", "--devices .*xL4-24GB"),
    ],
)
def test_what_does_not_fit_is_told_what_would(devices, expected):
    fleet = parse_devices(devices)
    *run, plan = run_of(XL, dtype="bf16", batch_size=64, micro_batch=1)
    assert not has_room(count_memory(*run, plan, fleet), fleet)
    options = TrainOptions(size="gpt2-xl", batch_size=64)
    remedy = find_remedy(options, *run, plan, fleet)
    assert re.search(expected, remedy), remedy
    described = re.search(r"--devices (\S+)", remedy)
    other = parse_devices(described[1]) if described else fleet
    other = replace(other, parallel="fsdp" if "fsdp" in remedy else "ddp")
    recompute = "blocks" if "--recompute" in remedy else "off"
    changed = replace(plan, micro_batch=1, recompute=recompute)
    assert has_room(count_memory(*run, changed, other), other), remedy


def test_this_machine_is_told_of_a_gpu_that_would_do():
    *run, plan = run_of(XL, batch_size=8)
    assert "it fits with --devices 1x" in find_remedy(TrainOptions(), *run, plan, HERE)
    assert describe_here(TrainOptions(dtype="fp32", memory="1GB"), CPU).memory == 1e9


def test_the_command_prints_the_plan_and_leaves_nothing(text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = (str(text_file), "--dry-run", "--size", "nano", "--steps", "7", "--tokenizer", "char")
    options += ("--context", "16", "--dtype", "fp32")
    assert main(["train", *options, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] and said["plan"]["steps"] == 7
    assert said["tokens"] == 7 * said["plan"]["batch_size"] * 16
    assert said["memory_bytes"] == sum(part["n_bytes"] for part in said["memory"].values())
    assert said["seconds"] == pytest.approx(7 * said["step"]["measured"]["seconds"])
    assert main(["train", *options]) == 0
    said = capsys.readouterr().out
    assert "weights" in said and "4 N" in said and "epochs" in said and "fits in" in said
    assert not [*tmp_path.iterdir()]


def test_a_plan_for_devices_that_does_not_fit_says_what_would_with_code_4(text_file, capsys):
    options = (str(text_file), "--dry-run", "--size", "gpt3-13b", "--steps", "7")
    options += ("--tokenizer", "char")
    assert main(["train", *options, "--devices", "8xA100-80GB", "--batch-size", "64"]) == 4
    said = capsys.readouterr()
    assert "does not fit in" in said.out and "8 N' / 8" not in said.out
    assert "it fits with --parallel fsdp" in said.err
    assert main(["train", *options, "--devices", "8xA100-80GB", "--dtype", "fp32"]) == 1
    assert main(["train", str(text_file), "--devices", "8xA100-80GB"]) == 1
    assert "--dry-run" in capsys.readouterr().err


def test_a_size_is_chosen_for_the_devices(text_file, capsys):
    options = (str(text_file), "--dry-run", "--minutes", "1", "--format", "json")
    assert main(["train", *options, "--devices", "H100", "--batch-size", "8"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["plan"]["dtype"] == "bf16" and said["seconds"] <= 61
