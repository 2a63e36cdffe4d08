"""The command line of a verb: the fields of a frozen dataclass as arguments of `argparse`.

`tiedgpt.options` says what a field carries: help, placeholder, letter, group. Its type and default
say the rest. Errors are `UsageError`, with a hint for what was misspelt.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from tiedgpt.errors import EXIT_USAGE, TiedGPTError

Options = TypeVar("Options")
PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
HELP_COLUMN, HELP_WIDTH = 26, 79


class UsageError(TiedGPTError):
    """A command that cannot be understood; `hint` says what is meant instead."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(
            message.removeprefix("argument "), f"`{self.prog} --help` lists all options"
        )


def parse(options: type[Options], verb: str, arguments: Sequence[str], description: str) -> Options:
    """Return the options; `UsageError` for what cannot be understood, `SystemExit(0)` after help.

    Options may be written as in Python (`--batch_size`), and stand before and after arguments.
    """
    parser = make_parser(options, verb, description)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    dashed = [_as_typed(argument) for argument in arguments[:end]]
    whole = end == len(arguments)  # the other method knows no `--`
    read = parser.parse_known_intermixed_args if whole else parser.parse_known_args
    values, rest = read([*dashed, *arguments[end:]])
    if rest:
        unknown = next((argument for argument in rest if argument.startswith("-")), rest[0])
        raise _unknown(unknown, options, verb)
    tuples = {name: tuple(x) for name, x in vars(values).items() if isinstance(x, list)}
    return options(**vars(values) | tuples)


def make_parser(options: type, verb: str, description: str) -> Parser:
    """Return argparse's parser for the fields of a dataclass, its own fields first."""
    known, hints = option_fields(options), get_type_hints(options)
    blocks = description.strip().split("\n\n")
    blocks = [block if "  " in block else textwrap.fill(block, HELP_WIDTH) for block in blocks]
    arguments = [_placeholder(field, hints[field.name]) for field in known if is_argument(field)]
    parser = Parser(
        prog=f"tiedgpt {verb}",
        usage=" ".join([f"tiedgpt {verb}", *arguments, "[options]"]),
        description="\n\n".join(blocks),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=HELP_COLUMN, width=HELP_WIDTH
        ),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {"options": parser}
    for each in dataclasses.fields(options):  # in which the parts come before the whole
        heading = each.metadata.get("group", "options")
        if heading not in groups and each in known:
            groups[heading] = parser.add_argument_group(heading)
    for field in known:
        facts, how = field.metadata, _how(field, hints[field.name])
        if is_argument(field):
            parser.add_argument(field.name, **how)
            continue
        short = [f"-{facts['short']}"] if facts["short"] else []
        groups[facts["group"]].add_argument(*short, flag(field), dest=field.name, **how)
    return parser


