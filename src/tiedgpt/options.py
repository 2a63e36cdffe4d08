"""Options are declared once, as fields of dataclasses that carry their own help.

    @dataclass(frozen=True, kw_only=True)
    class Arguments:
        source: str = argument("The model's directory.")
        top_k: int | None = option(None, "Sample from the k likeliest tokens.", "sampling")

The library reads such a dataclass as any other; the command line makes `--top-k` of the same field
(`cli/options.py`). A class may have a table `DEFAULTS`: the default of an option in words, by the
verb and the option's name. Like `errors`, this imports nothing heavy and everyone may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, field
from types import MappingProxyType
from typing import Any


def option(
    default: Any,
    help: str,
    group: str = "",
    *,
    metavar: str = "",
    short: str = "",
    repeated: bool = False,
    choices: Callable[[], tuple[str, ...]] | None = None,
    verbs: Mapping[str, Mapping[str, Any]] | None = None,
    **facts: Any,
) -> Any:
    """Return a dataclass field for an option of the command line.

    It is listed under the heading `group`, or else under the `GROUP` of its class. In the help,
    `metavar` stands for its value, and `short` is its letter. A `repeated` option may be given
    several times; its type is a tuple. `choices` returns the allowed values, if its type does not
    name them. An option whose `default` is `MISSING` is required. `verbs` are the only verbs with
    this option, each with arguments that replace these, or with `long`, a name that is not the
    field's; None: every verb that takes the dataclass has it. Other `facts` are for the class
    itself.
    """
    facts |= {
        "help": help, "group": group, "metavar": metavar, "short": short, "repeated": repeated,
        "choices": choices, "verbs": verbs,
    }  # fmt: skip
    return field(default=default, metadata=facts)


def argument(
    help: str,
    *,
    default: Any = MISSING,
    metavar: str = "",
    verbs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Return a field that is an argument without a flag; of a tuple's type, it takes all left."""
    facts = {"help": help, "metavar": metavar, "positional": True, "verbs": verbs}
    return field(default=default, metadata=facts)


def is_option_of(field: Field[Any], verb: str) -> bool:
    """Whether a verb has the option of a field."""
    verbs = field.metadata.get("verbs")
    return verbs is None or verb in verbs


def option_of_verb(field: Field[Any], verb: str) -> Field[Any]:
    """Return the field with the help, the flag and the default that a verb has for it."""
    changes = (field.metadata.get("verbs") or {}).get(verb, {})
    if not changes:
        return field
    field = copy(field)
    field.default = changes.get("default", field.default)
    field.metadata = MappingProxyType({**field.metadata, **changes})
    return field


def is_argument(field: Field[Any]) -> bool:
    """Whether a field has no flag."""
    return "positional" in field.metadata


def flag(field: Field[Any]) -> str:
    """Return the flag of a field, such as `--top-k`, or the placeholder of an argument."""
    if is_argument(field):
        return str(field.metadata["metavar"] or field.name.upper())
    no = "no-" if field.default is True else ""
    return f"--{no}{field.metadata.get('long') or field.name.replace('_', '-')}"


_OWN_HEAD = "use an encoder with transformers; examples/own_task.py shows a head of one's own"
REMOVED_VALUES = {("task", "tag"): _OWN_HEAD, ("task", "answer"): _OWN_HEAD}
"""Tasks of other libraries, with what to use instead."""
