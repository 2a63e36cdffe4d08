"""The options of a verb: a frozen dataclass, whose attribute docstrings are the help text.

Its fields become arguments of `argparse`; help and errors are written here, in the style of
`cli/console.py`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rich.text import Text

from tiedgpt.cli.console import console, wrapped
from tiedgpt.errors import EXIT_USAGE, TiedGPTError

T = TypeVar("T")
Options = TypeVar("Options")
Positional = Annotated[T, "positional"]
"""An argument that has no flag; a tuple takes all that are left."""
Repeated = Annotated[T, "repeated"]
"""An option that may be given several times; its type is a tuple."""
SHORT = {
    "batch_size": "b", "format": "f", "max_new_tokens": "n", "minutes": "m", "out": "o",
    "prompt": "p", "size": "s", "temperature": "t", "verbose": "v",
}  # fmt: skip
"""One letter for the common options; it means the same in every verb."""
VALUES = {
    "data": "DATA", "fork": "RUN", "grammar": "FILE",
    "json_schema": "FILE", "memory": "SIZE", "out": "PATH", "regex": "REGEX", "runs": "RUN",
    "size": "SIZE", "source": "MODEL", "dest": "DEST", "start": "MODEL", "tokenizer": "TOKENIZER",
    "val": "DATA", "text_field": "NAME", "input": "NAME", "output": "NAME", "folder": "FOLDER",
    "topic": "TOPIC", "name": "NAME", "token": "TOKEN", "from_": "MODEL", "adapter": "FOLDER",
}  # fmt: skip
"""What stands for an option's value in the help, where its type does not tell."""
KINDS = {int: ("N", "a whole number"), float: ("X", "a number"), Path: ("FILE", "a file's name")}
HELP_COLUMN = 26
HELP_WIDTH = (60, 100)
"""The least and the most columns of help."""


class UsageError(TiedGPTError):
    """A command that cannot be understood; `hint` says what is meant instead."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)


@dataclass(frozen=True)
class Option:
    """A field of a verb's options, as help, errors and `argparse` need it."""

    name: str
    flags: tuple[str, ...]
    """Long, then short; none for a positional argument."""
    kind: Any
    """What makes the value from its text; bool for a switch."""
    value: str
    """The placeholder of its value; "" for a switch."""
    expected: str
    """What its value must be; "" for a switch."""
    choices: tuple[str, ...]
    about: str
    default: Any
    required: bool
    many: bool
    """Whether it takes several values at once."""
    repeated: bool
    """Whether it may be given several times."""

    @property
    def typed(self) -> str:
        """The option as it is typed: `-m, --minutes X`."""
        value = f"{self.value} ..." if self.many else self.value
        if not self.flags:
            return value if self.required else f"[{value}]"
        short = f"{self.flags[1]}, " if len(self.flags) > 1 else "    "
        return f"{short}{self.flags[0]} {value}".rstrip()


def parse(
    options: type[Options],
    verb: str,
    arguments: Sequence[str],
    description: str,
    *,
    base: Options | None = None,
    groups: Mapping[str, str] | None = None,
) -> Options:
    """Return the options; `UsageError` for what cannot be understood, `SystemExit(0)` after help.

    What is not given is as in `base`. `groups` are the help's headings, each with the names of its
    options, separated by blanks.
    """
    known = describe(options)
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("-h", "--help", action="store_true")
    for option in filter(lambda option: option.flags, known):
        how: dict[str, Any] = {"type": partial(_read, option, verb)}
        if option.kind is bool:
            how = {"action": "store_const", "const": not option.default}
        elif option.many or option.repeated:
            how |= {"nargs": "+"} if option.many else {"action": "append"}
        long, *short = option.flags
        flags = dict.fromkeys((long, f"--{long[2:].replace('-', '_')}", *short))
        parser.add_argument(*flags, dest=option.name, **how)
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        named = (error.argument_name or "").split("/")[0]
        expected = next((option.expected for option in known if named in option.flags), "")
        needs = f"needs a value: {expected}" if expected else "takes no value"
        raise UsageError(f"{named} {needs}", _all_options(verb)) from None
    given = vars(found)
    if given.pop("help", False):
        show_help(known, verb, description, groups or {})
        raise SystemExit(0)
    given |= _positional(known, rest, verb)
    if base is None and any(option.required and option.name not in given for option in known):
        needed = " and ".join(option.value for option in known if option.required)
        raise UsageError(f"`tiedgpt {verb}` needs {needed}", _all_options(verb))
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return options(**values) if base is None else replace(base, **values)  # type: ignore[type-var]


