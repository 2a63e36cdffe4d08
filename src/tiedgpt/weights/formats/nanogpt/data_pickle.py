"""A pickle of dicts, strings and whole numbers, read without running anything in it.

nanoGPT keeps its character vocabularies in such files (`meta.pkl`). A pickle is a program: each of
its instructions is looked at first, and only then does Python's own unpickler follow them, without
a way to reach any class or function.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

from tiedgpt.files import reading

LARGEST = 4 << 20  # bytes, and
MOST = 1_000_000  # instructions: both more than a vocabulary of all characters of Unicode takes
BEGINS = re.compile(rb"(\x80[\x02-\x05](\x95.{8})?)?(\}|\(d)", re.DOTALL)
"""How such a pickle begins, of any protocol: with the making of a dict."""
STORES = {"PUT", "BINPUT", "LONG_BINPUT"}
ALLOWED = STORES | {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
}  # fmt: skip


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def read_data_pickle(file: Path) -> Any:
    """Return the value in a pickle of any protocol: dicts, strings and whole numbers.

    Raises `CorruptInputError` for anything else that a pickle can hold, before a value is created.
    """
    with reading(file, "pickle of a vocabulary"), file.open("rb") as opened:
        content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes are too many for a vocabulary")
        for number, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if instruction.name not in ALLOWED:
                raise ValueError(
                    f"it holds more than dicts, strings and whole numbers ({instruction.name}), "
                    "which is never run"
                )
            # The unpickler makes room for as many values as a store's index says.
            if number > MOST or (instruction.name in STORES and (argument or 0) > MOST):
                raise ValueError("too many instructions for a vocabulary")
        return _DataOnly(io.BytesIO(content)).load()
