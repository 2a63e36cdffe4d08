"""How the command line looks: help, errors with hints, and tables, in terminals and in pipes."""

import errno
import io
import json
import pickle
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tiedgpt.cli import console
from tiedgpt.cli.main import VERBS, main
from tiedgpt.cli.options import UsageError, parse
from tiedgpt.errors import NoRoomError, UserError
from tiedgpt.options import argument, option

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Return the output of a terminal with `columns` columns."""

    def shown(show, columns=40, **environment):
        stream = Terminal()
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"TERM": "xterm", "COLUMNS": str(columns)} | environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        show()
        return stream.getvalue()

    return shown


def test_lines_are_indented_below_their_label_at_word_boundaries(terminal):
    path = "/a/path/that/is/longer/than-the-terminal/is-wide/model.safetensors"
    text = terminal(lambda: console.note(f"{LONG}\n{path}\7"), NO_COLOR="1")
    first, *more, last = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert first.startswith("note: one two") and last == f"      {path}\\x07"
    assert all(line.startswith("      ") for line in more)
    assert all(len(line) <= 40 for line in [first, *more])


def test_only_a_color_terminal_gets_colors(terminal, capsys):
    assert "\x1b[1;31merror:" in terminal(lambda: console.error("no"))
    assert "31m" not in terminal(lambda: console.error("no"), NO_COLOR="1")
    assert terminal(lambda: console.error("no"), TERM="dumb") == "error: no\n"


def test_a_pipe_gets_a_message_in_one_line(capsys):
    console.error(f"{LONG} {LONG}", f"give {LONG}")
    assert capsys.readouterr().err == f"error: {LONG} {LONG}\nhint: give {LONG}\n"


NAME = "transformer.h.0-11.attn.c_attn.weight"


def a_table():
    console.table(("name", ">count"), [(NAME, "1,234"), ("wpe", "5")])


def test_tables_shorten_names_in_the_middle_in_a_terminal(terminal):
    text = re.sub(r"\x1b\[[\d;]*m", "", terminal(a_table, 30))
    head, rule, first, second = text.splitlines()
    assert "name" in head and set(rule) == {"-"} and len(rule) <= 30
    assert first.endswith("c_attn.weight  1,234")
    assert first.startswith("transf") and "..." in first and len(first) <= 30
    assert second.startswith("wpe ") and second.endswith(" 5")


def test_tables_have_whole_names_in_a_pipe(capsys):
    a_table()
    assert NAME in capsys.readouterr().out


def test_the_options_of_a_verb_need_no_slow_import():
    verbs = ", ".join(f"tiedgpt.cli.{v}" for v in ("train", "tune", "generate", "chat", "eval"))
    heavy = "{'torch', 'numba', 'numpy', 'tiedgpt.infer.engine'} & set(sys.modules)"
    code = f"import sys, {verbs}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_an_error_in_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tiedgpt", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (4, "error: no room on the disk for the output\n")


def test_a_training_prints_its_result_on_stdout_and_its_progress_on_stderr(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("cats.txt").write_text("".join(f"{n} cats sat.\n" for n in range(200)))
    quick = ["--steps", "2", "--context", "16", "-b", "2", "-s", "tiny", "--tokenizer", "char"]
    command = ["train", "cats.txt", *quick, "-o", "run", "-f", "json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["run"] == "run" and result["steps"] == 2 and result["val_loss"] > 0
    assert "training  2 steps of 2 x 16 tokens" in err and "AdamW" not in err


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_80_columns_and_has_real_defaults(verb, capsys):
    sub = ["show"] if verb == "tie" else []
    with pytest.raises(SystemExit) as ended:
        main([verb, *sub, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: tiedgpt {verb}")
    assert max(map(len, out.splitlines())) < 80
    for private in ("None", "STR", "{", "default: )", "==SUPPRESS=="):
        assert private not in out.replace('{"', ""), private


def test_every_option_of_train_has_a_heading(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    headings = re.findall(r"^([a-z ]+):$", out, re.MULTILINE)
    order = ["data", "model", "time", "optimization", "memory and speed", "output"]
    assert headings == ["positional arguments", "options", *order]
    (alone,) = re.findall(r"\noptions:\n(.*?)\n\n", out, re.DOTALL)
    assert alone.split()[:2] == ["-h,", "--help"] and "\n" not in alone


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["trian"], "no verb 'trian'", "did you mean train?"),
        (["tie", "shwo"], "VERB must be one of show, audit, fix, got 'shwo' (did you", "--help"),
        (["train", "--mintes", "3"], "has no option --mintes", "did you mean --minutes?"),
        (["generate", "--temp", "0"], "has no option --temp", "did you mean --temperature?"),
        (["train", "--max_new_tokens", "3"], "no option --max-new-tokens", "--help"),
        (["train", "--lr", "fast"], "--lr must be a finite number, got 'fast'", "--help"),
        (["train", "--steps", "1.5"], "--steps must be an integer, got '1.5'", "--help"),
        (["train", "-m"], "--minutes: expected one argument", "--help"),
        (["train", "--task=swim"], "must be one of lm, classify", "--help"),
        (["generate", "run", "Once upon"], "no place for 'Once upon'", "--prompt 'Once upon'"),
        (["generate", "Once upon a time"], "no model", "--prompt 'Once upon a time'"),
        (["convert", "a"], "required: DEST", "--help"),
        (["tie", "fix", "a"], "needs MODEL and DEST", "give both"),
        (["generate", "--max_length", "9"], "no option --max-length", "mean --max-new-tokens?"),
        (["train", "--max-length", "9"], "no option --max-length", "did you mean --context?"),
        (["generate", "--do-sample"], "no option --do-sample", "did you mean --temperature?"),
        (["generate", "--best-of", "2"], "no option --best-of", "use n with a seed"),
        (["chat", "--typical-p", "1"], "no option --typical-p", "use top_p or min_p"),
        (["generate", "--stop-ids", "2"], "no option --stop-ids", "GenerationConfig(stop_ids=)"),
        (["train", "--grad-clip", "1"], "no option --grad-clip", "TrainOptions(grad_clip=)"),
        (["train", "--verbose=yes"], "--verbose: ignored explicit argument 'yes'", "--help"),
        (["inspect", "lenz"], "called 'lenz'", "lens"),
    ],
)
def test_an_invalid_command_is_code_2_with_a_hint(capsys, arguments, says, hint):
    assert main(arguments) == 2
    error, hinted = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and says in error
    assert hinted.startswith("hint: ") and hint in hinted


BOUNDS = {
    "serve --port 65536": "from 0 to 65535", "serve --drain 3601": "from 0 to 3600",
    "serve --slots 0": ">= 1", "serve --queue 0": ">= 1", "chat --seed -1": ">= 0",
    "chat --temperature -1": ">= 0", "chat --max-new-tokens 0": ">= 1",
    "export m page.html --max-size 0": "> 0", "generate m --n-head 0": ">= 1",
    "generate m --threads 257": "from 1 to 256", "inspect lens m --ids 1 --top 0": ">= 1",
    "data show x --context 1": ">= 2", "data show x --examples -1": ">= 0",
    "data prepare x -o y --workers 0": ">= 1", "data prepare x -o y --vocab-size 0": ">= 1",
    "eval m x --limit 0": ">= 1", "train --warmup 2": "from 0 to 1", "tune x --lora 0": ">= 1",
}  # fmt: skip


@pytest.mark.parametrize("command", BOUNDS)
def test_a_number_beyond_its_bounds_is_refused_before_anything_is_opened(capsys, command):
    *_, option, number = command.split()
    assert main(command.split()) == 1
    refusal = f"error: {option} must be an? (integer|finite number) {BOUNDS[command]}, got {number}"
    assert re.match(refusal, capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["generate", "tie show", "convert --to gguf", "explain tie"])
def test_a_folder_of_runs_and_a_run_are_not_confused(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    model = Path("runs", "mine", "model")
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model.parent / "run.toml").write_text('[options]\ntask = "lm"\n')
    assert main([*verb.split(), "runs", *(["x.gguf"] if "convert" in verb else [])]) == 1
    said = "error: runs is a folder of runs\nhint: name one of them, such as runs/mine\n"
    assert capsys.readouterr().err == said
    assert main(["runs", "runs/mine"]) == 1
    assert "a run, not a folder of runs\nhint: use `tiedgpt plot" in capsys.readouterr().err


def test_options_may_be_written_as_in_python_and_stand_anywhere():
    @dataclass(frozen=True, kw_only=True)
    class Arguments:
        source: str | None = argument("A model.", default=None)
        rest: tuple[int, ...] = argument("Numbers.", default=())
        many_ids: tuple[int, ...] = option((), "Ids.")
        stop: tuple[str, ...] = option((), "Texts.", repeated=True)
        is_on: bool = option(True, "95 % off.")

    def read(line):
        given = parse(Arguments, "verb", shlex.split(line), "")
        return given.source, given.rest, given.many_ids, given.stop, given.is_on

    assert read("--stop 'a b' x --stop=c --no-is-on 3 4") == ("x", (3, 4), (), ("a b", "c"), False)
    assert read("--many_ids 1 -2") == (None, (), (1, -2), (), True)
    assert read("-- -x") == ("-x", (), (), (), True)
    with pytest.raises(UsageError, match="REST must be an integer, got 'y'"):
        read("x y")


def test_the_newest_run_of_the_right_kind_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, task in (("old", "lm"), ("new", "classify")):
        model = Path("runs", name, "model")
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model.parent / "run.toml").write_text(f'[options]\ntask = "{task}"\n')
    assert main(["generate"]) == 1
    assert "newest run: runs/old" in capsys.readouterr().err


def test_an_error_names_its_options_as_the_interface_spells_them(capsys):
    error = UserError("exclude each other", hint="omit one", option=("top_k", "num_beams"))
    assert str(error) == "top_k and num_beams exclude each other: omit one"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(NoRoomError("no room", hint="free some")) == "no room: free some"
    assert main(["generate", "x", "--regex", "a", "--json-schema", "{}"]) == 1
    assert capsys.readouterr().err == "error: --regex and --json-schema exclude each other\n"


def test_slow_steps_are_announced_and_quick_ones_are_not(monkeypatch, capsys):
    monkeypatch.setattr("tiedgpt.cli.console.PATIENCE_SECONDS", 0.01)
    with console.waiting("computing"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "note: computing ...\n"
    monkeypatch.setattr("tiedgpt.cli.console.PATIENCE_SECONDS", 60)
    with console.waiting("computing"):
        timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    assert timers and all(timer.finished.is_set() for timer in timers)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 75, "the same command resumes from what was saved.*, or begins"),
        (OSError(errno.EIO, "Input/output error", "a.bin"), 3, "a.bin: Input/output error"),
        (MemoryError(), 4, "out of memory"),
    ],
)
def test_a_training_that_is_ended_says_how(monkeypatch, capsys, error, code, says):
    monkeypatch.setattr("tiedgpt.cli.train.run", mock.Mock(side_effect=error))
    assert main(["train"]) == code
    assert re.search(says, capsys.readouterr().err)


def test_doctor_names_every_optional_feature_and_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr("tiedgpt.cli.doctor.util.find_spec", lambda name: None)
    monkeypatch.setattr("tiedgpt.cli.doctor.NEEDED", ("numpy", "no_such_package"))
    assert main(["doctor", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "no_such_package" in found["missing"]
    assert any("pip install 'tiedgpt[formats]'" in needs for needs in found["formats"].values())
    for extra in ("constrain", "plot", "track"):
        assert f"no: pip install 'tiedgpt[{extra}]'" in found["features"].values()
