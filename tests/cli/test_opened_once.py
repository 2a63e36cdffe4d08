"""Each file of a model is opened once, by every command and function."""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

import tiedgpt
from tests.models import TEXT, opinionated, save_model
from tiedgpt import GPT, Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data.templates import TEMPLATES, write_template
from tiedgpt.inspect import learn, positions, vocabulary
from tiedgpt.tie import audit, ledger

directories: list[str] = []
opened: Counter[str] = Counter()


def count_open(event, arguments):
    """Count a file that is opened to be read in one of the directories."""
    if event != "open" or not directories:
        return
    path, mode, _ = arguments
    if mode is not None and not set("wxa") & set(mode) and not isinstance(path, int):
        path = os.path.abspath(os.fsdecode(path))
        if path.startswith(directories[0]):
            opened[path[len(directories[0]) :]] += 1


@contextmanager
def counting(directory):
    """Yield the number of times that each file of a directory is opened."""
    if not opened:  # a hook cannot be removed
        sys.addaudithook(count_open)
    opened.clear()
    opened["hooked"] = 0
    directories.append(str(directory))
    try:
        yield opened
    finally:
        directories.clear()


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A run's directory with a model that chats, its opening and some held-out tokens."""
    monkeypatch.chdir(tmp_path)
    template = replace(TEMPLATES["chatml"], default_system="Be brief.")
    tokenizer = Tokenizer.train([TEXT], 300).with_special_tokens(template.tokens)
    model = save_model(tmp_path / "run" / "model", opinionated(tokenizer), tokenizer)
    write_template(template, tokenizer, model)
    (model / "opening.json").write_text(json.dumps({"text": "the cat", "question": "why?"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    (tmp_path / "my.txt").write_text(TEXT)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the cat"}]
    (tmp_path / "my.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 3)
    return tmp_path / "run"


COMMANDS = [
    "inspect positions run --text cat", "inspect vocabulary run", "inspect learn run --text cat",
    "explain tie run", "explain norms run", "convert run copy", "convert run copy.gguf",
    "convert run packed --to packed --precision int8", "tie show run", "tie audit run",
    "tie fix run fixed --keep input", "generate run --prompt a --max-new-tokens 2",
    "eval run my.txt", "export run page.html", "push run a/b --dry-run --gguf fp16",
    "tune my.txt --from run --steps 1 --dry-run", "tune my.txt --from run --steps 1 --out new",
    "tune my.jsonl --from run --steps 1 --lora 2 --out new",
    "train my.txt --start run --steps 1 --out new", "data show my.jsonl --tokenizer run",
    "data prepare my.txt -o data --tokenizer run", "chat run --max-new-tokens 2",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_opens_each_file_of_a_model_once(model, command, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    if "fix" in command:
        config = json.loads((model / "model/config.json").read_text())
        gpt = GPT.from_pretrained(model)
        tiedgpt.tie.untie(gpt)
        gpt.head.weight.data += 1.0
        gpt.save_pretrained(model / "model")
        (model / "model/config.json").write_text(json.dumps(config))
    with counting(model) as times:
        assert main(command.split()) == 0, capfd.readouterr().err
    assert times["/model/config.json"] == 1 or "data " in command
    assert max(times.values()) == 1, times


@pytest.mark.parametrize(
    "function",
    [
        lambda source: positions(source, None, "the cat"),
        lambda source: learn(source, None, "the cat"),
        vocabulary,
        audit,
        ledger,
        lambda source: tiedgpt.explain("head", source),
        GPT.from_pretrained,
        Tokenizer.from_pretrained,
    ],
)
def test_a_function_opens_each_file_of_a_model_once(model, function):
    with counting(model) as times:
        function(str(model))
    assert max(times.values()) == 1, times


SERVER = """
import json, os, signal, sys, threading, time, urllib.request
from collections import Counter

times = Counter()

def count_open(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and not set("wxa") & set(arguments[1]):
        times[str(arguments[0])] += 1

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[2]}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()

def drive():
    try:
        while True:
            try:
                ask("/ready")
                break
            except OSError:
                time.sleep(0.1)
        for _ in range(2):
            for home in ("", "/beside"):
                ask(f"{home}/inspect/model")
                ask(f"{home}/inspect/positions", {"text": "the cat"})
            ask("/inspect/learn", {"text": "the cat"})
            ask("/v1/embeddings", {"input": "cat"})
        directory = os.path.abspath("run")
        counted = {name: n for name, n in times.items() if directory in os.path.abspath(name)}
        print("OPENED", json.dumps(counted))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)

from tiedgpt.cli.main import main

threading.Thread(target=drive).start()
sys.addaudithook(count_open)
sys.exit(main(["serve", sys.argv[1], "--beside", sys.argv[3], "--port", sys.argv[2]]))
"""


@pytest.mark.slow
def test_a_server_opens_each_file_of_its_models_once(model):
    """Requests ask for the page, inspections, embeddings and the second model."""
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    beside = shutil.copytree(model, "run2")
    command = [sys.executable, "-c", SERVER, str(model), port, str(beside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("OPENED")]
    times = json.loads(line.removeprefix("OPENED"))
    assert {"run", "run2"} <= {folder for name in times for folder in name.split(os.sep)}
    assert max(times.values()) == 1, times
