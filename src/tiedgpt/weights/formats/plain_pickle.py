"""A pickle of dicts, strings and whole numbers -> these, without running it.

A pickle is a program, and running one from elsewhere may do anything. Here its instructions are
only read, and only those that build a dict, a string or a number are followed: the first other one
refuses the file. nanoGPT keeps its character vocabularies in such files.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError

LARGEST = 4 << 20  # bytes, and
_MOST = 1_000_000  # instructions: both more than a vocabulary of all characters of Unicode takes
BEGINS = re.compile(rb"(\x80[\x02-\x05](\x95.{8})?)?(\}|\(d)", re.DOTALL)
"""How such a pickle begins, of any protocol: with the making of a dict."""

_VALUES = {
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
}  # fmt: skip
_STORES = {"PUT", "BINPUT", "LONG_BINPUT"}
_SAYS_NOTHING = {"PROTO", "FRAME"}
_FETCHES = {"GET", "BINGET", "LONG_BINGET"}


class _RefusedError(Exception):
    """An instruction that is not followed."""


def read_plain_pickle(file: Path) -> Any:
    """Return the value in a pickle of any protocol: dicts, strings and whole numbers.

    Raises CorruptInputError for whatever else a pickle can hold, none of which is made.
    """
    try:
        size = file.stat().st_size
        if size > LARGEST:
            raise CorruptInputError(
                f"{file}: {size:,} bytes are too many for a vocabulary; check the file"
            )
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check the file") from error
    try:
        return _built(
            (instruction.name, argument) for instruction, argument, _ in pickletools.genops(content)
        )
    except _RefusedError as error:
        raise CorruptInputError(
            f"{file}: a pickle of more than dicts, strings and whole numbers ({error}), which is "
            f"never run; check where it comes from"
        ) from None
    except Exception as error:  # whatever is wrong with its bytes or their order
        why = " ".join(str(error).split())[:100]
        raise CorruptInputError(
            f"{file}: no pickle, or a damaged one ({why}); get it again from where it came from"
        ) from None


def _built(instructions: Iterable[tuple[str, Any]]) -> Any:
    """What the instructions build on their stack."""
    stack: list[Any] = []
    marks: list[int] = []  # where in the stack each open group of items begins
    memo: dict[int, Any] = {}

    def grouped() -> dict[Any, Any]:
        """Take the newest group off: a key, its value, a key, ..."""
        start = marks.pop()
        keys, values = stack[start::2], stack[start + 1 :: 2]
        del stack[start:]
        return dict(zip(keys, values, strict=True))

    for number, (name, argument) in enumerate(instructions):
        if number == _MOST:
            raise ValueError("too many instructions for a vocabulary")
        if name in _VALUES:
            stack.append(argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "DICT":
            stack.append(grouped())
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            group = grouped()
            stack[-1].update(group)
        elif name in _STORES:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _FETCHES:
            stack.append(memo[argument])
        elif name == "STOP":
            return stack.pop()
        elif name not in _SAYS_NOTHING:
            raise _RefusedError(name)
    raise ValueError("it does not end")
