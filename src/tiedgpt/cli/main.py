"""`tiedgpt VERB ...`: finds the verb's file, and turns errors into one line and an exit code.

Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module

from tiedgpt import __version__
from tiedgpt.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    CorruptInputError,
    NoRoomError,
    TiedGPTError,
)

VERBS = {
    "train": "train a GPT on your text, or on Python's own documentation",
    "generate": "continue a text",
    "eval": "how well a model predicts a text, or answers",
    "plot": "the curves of runs, in the terminal or as a figure",
    "inspect": "what a model predicts and why: by position, layer, head, row of W",
    "convert": "any GPT into the format of another tool, proven",
    "tie": "is the head the embedding? show, audit or fix it, in any model or file",
    "doctor": "versions, devices, threads, and what is missing",
}
USAGE = """\
usage: tiedgpt VERB [options]        (tiedgpt VERB --help tells more)

{verbs}

  tiedgpt train                       three minutes on the documentation inside your Python
  tiedgpt train my.txt --size small
  tiedgpt generate --prompt "Return a new"
"""


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
        return _fail(arguments, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_OK
    except OSError as error:
        if error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return _fail(arguments, "no room on the disk for the output", NoRoomError.exit_code)
        if error.errno == errno.EIO:
            place = f"the disk failed at {error.filename or 'a file'}: {error.strerror}"
            return _fail(arguments, place, CorruptInputError.exit_code)
        raise
    except (MemoryError, RuntimeError) as error:
        torch_says = "can't allocate" in str(error) or "out of memory" in str(error)
        if not torch_says and not isinstance(error, MemoryError):
            raise
        said = "out of memory; nothing was left half-written"
        return _fail(arguments, said, NoRoomError.exit_code)


def _run(arguments: list[str]) -> int:
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(USAGE.format(verbs="\n".join(f"  {verb:<8}  {VERBS[verb]}" for verb in VERBS)))
    elif verb in ("-V", "--version"):
        print(f"tiedgpt {__version__}")
    elif verb in VERBS:
        return int(import_module(f"tiedgpt.cli.{verb}").run(rest))
    else:
        print(f"tiedgpt: no verb {verb!r}; there are {', '.join(VERBS)}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _fail(arguments: list[str], message: str, code: int) -> int:
    line = f"tiedgpt {arguments[0] if arguments else ''}: {message}"
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)  # names in files, paths
    print(line.encode("utf-8", "replace").decode(), file=sys.stderr)
    return code
