"""Standard input is the text of a verb that works on one text, and to which none is given."""

import io
import os
import pty
import sys
from pathlib import Path

import pytest
import torch

from tests.models import opinionated, save_model
from tiedgpt import Tokenizer
from tiedgpt.cli.main import main
from tiedgpt.data.templates import TEMPLATES, write_template
from tiedgpt.heads import SequenceClassifier

TEXT = "the cat sat on the mat. the dog ate the hat"
VERBS = {
    "generate": (["generate", "model", "-n", "5", "--seed", "3"], ["--prompt", TEXT]),
    "inspect": (["inspect", "positions", "model"], ["--text", TEXT]),
    "eval": (["eval", "model", "--format", "json"], ["text.txt"]),
    "classify": (["classify", "labels"], [TEXT]),
}
"""A command without its text, and the arguments that give the text."""
CODES = {"generate": 0, "inspect": 1, "eval": 2, "classify": 1}
"""Exit codes without a text: only generate needs none."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train([TEXT * 20], 270)
    save_model(path / "model", opinionated(tokenizer), tokenizer)
    write_template(TEMPLATES["plain"], tokenizer, path / "model")
    torch.manual_seed(3)
    head = SequenceClassifier(opinionated(tokenizer), labels=["bad", "good"])
    save_model(path / "labels", head, tokenizer)
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def _inside(models, monkeypatch):
    monkeypatch.chdir(models)


@pytest.fixture
def set_stdin(monkeypatch):
    """Return a function that replaces standard input until the test ends."""
    streams = []

    def replace_stdin(stream):
        streams.append(stream)
        monkeypatch.setattr(sys, "stdin", stream)

    before = sys.stdin
    yield replace_stdin
    for stream in streams:
        if stream not in (None, before):
            stream.close()


def open_pipe(content: bytes) -> io.TextIOWrapper:
    """Return the reading end of a pipe that holds the content and is closed."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    return open(reader)


def open_file(content: bytes) -> io.TextIOWrapper:
    """Return a file with the content."""
    Path("input").write_bytes(content)
    return open("input")


STREAMS = {
    "a pipe": open_pipe,
    "a file": open_file,
    "memory": lambda content: io.TextIOWrapper(io.BytesIO(content)),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(
    ("verb", "ending"),
    [(verb, "") for verb in VERBS]  # a document keeps its newline
    + [(verb, end) for verb in ("generate", "inspect", "classify") for end in ("\n", "\r\n")],
)
def test_a_piped_text_is_the_text_of_a_verb(verb, stream, ending, set_stdin, capsys):
    command, text = VERBS[verb]
    assert main([*command, *text]) == 0
    expected = capsys.readouterr().out
    set_stdin(STREAMS[stream]((TEXT + ending).encode()))
    assert main(command) == 0
    assert capsys.readouterr().out == expected
    set_stdin(STREAMS[stream](b"another text"))  # a text that is given comes first
    assert main([*command, *text]) == 0
    assert capsys.readouterr().out == expected


def open_terminal() -> io.TextIOWrapper:
    """Return a terminal at which nothing is typed."""
    _, terminal = pty.openpty()
    return open(terminal)


def open_closed() -> io.TextIOWrapper:
    """Return a stream that was closed."""
    stream = open(os.devnull)
    stream.close()
    return stream


ABSENT = {
    "closed at the start": lambda: None,
    "closed later": open_closed,
    "/dev/null": lambda: open(os.devnull),
    "an empty pipe": lambda: open_pipe(b""),
    "write-only": lambda: open(os.open(os.devnull, os.O_WRONLY), closefd=True),
    "a terminal": open_terminal,
    "pytest's": lambda: sys.stdin,
}


@pytest.mark.parametrize("stream", ABSENT)
@pytest.mark.parametrize("verb", VERBS)
def test_standard_input_without_text_is_no_text(verb, stream, set_stdin, capsys):
    command, _ = VERBS[verb]
    set_stdin(ABSENT[stream]())
    assert main(command) == CODES[verb]
    out, err = capsys.readouterr()
    if verb == "generate":
        assert main([*command, "--prompt", ""]) == 0
        assert capsys.readouterr().out == out
    else:
        assert out == "" and "hint: give" in err


def test_an_empty_prompt_reads_nothing(set_stdin, capsys):
    set_stdin(open_pipe(b"the cat"))
    assert main([*VERBS["generate"][0], "--prompt", ""]) == 0
    assert sys.stdin.read() == "the cat"


@pytest.mark.parametrize("verb", VERBS)
def test_piped_bytes_that_are_no_text_are_an_error(verb, set_stdin, capsys):
    set_stdin(open_pipe(b"\xff\xfe\0\xd8\0"))
    assert main(VERBS[verb][0]) == 3
    assert "standard input" in capsys.readouterr().err.replace("<stdin>", "standard input")


def test_chat_answers_piped_lines_and_explains_a_closed_input(set_stdin, capsys):
    command = ["chat", "model", "-n", "3"]
    set_stdin(open_pipe(b"the cat\nthe dog\n"))
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
    set_stdin(None)
    assert main(command) == 1
    assert "closed" in capsys.readouterr().err
    set_stdin(io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(command) == 3
    assert "UTF-8" in capsys.readouterr().err


def test_chat_explains_its_commands(set_stdin, capsys):
    set_stdin(open_pipe(b"/help\n/leave\n/exit\nthe cat\n"))
    assert main(["chat", "model"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "/new" in err and "/exit" in err and "no command /leave" in err
    leader, terminal = pty.openpty()
    os.write(leader, b"/exit\n")
    set_stdin(open(terminal))
    assert main(["chat", "model"]) == 0
    assert "/help" in capsys.readouterr().err


def test_train_says_that_it_does_not_read_a_pipe(set_stdin, capsys):
    refused = ["train", "--device", "cuda:63"]  # before the default text is read
    set_stdin(open_file(b"my text"))
    assert main(refused) == 1
    assert "tiedgpt train -" in capsys.readouterr().err
    assert sys.stdin.read() == "my text"
    set_stdin(open(os.devnull))
    assert main(refused) == 1
    err = capsys.readouterr().err
    assert "tiedgpt train -" not in err and "cuda:63" in err
