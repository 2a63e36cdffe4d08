"""Options that are declared once: fields of dataclasses that carry their own help.

    @dataclass(frozen=True, kw_only=True)
    class Arguments:
        source: str = argument("The model's directory.")
        top_k: int | None = option(None, "Sample from the k likeliest tokens.", "sampling")

The library reads such a dataclass as any other; the command line makes `--top-k` of the same field
(`cli/options.py`). Like `errors`, this imports nothing heavy and everyone may import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any


def option(
    default: Any,
    help: str,
    group: str = "options",
    *,
    metavar: str = "",
    short: str = "",
    repeated: bool = False,
    choices: Callable[[], tuple[str, ...]] | None = None,
) -> Any:
    """Return a field that is an option of the command line.

    It is listed under the heading `group`. In the help, `metavar` stands for its value; `short` is
    its letter. A `repeated` option may be given several times; its type is a tuple. `choices`
    returns the values that it may have, where its type does not name them. An option whose
    `default` is `MISSING` is required.
    """
    facts = {"help": help, "group": group, "metavar": metavar, "short": short}
    return field(default=default, metadata=facts | {"repeated": repeated, "choices": choices})


def argument(help: str, *, default: Any = MISSING, metavar: str = "") -> Any:
    """Return a field that is an argument without a flag; of a tuple's type, it takes all left."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "positional": True})
