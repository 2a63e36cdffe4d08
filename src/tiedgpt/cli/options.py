"""The options of a verb: a frozen dataclass, whose attribute docstrings are the help text."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from tiedgpt.errors import EXIT_USAGE, TiedGPTError

Options = TypeVar("Options")
SHORT = {
    "batch_size": "b", "format": "f", "max_new_tokens": "n", "minutes": "m", "out": "o",
    "prompt": "p", "size": "s", "temperature": "t", "verbose": "v",
}  # fmt: skip
"""One letter for the common options; it means the same in every verb."""
VALUES = {
    "calibrate": "TEXT", "compare": "'OPTIONS'", "data": "DATA", "fork": "RUN", "grammar": "FILE",
    "json_schema": "FILE", "memory": "SIZE", "out": "PATH", "regex": "REGEX", "runs": "RUN",
    "size": "SIZE", "source": "SOURCE", "dest": "DEST", "start": "MODEL", "tokenizer": "TOKENIZER",
    "val": "DATA", "text_field": "NAME", "bad_words": "TEXT", "input": "NAME", "output": "NAME",
    "folder": "FOLDER", "topic": "TOPIC",
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
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Option:
    """What help and errors say of an option."""

    name: str
    flags: tuple[str, ...]
    """None for a positional argument."""
    value: str
    """The placeholder of its value; "" for a switch."""
    expected: str
    """What its value must be."""
    about: str
    default: str
    required: bool
    many: bool

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
    arguments: list[str],
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
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "-h" in own or "--help" in own:
        show_help(known, verb, description, groups or {})
        raise SystemExit(0)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given, unknown = tyro.cli(
                _with_short(options, known),
                prog=f"tiedgpt {verb}",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
                default=tyro.MISSING_NONPROP if base is None else base,
                return_unknown_args=True,
                add_help=False,
            )
    except SystemExit:
        raise _refused(said.getvalue(), known, verb, arguments) from None
    if unknown:
        raise _unknown(unknown[0], known, verb)
    return given


def describe(options: type) -> list[Option]:
    """Return what help and errors say of the options of a dataclass, in its order."""
    abouts: dict[str, str] = {}
    for each in reversed(options.__mro__[:-1]):
        abouts |= _docstrings(each)
    hints = get_type_hints(options, include_extras=True)
    found = []
    for one in dataclasses.fields(options):
        marks: tuple[Any, ...] = ()
        hint = hints[one.name]
        while get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            marks += tuple(more)
        if tyro.conf.Suppress in marks:
            continue
        about, _, default = abouts.get(one.name, "").partition("default: ")
        default, _, rest = default.partition(". ")
        about = f"{about.rstrip(' ;.(')}. {rest}" if rest else about
        positional = tyro.conf.Positional in marks
        required = one.default in (dataclasses.MISSING, tyro.MISSING)
        if not default and one.default not in (None, "", ()) and not isinstance(one.default, bool):
            number = isinstance(one.default, float)
            default = "" if required else f"{one.default:g}" if number else f"{one.default}"
        no = "no-" if one.default is True else ""
        flags = [f"--{no}{one.name.replace('_', '-')}"]
        flags += [f"-{SHORT[one.name]}"] if one.name in SHORT else []
        value, expected = _value(one.name, hint)
        if positional and "|" in value:
            value, about = one.name.upper(), f"{about.rstrip('.')}: {expected}"
        found.append(
            Option(
                one.name,
                () if positional else tuple(flags),
                value,
                expected,
                about.rstrip(" ;.("),
                default.rstrip(".)"),
                required,
                get_origin(hint) is tuple and tyro.conf.UseAppendAction not in marks,
            )
        )
    return found


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


def _value(name: str, hint: Any) -> tuple[str, str]:
    """Return the placeholder of an option's value, and in words what it must be."""
    if hint is bool:
        return "", "nothing"
    kinds = [kind for kind in get_args(hint) or (hint,) if kind not in (type(None), ...)]
    literals = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
    if get_origin(hint) is Literal:
        literals = list(get_args(hint))
    if literals:
        choices = [str(choice) for choice in literals if choice is not None]
        return "|".join(choices), f"one of {', '.join(choices)}" if choices[1:] else choices[0]
    value, expected = KINDS.get(kinds[0], ("TEXT", "a text"))
    return VALUES.get(name, value), expected


def _with_short(options: type[Options], known: Sequence[Option]) -> type[Options]:
    """Return the dataclass with the short flags of its options."""
    hints = get_type_hints(options, include_extras=True)
    short = [
        (
            option.name,
            Annotated[hints[option.name], tyro.conf.arg(aliases=option.flags[1:])],
            field(default=getattr(options, option.name)),
        )
        for option in known
        if len(option.flags) > 1
    ]
    return dataclasses.make_dataclass(
        options.__name__, short, bases=(options,), frozen=True, kw_only=True
    )


