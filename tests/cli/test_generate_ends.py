"""`tiedgpt generate` without its input, its output or its user."""

import io
import json
import shutil
import signal
import subprocess
import sys

import pytest

from tiedgpt.cli.main import main
from tiedgpt.infer import packed_session

INTERRUPTIBLE = """
import signal, sys
from tiedgpt.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
"""The command line, which Ctrl-C reaches even if the tests run in a shell's background."""


@pytest.fixture(scope="module")
def packed(directory, tmp_path_factory):
    """A packed model without an end-of-text token, so that its text never ends by itself."""
    source = tmp_path_factory.mktemp("packed") / "source"
    shutil.copytree(directory, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    path = source.parent / "model"
    assert main(["convert", str(source), str(path), "--to", "packed", "--precision", "fp32"]) == 0
    return str(path)


@pytest.fixture
def endless(packed):
    """A process that goes on generating, and has begun to."""
    command = [
        sys.executable, "-c", INTERRUPTIBLE, "generate", packed, "--prompt", "the cat",
        "--seed", "1", "--max-new-tokens", "1000000000", "--context-end", "slide", "--threads", "3",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(7) == b"the cat"
        yield process
        process.kill()


def test_generate_ends_quietly_when_its_pipe_closes(endless):
    endless.stdout.close()
    assert endless.wait(120) == 0
    assert b"interrupted" not in endless.stderr.read()


def test_ctrl_c_ends_the_line_and_the_process(endless):
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=120)
    assert endless.returncode == 75
    assert out.endswith(b"\n") and err.endswith(b"error: interrupted\n")


@pytest.mark.parametrize(
    ("stdin", "code", "says"),
    [
        (None, 1, "standard input is closed"),
        (io.TextIOWrapper(io.BytesIO(b"\xff")), 3, "is not UTF-8"),
        (io.TextIOWrapper(io.BytesIO(b"the")), 0, ""),
    ],
)
def test_a_prompt_is_read_from_standard_input(packed, monkeypatch, capsys, stdin, code, says):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate", packed, "--prompt", "-", "--max-new-tokens", "2"]) == code
    out, err = capsys.readouterr()
    assert says in err and out.startswith("the" if not code else "")


def test_kernels_that_cannot_be_compiled_are_reported(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    monkeypatch.setattr(packed_session.forward, "functions", {})
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert main(["generate", packed, "--prompt", "the"]) == 1
    assert "NUMBA_DISABLE_JIT is set" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["generate", packed, "--prompt", "the", "--threads", "0"]) == 1
    assert "--threads must be an integer from 1 to 256, got 0" in capsys.readouterr().err
