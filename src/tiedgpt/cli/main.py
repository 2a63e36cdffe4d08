"""`tiedgpt VERB ...`: finds the verb's file, and turns errors into a line, a hint and an exit code.

Results go to stdout, progress and errors to stderr. A verb's `run` returns an exit code, or None
if all is well; warnings become notes.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from importlib import import_module

from tiedgpt import __version__
from tiedgpt.errors import EXIT_INTERRUPTED, EXIT_OK, CorruptInputError, NoRoomError, TiedGPTError

VERBS = {
    "train": "train a GPT on your text, or on Python's own documentation",
    "tune": "fine-tune any GPT on your text, or on examples with replies",
    "generate": "continue a text",
    "chat": "chat with a model that was tuned on messages",
    "classify": "label texts, or choose continuations, with a model of `train --task`",
    "eval": "measure how well a model predicts a text, or answers questions",
    "runs": "list the runs with their scores",
    "plot": "plot the curves of runs, in the terminal or as a figure",
    "serve": "serve a model with OpenAI's API, and a page that shows what it computes",
    "inspect": "show what a model predicts and why: by position, layer, head, row of W",
    "export": "write a model as one HTML file that computes in a browser",
    "explain": "lessons measured on a model: the tie, the head, the loss",
    "convert": "write any GPT in another tool's format, and check the file",
    "push": "send a model to the Hugging Face hub, with its card",
    "tie": "is the head the embedding? show, audit or fix any model or file",
    "data": "prepare texts of any size, or show which tokens of examples are trained",
    "doctor": "show versions, devices, threads, and missing packages",
}
EXAMPLES = """\
  tiedgpt train                   three minutes on Python's own documentation
  tiedgpt train my.txt --size small
  tiedgpt generate --prompt "Return a new"
"""
EXIT_CODES = {
    0: "done",
    1: "the request cannot be met",
    2: "the command cannot be understood",
    3: "an input file is damaged",
    4: "not enough memory or disk space",
    5: "training diverged",
    6: "a check failed",
    75: "interrupted and saved; the same command resumes",
    130: "ended at once by a second Ctrl-C; resumes from the last checkpoint",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except TiedGPTError as error:
        return _fail(error)
    except KeyboardInterrupt:
        hint = None
        if arguments and arguments[0] in ("train", "tune"):
            hint = "the same command resumes from what was saved before, or begins again"
        if arguments and arguments[:2] == ["data", "prepare"]:
            hint = "the same command goes on after the parts that are encoded, or begins again"
        return _fail(TiedGPTError("interrupted", hint=hint), EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_OK
    except OSError as error:
        if error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return _fail(NoRoomError("no room on the disk for the output"))
        if error.errno == errno.EIO:
            problem = f"the disk failed at {error.filename or 'a file'}: {error.strerror}"
            return _fail(CorruptInputError(problem))
        raise
    except (MemoryError, RuntimeError) as error:
        torch_says = "can't allocate" in str(error) or "out of memory" in str(error)
        if not torch_says and not isinstance(error, MemoryError):
            raise
        return _fail(NoRoomError("out of memory; no partial file is left"))


def _run(arguments: list[str]) -> int:
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        _show_verbs()
    elif verb in ("-V", "--version"):
        print(f"tiedgpt {__version__}")
    elif verb in VERBS:
        from tiedgpt.cli.console import note

        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: note(str(message))
            return int(import_module(f"tiedgpt.cli.{verb}").run(rest) or EXIT_OK)
    else:
        from tiedgpt.cli.options import unknown_verb

        raise unknown_verb(verb, VERBS)
    return EXIT_OK


def _show_verbs() -> None:
    from rich.text import Text

    from tiedgpt.cli.console import console, say

    to = console()
    to.print(Text.assemble(("usage: tiedgpt VERB", "bold"), " [options]\n"))
    for verb, about in VERBS.items():
        say(f"  {verb:<9}", about, style="cyan", to=to)
    to.print(Text.assemble(("\nexamples", "bold"), f"\n{EXAMPLES}"))
    to.print(Text("exit codes", "bold"))
    for code, about in EXIT_CODES.items():
        to.print(f"  {code:>3}  {about}")
    to.print("\n`tiedgpt VERB --help` tells more.")


def _fail(error: TiedGPTError, code: int | None = None) -> int:
    """Show an error and its hint, with options in their command-line form; return the exit code."""
    from tiedgpt.cli import console

    console.error(error.problem(lambda name: f"--{name.replace('_', '-')}"), error.hint)
    return error.exit_code if code is None else code