def show_help(
    options: Sequence[Option], verb: str, description: str, groups: Mapping[str, str]
) -> None:
    """Print the help of a verb on stdout."""
    from rich.text import Text

    from tiedgpt.cli.console import console

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


def _entry(option: Option, width: int) -> Any:
    """Return an option's lines of help."""
    from rich.text import Text

    about = option.about
    if option.default:
        about += f" (default: {option.default})"
    lines = textwrap.wrap(
        about, width - HELP_COLUMN, break_long_words=False, break_on_hyphens=False
    )
    typed = f"  {option.typed}"
    below = f"\n{' ' * HELP_COLUMN}"
    gap = below if len(typed) > HELP_COLUMN - 2 else " " * (HELP_COLUMN - len(typed))
    return Text.assemble((typed, "cyan"), gap, below.join(lines))


def no_verb(verb: str, verbs: Iterable[str], program: str) -> UsageError:
    """Return the error for a verb that there is not."""
    near = difflib.get_close_matches(verb, verbs, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return UsageError(
        f"`{program}` has no verb {verb!r}",
        f"{meant}`{program} --help` lists all: {', '.join(verbs)}",
    )


def _unknown(argument: str, options: Sequence[Option], verb: str) -> UsageError:
    """Return the error for an argument that no option takes."""
    help_ = f"`tiedgpt {verb} --help` lists all options"
    if not argument.startswith("-"):
        takes = ", ".join(option.value for option in options if not option.flags) or "none"
        hint = f"its arguments are: {takes}; {help_}"
        if any(option.name == "prompt" for option in options):
            hint = prompt_hint(argument)
        return UsageError(f"`tiedgpt {verb}` has no place for {argument!r}", hint)
    typed = argument.partition("=")[0]
    flags = [flag for option in options for flag in option.flags]
    near = difflib.get_close_matches(typed.replace("_", "-"), flags, n=1)
    near = near or [flag for flag in flags if flag.startswith(typed) and typed.startswith("--")][:1]
    meant = f"did you mean {near[0]}? {help_}" if near else help_
    return UsageError(f"`tiedgpt {verb}` has no option {typed}", meant)


def prompt_hint(text: str) -> str:
    """Return the hint for a prompt in another argument's place."""
    return f"a text to continue goes after --prompt: --prompt {shlex.quote(text)}"


def _refused(said: str, options: Sequence[Option], verb: str, arguments: list[str]) -> UsageError:
    """Return the error for what tyro refused, which names the option first."""
    hint = f"`tiedgpt {verb} --help` lists all options"
    if "Required" in said:
        needed = " and ".join(option.value for option in options if option.required)
        return UsageError(f"`tiedgpt {verb}` needs {needed}", hint)
    flags = {flag: option for option in options for flag in option.flags}
    option = next((flags[f] for f in re.findall(r"--[\w-]+", said) if f in flags), None)
    if option is None:
        plain = " ".join(re.sub(r"[^\w\s'\"(),.:/<>=-]", " ", said).split())
        choice = re.search(r"invalid choice ('.*?') for argument '(\w+)'", plain)
        for option in options:
            if choice and option.value == choice[2].upper():
                plain = f"{option.value} must be {option.expected}, got {choice[1]}"
        return UsageError(plain, hint)
    for number, argument in enumerate(arguments, start=1):
        typed, is_joined, value = argument.partition("=")
        if typed.replace("_", "-") in option.flags:
            if not is_joined and number == len(arguments):
                break
            got = value if is_joined else arguments[number]
            return UsageError(f"{option.flags[0]} must be {option.expected}, got {got!r}", hint)
    return UsageError(f"{option.flags[0]} needs a value: {option.expected}", hint)


def as_typed(message: str, names: Iterable[str], words: Iterable[str] = ()) -> str:
    """Write the options that a message names as they are typed: `--n-head 12`, not `n_head=12`.

    A name that is also a word is taken for the option where it is followed by `=` and, if it is
    one of `words`, where the message speaks of it.
    """
    every = sorted(names, key=len, reverse=True)
    long = "|".join(name for name in every if "_" in name) or "(?!)"
    of_it = r"(?=,|\)| (?:must|exclude|needs?|cannot|is for|and|[-\d(]))"

    def typed(match: re.Match[str]) -> str:
        name, value = match[0].partition("=")[::2]
        quoted = value.strip("'\"")
        return f"--{name.replace('_', '-')}" + (f" {quoted}" if "=" in match[0] else "")

    message = re.sub(rf"\b(?:{'|'.join(every)})=(?:'[\w-]*'|\"[\w-]*\")?", typed, message)
    alone = rf"(?:{long})\b|(?:{'|'.join(words) or '(?!)'}){of_it}"
    return re.sub(rf"(?<![-\w])(?:{alone})", typed, message)
