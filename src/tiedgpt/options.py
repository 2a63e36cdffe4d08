"""Options are declared once, as fields of dataclasses that carry their own help.

    @dataclass(frozen=True, kw_only=True)
    class Arguments:
        source: str = argument("The model's directory.")
        top_k: int | None = option(None, "Sample from the k likeliest tokens.", "sampling")

The library reads such a dataclass as any other; the command line makes `--top-k` of the same field
(`cli/options.py`), and the server a field of its requests. The bounds of a number stand with it:
`signatures.check_fields` compares them for all. A class may have a table `DEFAULTS`: the default of
an option in words, by the verb and the option's name. Like `errors`, this imports nothing heavy and
everyone may import it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, field
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeVar

from tiedgpt.errors import UserError

Number = TypeVar("Number", int, float)
SIGNS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": (">=", operator.ge),
    "most": ("<=", operator.le),
    "above": (">", operator.gt),
    "below": ("<", operator.lt),
}
"""The comparisons that bounds of a number stand for."""
MAX_INT = 2**63 - 1
NUMBER_WORDS = {int: "an integer", float: "a finite number"}


def option(
    default: Any = MISSING,
    help: str = "",
    group: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    served: Mapping[str, float] | None = None,
    metavar: str = "",
    short: str = "",
    repeated: bool = False,
    choices: Callable[[], tuple[str, ...]] | None = None,
    verbs: Mapping[str, Mapping[str, Any]] | None = None,
    **facts: Any,
) -> Any:
    """Return a dataclass field for an option of the command line, or of Python without a `help`.

    A number is from `least` to `most`, or between `above` and `below`; `served` are narrower bounds
    of the server, by these names. The option is listed under the heading `group`, or else under the
    `GROUP` of its class. In the help, `metavar` stands for its value, and `short` is its letter. A
    `repeated` option may be given several times; its type is a tuple. `choices` returns the allowed
    values, if its type does not name them. An option whose `default` is `MISSING` is required.
    `verbs` are the only verbs with this option, each with arguments that replace these, or with
    `long`, a name that is not the field's; None: every verb that takes the dataclass has it. Other
    `facts` are for the class itself.
    """
    bounds = {"least": least, "most": most, "above": above, "below": below}
    facts["bounds"] = {name: bound for name, bound in bounds.items() if bound is not None}
    facts["served"] = facts["bounds"] | (served or {})
    facts["choices"] = choices
    if help:
        facts.update(help=help, group=group, metavar=metavar, short=short)
        facts.update(repeated=repeated, verbs=verbs)
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


def read_number(name: str, value: Any, cls: type[Number], **bounds: float) -> Number:
    """Return a finite number within bounds, which may be one of NumPy or torch.

    An integer has at most 64 bits. Anything else, a bool too, is a `UserError`.
    """
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()
    try:
        number = cls(operator.index(value)) if cls is int else cls(value)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        is_number = is_number and (number <= MAX_INT if cls is int else math.isfinite(number))
    except (TypeError, ValueError, OverflowError):  # "5", 1.5 as an integer, 10**400 as a float
        number, is_number = cls(0), False
    if not is_number or not all(SIGNS[key][1](number, bound) for key, bound in bounds.items()):
        limits = [f"{SIGNS[key][0]} {bound}" for key, bound in bounds.items()]
        if {"least", "most"} <= bounds.keys():
            limits = [f"from {bounds['least']} to {bounds['most']}"]
        limits += ["< 2**63"] if cls is int and number > MAX_INT and "most" not in bounds else []
        words = " ".join([NUMBER_WORDS[cls], " and ".join(limits)])
        raise UserError(f"must be {words.strip()}, got {value!r}", option=name)
    return number


def option_of_verb(field: Field[Any], verb: str) -> Field[Any] | None:
    """Return the field with a verb's help, flag and default; None if the verb does not have it."""
    verbs = field.metadata.get("verbs")
    if verbs is None:
        return field
    if verb not in verbs:
        return None
    field, changes = copy(field), verbs[verb]
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