def option_fields(options: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that the command line asks for, those of the class itself first.

    They carry a help, and the class does not name them in `HIDDEN`.
    """
    own, hidden = options.__annotations__, getattr(options, "HIDDEN", ())
    every = [field for field in dataclasses.fields(options) if "help" in field.metadata]
    shown = [field for field in every if field.name not in hidden]
    return sorted(shown, key=lambda field: field.name not in own)


def is_argument(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no flag."""
    return "positional" in field.metadata


def flag(field: dataclasses.Field[Any]) -> str:
    """Return how a field is typed: `from_`, no word of Python, is `--from`."""
    no = "no-" if field.default is True else ""
    return f"--{no}{field.name.rstrip('_').replace('_', '-')}"


def _as_typed(argument: str) -> str:
    """Return an option with dashes in its name, as it is declared."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _how(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field of a type."""
    text, default, facts = field.metadata["help"], field.default, field.metadata
    choices, kind = _choices(field, hint), next(iter(_kinds(hint)), str)
    if is_argument(field) and choices:
        text = f"{text.rstrip('.')}: {_listed(choices)}"
    elif default not in ("", None) and type(default) in (str, int, float):
        shown = f"{default:g}" if isinstance(default, float) else default
        text = f"{text.rstrip('.')} (default: {shown})"
    how: dict[str, Any] = {"help": text.replace("%", "%%")}
    if hint is bool:
        return how | {"action": "store_const", "const": not default}
    how |= {"type": _choice(choices) if choices else kind}
    is_many = get_origin(hint) is tuple and not facts.get("repeated")
    if is_argument(field):
        optional = default is not dataclasses.MISSING
        nargs = ("*" if optional else "+") if is_many else ("?" if optional else None)
        return how | {"nargs": nargs, "metavar": _placeholder(field, hint).strip("[.] ")}
    how["required"] = default is dataclasses.MISSING
    if is_many:
        how["nargs"] = "+"
    elif facts["repeated"]:
        how["action"] = "append"
    return how | {"metavar": facts["metavar"] or "|".join(choices) or PLACEHOLDERS[kind]}


def _placeholder(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return how an argument without a flag is written in the usage: `[MODEL]`, `DATA ...`."""
    name = field.metadata["metavar"] or field.name.upper()
    name += " ..." if get_origin(hint) is tuple else ""
    return name if field.default is dataclasses.MISSING else f"[{name}]"


def _choice(choices: Sequence[str]) -> Any:
    """Return what makes a choice from its text, in which functions' names have underscores."""

    def read(text: str) -> str:
        dashed = text.replace("_", "-")
        if dashed in choices:
            return dashed
        near = _meant(text, choices).rstrip()
        problem = f"must be {_listed(choices)}, got {text!r}"
        raise argparse.ArgumentTypeError(f"{problem} ({near})" if near else problem)

    return read


def _listed(choices: Sequence[str]) -> str:
    return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]


def _flat(hint: Any) -> list[Any]:
    """Return the types and literals of which a type is made."""
    return [each for arg in get_args(hint) for each in _flat(arg)] or [hint]


def _choices(field: dataclasses.Field[Any], hint: Any) -> tuple[str, ...]:
    if field.metadata.get("choices") is not None:
        return tuple(field.metadata["choices"]())
    return tuple(each for each in _flat(hint) if isinstance(each, str))


def _kinds(hint: Any) -> list[type]:
    return [each for each in _flat(hint) if each in PLACEHOLDERS]


def no_verb(verb: str, verbs: Collection[str]) -> UsageError:
    """Return the error for a verb that there is not."""
    hint = f"{_meant(verb, verbs)}`tiedgpt --help` lists all: {', '.join(verbs)}"
    return UsageError(f"`tiedgpt` has no verb {verb!r}", hint)


def _meant(text: str, known: Collection[str]) -> str:
    """Return a question after the name that begins so, or that is nearest; "" for none."""
    begin = [name for name in known if name.startswith(text)]
    near = begin or get_close_matches(text, list(known), cutoff=0.7)
    return f"did you mean {near[0]}? " if near else ""


def _unknown(argument: str, options: type, verb: str) -> UsageError:
    """Return the error for an argument that no option takes."""
    known = option_fields(options)
    lists = f"`tiedgpt {verb} --help` lists all options"
    if not argument.startswith("-"):
        hint = lists
        if any(field.name == "prompt" for field in known):
            hint = prompt_hint(argument)
        return UsageError(f"`tiedgpt {verb}` has no place for {argument!r}", hint)
    from tiedgpt.infer.options import OTHER_NAMES

    typed = argument.partition("=")[0]
    flags = {field.name: flag(field) for field in known if not is_argument(field)}
    other = OTHER_NAMES.get(typed.lstrip("-").replace("-", "_"), "")
    near = f"did you mean {flags[other]}? " if other in flags else _meant(typed, flags.values())
    return UsageError(f"`tiedgpt {verb}` has no option {typed}", near + lists)


def prompt_hint(text: str) -> str:
    """Return the hint for a prompt in another argument's place."""
    return f"a text to continue goes after --prompt: --prompt {shlex.quote(text)}"
