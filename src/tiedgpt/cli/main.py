"""`tiedgpt VERB ...`: finds the verb's file, and turns errors into one line and an exit code.

Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from tiedgpt.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    NoRoomError,
    TiedGPTError,
)

VERBS = {
    "train": "train a GPT on your text, or on Python's own documentation",
    "generate": "continue a text",
    "tie": "is the head the embedding? show, audit or mend it, in any model or file",
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
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(_usage())
        return EXIT_OK
    if verb in ("-V", "--version"):
        from tiedgpt import __version__

        print(f"tiedgpt {__version__}")
        return EXIT_OK
    if verb not in VERBS:
        print(f"tiedgpt: no verb {verb!r}; there are {', '.join(VERBS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        code = import_module(f"tiedgpt.cli.{verb}").run(rest)
        sys.stdout.flush()
        return int(code)
    except TiedGPTError as error:
        print(f"tiedgpt {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"tiedgpt {verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MemoryError:
        print(f"tiedgpt {verb}: out of memory; nothing was left half-written", file=sys.stderr)
        return NoRoomError.exit_code
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _usage() -> str:
    width = max(map(len, VERBS))
    return USAGE.format(verbs="\n".join(f"  {verb:<{width}}  {VERBS[verb]}" for verb in VERBS))
