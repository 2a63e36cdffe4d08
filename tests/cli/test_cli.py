"""The command line as a user sees it, in separate processes if that matters."""

import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from tiedgpt.cli.doctor import examine
from tiedgpt.cli.main import main
from tiedgpt.cli.show_training import Display
from tiedgpt.cli.train import RunArguments
from tiedgpt.errors import UserError
from tiedgpt.train.events import Ended, Replanned
from tiedgpt.train.plan.values import Plan

QUICK = ["--steps", "4", "--context", "16", "--batch-size", "2", "--size", "tiny"]


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cats.txt"
    path.write_text("".join(f"{n} cats sat on {n % 5} mats.\n" for n in range(300)))
    return path


def test_train_then_generate_then_train_again(text, capfd):
    command = ["train", "cats.txt", *QUICK, "--out", "run", "--vocab-size", "300", "--verbose"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert "validation loss" in out and "bits per byte" in out
    assert re.search(r"one matrix of \d+ x 128 counted once", out)
    assert out.count("sample") == 2 and re.search(r"predicts \d+% of \d+ held-out tokens", out)
    assert "tiedgpt generate run" in out and "tiedgpt tie show run" in out
    assert "no decay" in err and "W, which reads and predicts" in err
    assert re.search(r"s for imports, .* the\s+first\s+step after [\d.]+ s", err, re.DOTALL)
    assert "cats.txt: 1 document, " in err and "tokens: its texts may be poor" in err
    record = tomllib.loads(Path("run/run.toml").read_text())
    assert record["training"]["steps"] == 4
    assert 257 < record["model"]["vocab_size"] <= 300
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["final"] and [x["step"] for x in lines if "loss" in x] == [1, 2, 3, 4]

    assert main(["generate", "run", "--prompt", "7 cats", "--max-new-tokens", "9"]) == 0
    assert capfd.readouterr().out.startswith("7 cats")
    arguments = ["--format", "json", "--seed", "1", "--max-new-tokens", "9"]
    assert main(["generate", "run", *arguments]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert len(answer["ids"]) <= 9 and answer["finish_reason"] in ("length", "stop")

    assert main(command) == 0
    out, err = capfd.readouterr()
    assert out == "" and "is finished" in err and "generate run" in err
    assert "more --minutes, --steps or --epochs continue the training" in " ".join(err.split())
    assert main(["train", "cats.txt", *QUICK, "--out", "run", "--vocab-size", "301"]) == 1
    assert "--vocab-size was 300 and is 301" in capfd.readouterr().err


def test_data_may_come_through_a_pipe(text, capfd, monkeypatch):
    reader, writer = os.pipe()
    with open(reader) as stdin:
        os.write(writer, text.read_bytes())
        os.close(writer)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["train", "-", *QUICK, "--tokenizer", "char"]) == 0
    assert "standard input: 1 document" in capfd.readouterr().err
    assert Path("runs/stdin-tiny-1/model/model.safetensors").exists()


def test_an_interrupt_saves_and_the_printed_command_resumes(text, capfd):
    long = ["train", "cats.txt", *QUICK[2:], "--steps", "100000", "--out", "run", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tiedgpt", *long], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    metrics = Path("run/metrics.jsonl")
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 500):
        time.sleep(0.05)
    assert main(long) == 1
    assert f"process {process.pid}" in capfd.readouterr().err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert re.search(r"to resume:\n  .*tiedgpt train cats\.txt", err)
    (checkpoint,) = sorted(Path("run/checkpoints").glob("step-*"))[-1:]
    assert Path("run/model/model.safetensors").exists()
    state = json.loads((checkpoint / "state.json").read_text())
    lines = metrics.read_text().splitlines()
    assert json.loads(lines[-1])["step"] == state["step"]


def test_a_stop_counts_by_the_plan_in_force(text, capfd, monkeypatch):
    def planned_again(trainer):
        yield Replanned(3, dataclasses.replace(trainer.plan, steps=7), [])
        yield Ended(3, finished=False, score=None)

    monkeypatch.setattr("tiedgpt.train.loop.Trainer.run", planned_again)
    assert main(["train", "cats.txt", *QUICK, "--tokenizer", "char"]) == 75
    assert "stopped and saved after step 3 of 7" in capfd.readouterr().err


def test_a_busy_machine_is_noted_in_runs_by_time(text, capfd, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    assert main(["train", "cats.txt", *QUICK, "--out", "steps"]) == 0
    assert "busy" not in capfd.readouterr().err
    assert main(["train", "cats.txt", "--size", "nano", "--minutes", "0.02", "--out", "time"]) == 0
    assert "busy (99.0 processes on" in " ".join(capfd.readouterr().err.split())


def test_the_bar_of_a_run_that_ended_early_is_full(capfd):
    plan = Plan(
        steps=26, batch_size=4, micro_batch=4, optimizer="muon", lr=1e-2, warmup=1,
        weight_decay=0.1, grad_clip=1.0, dtype="fp32", seed=3, eval_every=4,
        eval_batches=2, save_every=2,
    )  # fmt: skip
    display = Display(RunArguments(), 0.0)
    with display.training(plan):
        display.event(Ended(10, finished=True, score=None))
    assert re.search(r"\b10/10\b", capfd.readouterr().err)


def test_without_a_verb_the_help_is_shown(capfd):
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0 and "usage: tiedgpt" in capfd.readouterr().out
    assert main(["--version"]) == 0 and capfd.readouterr().out.startswith("tiedgpt 0.")


def test_doctor_describes_the_machine(capfd, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/kernels")
    assert main(["doctor", "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["torch"].startswith(torch.__version__.split("+")[0])
    assert found["missing"] == "nothing that is required"
    assert found["kernel cache"] == "/kernels"
    assert found["train --device auto"] in ("cpu", "cuda")
    assert found["generate --device auto"].startswith(found["train --device auto"])
    assert ("gpu driver" in found) == ("cuda:0" in found) != ("gpu" in found)
    assert main(["doctor"]) == 0
    assert "train --dtype auto" in capfd.readouterr().out


def test_doctor_names_missing_cpu_features_and_their_cost(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    monkeypatch.setattr("tiedgpt.infer.kernels.simd.FEATURES", {"avx2", "avx512f", "avx512vnni"})
    features = examine()["cpu features"]
    assert [features[name] for name in ("AVX2", "AVX-512")] == ["yes"] * 2
    assert features["bf16"].startswith("no: ") and "fp32" in features["bf16"]


@pytest.mark.parametrize(
    ("features", "byte_class", "better"),
    [
        ({"avx2", "avx512f", "avx512vl", "avx512vnni", "avxvnni"}, "avx512-vnni", "fastest"),
        ({"avx2", "avx512f", "avx512vl"}, "avx2", "AVX-512 VNNI"),
        ({"avx2", "avxvnni"}, "avx-vnni", "AVX-512 VNNI"),
        ({"avx2"}, "avx2", "AVX-VNNI"),
        ({"neon", "dotprod", "i8mm"}, "arm-i8mm", "fastest"),
        ({"neon", "dotprod"}, "arm-dotprod", "i8mm"),
        ({"neon"}, "plain", "dotprod"),
    ],
)
def test_doctor_names_the_class_of_kernels_and_what_a_better_cpu_would_use(
    monkeypatch, features, byte_class, better
):
    monkeypatch.setattr("tiedgpt.infer.kernels.simd.FEATURES", features)
    kernels = examine()["cpu features"]["int8 and int4 kernels"]
    assert kernels.startswith(f"{byte_class}: ") and better in kernels


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["inspect", "vocab"], 2, "'vocab'\nhint: the name is first: positions, .*ablate"),
        (["generate", "--context-end", "wrap"], 2, "--context-end must be one of stop, slide, got"),
        (["generate", "--best-of", "2"], 2, "use n with a seed"),
        (["serve", "--timeout", "2"], 2, "`tiedgpt serve` has no option --timeout"),
        (["eval", "letters"], 2, "needs DATA or --tasks\nhint: .*tiedgpt eval letters DATA"),
        (["eval", "cats.txt"], 2, "is text, not a model\nhint: .*tiedgpt eval MODEL cats.txt"),
        (["train", "empty.txt"], 1, "empty.txt"),
        (["train", "latin.txt"], 3, "latin.txt"),
        (["train", "pictures"], 1, "pictures"),
        (["train", "tables"], 1, r"\.pdf is not read\nhint: .*\.jsonl"),
        (["train", "short.txt", "--tokenizer", "char", "--size", "tiny"], 1, "context"),
        (["train", "one.txt", "--tokenizer", "char"], 1, "one.txt|validat|text"),
        (["train", "lines.jsonl"], 3, "lines.jsonl"),
        (["train", "cats.txt", "--size", "gpt3-175b", "--steps", "1"], 4, "parameters need"),
        (["train", "cats.txt", "--vocab-size", "100"], 1, "257"),
        (["train", "cats.txt", "--out", "letters"], 1, "contains no training run"),
        (["generate"], 1, "train first"),
        (["generate", "no/such/model"], 1, "does not exist"),
        (["generate", "letters"], 1, "no weights"),
        (["generate", "cats.txt"], 1, "hint: train on it with tiedgpt train cats.txt"),
        (["train", "cats.txt", "--memory", "lots"], 1, "size, got 'lots'\nhint: give gigabytes"),
        (["train", "pairs.jsonl"], 3, "hint: train on prompts and replies with `tiedgpt tune`"),
        (["train", "no.txt"], 1, "no file matches 'no.txt'"),
    ],
)
def test_bad_input_gets_one_line_and_its_exit_code(text, capfd, arguments, code, says):
    Path("empty.txt").write_text("")
    Path("one.txt").write_text("a")
    Path("short.txt").write_text("only a few words here")
    Path("latin.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    Path("lines.jsonl").write_text('{"text": "fine"}\n{"txet": 1}\n')
    Path("pairs.jsonl").write_text('{"prompt": "Hi", "completion": " you"}\n')
    Path("pictures").mkdir()
    Path("pictures/a.png").write_bytes(b"\x89PNG\0\0")
    Path("tables").mkdir()
    Path("tables/a.pdf").write_text("a,b")
    Path("letters").mkdir()
    Path("letters/dear.txt").write_text("dear")
    before = {path for path in Path().rglob("*") if path.is_file()}
    try:
        got = main(arguments)
    except SystemExit as stop:  # the argument parser's
        got = stop.code
    err = capfd.readouterr().err
    assert got == code, err
    assert re.search(says, err)
    if code != 2:
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1, err
    left = {path for path in Path().rglob("*") if path.is_file()} - before
    assert not [path for path in left if "model" in path.parts or ".tmp" in path.name], left


def test_a_runs_time_starts_with_its_command_not_the_process(text, monkeypatch):
    arguments = {}

    def begin(options, out, **more):
        arguments.update(more)
        raise UserError("enough")

    monkeypatch.setattr("tiedgpt.train.run.train", begin)
    before = time.perf_counter()
    assert main(["train", "cats.txt", "--minutes", "1"]) == 1
    assert before <= arguments["began"] <= time.perf_counter()