def _read(option: Option, verb: str, text: str) -> Any:
    """Return the value that a text stands for; `UsageError` if it is not what is expected."""
    dashed = text.replace("_", "-")  # as functions of Python are named
    text = dashed if dashed in option.choices else text
    try:
        if not option.choices or text in option.choices:
            return option.kind(text)
    except ValueError:
        pass
    named = option.flags[0] if option.flags else option.value
    hint = f"{_meant(text, option.choices)}{_all_options(verb)}"
    raise UsageError(f"{named} must be {option.expected}, got {text!r}", hint)


def _positional(options: Sequence[Option], rest: list[str], verb: str) -> dict[str, Any]:
    """Return the arguments that have no flag, by name, from what no option took."""
    end = rest.index("--") if "--" in rest else len(rest)
    for argument in rest[:end]:
        if argument.startswith("-") and argument != "-":
            raise _unknown(argument, options, verb)
    texts, found = rest[:end] + rest[end + 1 :], dict[str, Any]()
    for option in options:
        if texts and not option.flags:
            taken = texts[:] if option.many else texts[:1]
            values = [_read(option, verb, text) for text in taken]
            found[option.name] = values if option.many else values[0]
            del texts[: len(taken)]
    if texts:
        raise _unknown(texts[0], options, verb)
    return found


def describe(options: type) -> list[Option]:
    """Return what help, errors and the parser need of a dataclass's options, its own first.

    The fields that a class names in `HIDDEN` are not asked for on the command line.
    """
    abouts: dict[str, str] = {}
    for each in reversed(options.__mro__[:-1]):
        abouts |= _docstrings(each)
    hints = get_type_hints(options, include_extras=True)
    found = []
    own = options.__annotations__  # a verb's own options come before those that many have
    for one in sorted(dataclasses.fields(options), key=lambda field: field.name not in own):
        if one.name in getattr(options, "HIDDEN", ()):
            continue
        hint, mark = hints[one.name], None
        if get_origin(hint) is Annotated:
            hint, mark = get_args(hint)
        if callable(mark):  # its choices are known when it is asked
            hint = Literal[mark()]
        kind, value, expected, choices = _value(one.name, hint)
        no = "no-" if one.default is True else ""
        flags = [f"--{no}{one.name.rstrip('_').replace('_', '-')}"]  # from_: no word of Python
        flags += [f"-{SHORT[one.name]}"] if one.name in SHORT else []
        about = one.metadata.get("help") or abouts.get(one.name, "")
        if mark == "positional":
            flags = []
            if choices:
                value, about = one.name.upper(), f"{about.rstrip('.')}: {expected}"
        about, required = _with_default(about, one.default), one.default is dataclasses.MISSING
        repeated = mark == "repeated"
        many = get_origin(hint) is tuple and not repeated
        found.append(
            Option(one.name, tuple(flags), kind, value, expected, choices, about, one.default,
                   required, many, repeated)
        )  # fmt: skip
    return found


def _with_default(text: str, value: Any) -> str:
    """Return what the help says of an option, its default last; the text itself may tell it."""
    about, _, default = text.partition("default: ")
    default, _, rest = default.partition(". ")
    about = f"{about.rstrip(' ;.(')}. {rest}" if rest else about
    if not default and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        default = f"{value:g}" if isinstance(value, float) else f"{value}"
    about, default = about.rstrip(" ;.("), default.rstrip(".)")
    return f"{about} (default: {default})" if default else about


