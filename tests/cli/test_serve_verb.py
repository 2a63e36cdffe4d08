"""`tiedgpt serve`, as a user starts and ends it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.models import TEXT, opinionated, save_model
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data.templates import TEMPLATES, write_template

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def cats(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "cats")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_bare", "is_chat"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_the_printed_commands_work_and_sigterm_stops_the_server(cats, is_bare, is_chat):
    """Also with a key and without a tokenizer, and for a model of chats."""
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "tiedgpt", "serve", str(cats), "--port", "0"]
    env = ENVIRONMENT
    if is_chat:
        write_template(TEMPLATES["plain"], Tokenizer.from_pretrained(cats), cats)
    if is_bare:
        for file in cats.glob("*token*"):
            file.unlink()
        command, env = [*command, "--api-key", "secret"], env | {"TIEDGPT_API_KEY": "secret"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            shown = [process.stdout.readline() for _ in range(7 + is_bare)]
            (address,) = re.findall(r"address +(http://127.0.0.1:\d+)", shown[0])
            assert "cats" in shown[1] and "8 texts at a time" in shown[2]
            (curl,) = [line for line in shown if line.startswith("curl")]
            done = subprocess.run(["sh", "-c", f"{curl.strip()} -s"], capture_output=True, env=env)
            answer = json.loads(done.stdout)
            (choice,) = answer["choices"]
            if is_chat and not is_bare:  # a chat needs a tokenizer
                assert answer["object"] == "chat.completion" and choice["message"]["content"]
            else:
                assert answer["object"] == "text_completion" and choice["text"]
            openai_line = next(line for line in shown if "from openai" in line)
            pytest.importorskip("openai")
            done = subprocess.run([sys.executable, "-c", openai_line], capture_output=True, env=env)
            assert done.returncode == 0 and done.stdout.strip(), done.stderr
            with urllib.request.urlopen(f"{address}/health") as response:
                assert json.load(response) == {"status": "ok"}
            request = urllib.request.Request(f"{address}/metrics")
            if is_bare:
                request.add_header("authorization", "Bearer secret")
            with urllib.request.urlopen(request) as response:
                metrics = response.read().decode()
            (n_prompt,) = re.findall(r"^tiedgpt:prompt_tokens_total\S* (\S+)", metrics, re.M)
            expected = 2 * answer["usage"]["prompt_tokens"]
            assert float(n_prompt) == expected, "of the two above, and no warm-up"
        finally:
            process.send_signal(signal.SIGTERM)
        lines = process.stderr.read().splitlines()
        assert process.wait(120) == 0
    assert {json.loads(line)["status"] for line in lines} == {200}


def test_a_model_that_fails_to_load_ends_the_server_with_its_exit_code(cats, capsys):
    pytest.importorskip("fastapi")
    weights = cats / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["serve", str(cats), "--port", "0"]) == 3
    assert "model.safetensors" in capsys.readouterr().err
    weights.unlink()
    assert main(["serve", str(cats), "--port", "0"]) == 1


def test_unservable_sources_are_refused(cats, capsys, monkeypatch):
    assert main(["serve", str(cats), "--host", "0.0.0.0"]) == 1
    error = capsys.readouterr().err
    assert "--api-key" in error and "--insecure" in error
    assert main(["serve", str(cats), "--host", "unix:/tmp/socket"]) == 1
    assert "unix:/tmp/socket is a unix socket" in capsys.readouterr().err
    for option, wrong in {
        "--api-key": ["", "a b", "é"], "--drain": ["nan", "-1", "inf"], "--host": ["no.invalid"],
    }.items():  # fmt: skip
        for value in wrong:
            assert main(["serve", str(cats), "--insecure", f"{option}={value}"]) == 1
            assert option.removeprefix("--") in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(cats), "--port", str(port)]) == 1
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
    assert main(["serve", str(cats / "nothing"), "--port", "0"]) == 1
    assert "nothing" in capsys.readouterr().err
    monkeypatch.chdir(cats)
    assert main(["serve", "--port", "0"]) == 1
    assert "runs/" in capsys.readouterr().err
    for package in ("uvicorn", "fastapi", "prometheus_client"):
        for name in [name for name in sys.modules if name.startswith("tiedgpt.serve")]:
            monkeypatch.delitem(sys.modules, name)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            assert main(["serve", str(cats), "--port", "0"]) == 1
        error = capsys.readouterr().err
        assert package in error and "pip install 'tiedgpt[serve]'" in error


@pytest.mark.slow
def test_ctrl_c_lists_running_requests_and_a_second_ends_at_once(tmp_path):
    pytest.importorskip("fastapi")
    tokenizer = Tokenizer.train([TEXT], 300)
    save_model(tmp_path, opinionated(tokenizer, n_positions=16_384), tokenizer)
    command = [sys.executable, "-m", "tiedgpt", "serve", str(tmp_path), "--port=0", "--drain=900"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            address = re.findall(r"http://[\d.:]+", process.stdout.readline())[0]
            body = {"prompt": "a", "max_tokens": 16_000, "logit_bias": {"7": 100}, "stream": True}
            headers = {"content-type": "application/json"}
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{address}/v1/completions", data, headers)
            with urllib.request.urlopen(request) as response:
                response.readline()
                process.send_signal(signal.SIGINT)
                said = process.stderr.readline()
                assert "1 text is being finished" in said and "Ctrl-C again ends at once" in said
                process.send_signal(signal.SIGINT)
                assert process.wait(120) == 0
        finally:
            process.kill()
