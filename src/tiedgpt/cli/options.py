"""Options of a verb, from a frozen dataclass whose attribute docstrings are the help text."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import tyro

from tiedgpt.errors import UserError

Options = TypeVar("Options")


def parse(
    options: type[Options],
    verb: str,
    arguments: list[str],
    description: str,
    *,
    base: Options | None = None,
) -> Options:
    """Return the options; usage errors and `--help` end the process with codes 2 and 0.

    What is not given is as in `base`.
    """
    return tyro.cli(
        options,
        prog=f"tiedgpt {verb}",
        args=arguments,
        description=description,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
        default=tyro.MISSING_NONPROP if base is None else base,
    )


@contextlib.contextmanager
def naming_options(names: Iterable[str]) -> Iterator[None]:
    """Let errors name options as they are typed: `--max-new-tokens`, not `max_new_tokens`."""
    try:
        yield
    except UserError as error:
        raise type(error)(as_typed(str(error), names)) from None


def as_typed(message: str, names: Iterable[str]) -> str:
    """Write the options that a message names as they are typed.

    A name that is also a word is taken for the option only where the message speaks of it.
    """
    every = sorted(names, key=len, reverse=True)
    nothing = "(?!)"
    long = "|".join(name for name in every if "_" in name) or nothing
    words = "|".join(name for name in every if "_" not in name) or nothing

    def typed(match: re.Match[str]) -> str:
        return f"--{match[0].replace('_', '-')}"

    message = re.sub(rf"\b({'|'.join(every)})=(?:'([\w-]*)')?", r"\1 \2", message)
    of_it = r"(?=,|\)| (?:must|exclude|needs?|cannot|is for|and|[-\d(]))"
    return re.sub(rf"(?<![-\w])(?:(?:{long})\b|(?:{words}){of_it})", typed, message)