def _docstrings(options: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, each in one line."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for attribute, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(attribute, ast.AnnAssign) and isinstance(text, ast.Expr):
            if isinstance(attribute.target, ast.Name) and isinstance(text.value, ast.Constant):
                found[attribute.target.id] = " ".join(str(text.value.value).split())
    return found


def _value(name: str, hint: Any) -> tuple[Any, str, str, tuple[str, ...]]:
    """Return what makes an option's value, its placeholder, what it must be, and its choices."""
    if hint is bool:
        return bool, "", "", ()
    kinds = [k for k in _flat(hint) if k not in (None, type(None), ...)]
    choices = tuple(str(choice) for choice in kinds if not isinstance(choice, type))
    if choices:
        many = f"one of {', '.join(choices)}" if choices[1:] else choices[0]
        return str, "|".join(choices), many, choices
    placeholder, expected = KINDS.get(kinds[0], ("TEXT", "a text"))
    return kinds[0], VALUES.get(name, placeholder), expected, ()


def _flat(hint: Any) -> list[Any]:
    """Return the types and literals of which a type is made."""
    return [each for arg in get_args(hint) for each in _flat(arg)] or [hint]


def show_help(
    options: Sequence[Option], verb: str, description: str, groups: Mapping[str, str]
) -> None:
    """Print the help of a verb on stdout."""
    to = console()
    width = min(max(to.width, HELP_WIDTH[0]), HELP_WIDTH[1]) - 1
    named = {option.name: option for option in options}
    positional = [option for option in options if not option.flags]
    sections = {"arguments": positional}
    for heading, names in groups.items():
        sections[heading] = [named[name] for name in names.split() if name in named]
    shown = {option.name for section in sections.values() for option in section}
    rest = [option for option in options if option.name not in shown]
    sections["other options" if groups else "options"] = rest
    usage = " ".join(["usage: tiedgpt", verb, *(option.typed for option in positional)])
    to.print(Text.assemble((usage, "bold"), " [options]\n"))
    for block in description.strip().split("\n\n"):
        to.print(f"{block if '  ' in block else textwrap.fill(block, width)}\n")
    for heading, section in sections.items():
        if section:
            entries = [_entry(option, width) for option in section]
            to.print(Text("\n").join([Text(heading, "bold"), *entries, Text()]))


def _entry(option: Option, width: int) -> Text:
    """Return an option's lines of help."""
    typed = f"  {option.typed}"
    below = f"\n{' ' * HELP_COLUMN}"
    gap = below if len(typed) > HELP_COLUMN - 2 else " " * (HELP_COLUMN - len(typed))
    lines = below.join(wrapped(option.about, width - HELP_COLUMN))
    return Text.assemble((typed, "cyan"), gap, lines)


def no_verb(verb: str, verbs: Collection[str]) -> UsageError:
    """Return the error for a verb that there is not."""
    hint = f"{_meant(verb, verbs)}`tiedgpt --help` lists all: {', '.join(verbs)}"
    return UsageError(f"`tiedgpt` has no verb {verb!r}", hint)


def _meant(text: str, known: Collection[str]) -> str:
    """Return a question after the name that begins so, or that is nearest; "" for none."""
    begin = [name for name in known if name.startswith(text)]
    near = begin or get_close_matches(text, list(known), cutoff=0.7)
    return f"did you mean {near[0]}? " if near else ""


def _unknown(argument: str, options: Sequence[Option], verb: str) -> UsageError:
    """Return the error for an argument that no option takes."""
    if not argument.startswith("-"):
        takes = ", ".join(option.value for option in options if not option.flags) or "none"
        hint = f"its arguments are: {takes}; {_all_options(verb)}"
        if any(option.name == "prompt" for option in options):
            hint = prompt_hint(argument)
        return UsageError(f"`tiedgpt {verb}` has no place for {argument!r}", hint)
    from tiedgpt.infer.options import OTHER_NAMES

    typed = argument.partition("=")[0]
    known = {option.name: option.flags[0] for option in options if option.flags}
    other = OTHER_NAMES.get(typed.lstrip("-").replace("-", "_"))
    if other is not None and "max_new_tokens" in known:
        there = f"did you mean {known[other]}? " if other in known else f"it is {other} of Engine; "
        return UsageError(f"`tiedgpt {verb}` has no option {typed}", there + _all_options(verb))
    flags = [flag for option in options for flag in option.flags]
    near = _meant(typed.replace("_", "-"), flags)
    return UsageError(f"`tiedgpt {verb}` has no option {typed}", near + _all_options(verb))


def _all_options(verb: str) -> str:
    return f"`tiedgpt {verb} --help` lists all options"


def prompt_hint(text: str) -> str:
    """Return the hint for a prompt in another argument's place."""
    return f"a text to continue goes after --prompt: --prompt {shlex.quote(text)}"
