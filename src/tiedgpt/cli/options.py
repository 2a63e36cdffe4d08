"""The command line of a verb: the fields of a frozen dataclass as arguments of `argparse`.

`tiedgpt.options` says what a field carries: help, placeholder, letter, group. Its type and default
say the rest. A field whose type is a dataclass stands for the fields of that one. Errors are
`UsageError`, with a hint for what was misspelt.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from inspect import get_annotations
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from tiedgpt.errors import EXIT_USAGE, TiedGPTError
from tiedgpt.names import OTHER_NAMES
from tiedgpt.options import (
    REMOVED_OPTIONS,
    REMOVED_VALUES,
    flag,
    is_argument,
    is_option_of,
    option_of_verb,
)

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
        message = message.removeprefix("argument ").replace(": must be ", " must be ", 1)
        raise UsageError(message, f"`{self.prog} --help` lists all options")


def parse(
    options: type[Options], verb: str, arguments: Sequence[str], description: str, **fixed: Any
) -> Options:
    """Return the options; `UsageError` for what cannot be understood, `SystemExit(0)` after help.

    Options may be written as in Python (`--batch_size`), and stand before and after arguments.
    `fixed` are fields by name that the command line does not decide.
    """
    parser = make_parser(options, verb, description)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = [_put_dashes(argument) for argument in arguments[:end]]
    has_end = end < len(arguments)  # which the intermixed method does not know
    read = parser.parse_known_args if has_end else parser.parse_known_intermixed_args
    values, rest = read([*words, *arguments[end:]])
    if rest:
        unknown = next((argument for argument in rest if argument.startswith("-")), rest[0])
        raise _explain_unknown(unknown, options, verb)
    tuples = {name: tuple(x) for name, x in vars(values).items() if isinstance(x, list)}
    result: Options = _build(options, vars(values) | tuples | fixed)
    return result


def _build(options: Any, values: dict[str, Any]) -> Any:
    """Return a dataclass, and those that it is made of, of values by name."""
    own = {f.name: values[f.name] for f in dataclasses.fields(options) if f.name in values}
    parts = {name: _build(kind, values) for name, kind in _list_parts(options).items()}
    return options(**own, **parts)


def _list_parts(options: type) -> dict[str, type]:
    """Return the dataclasses that one is made of, by the name of the field."""
    hints = get_type_hints(options).items()
    return {name: kind for name, kind in hints if hasattr(kind, "__dataclass_fields__")}


def make_parser(options: type, verb: str, description: str) -> Parser:
    """Return argparse's parser for the fields of a dataclass, and of those that it is made of."""
    blocks = description.strip().split("\n\n")
    blocks = [block if "  " in block else textwrap.fill(block, HELP_WIDTH) for block in blocks]
    kinds = (options, *_list_parts(options).values())
    hints = {kind: get_type_hints(kind) for kind in kinds}
    known = [(kind, field) for kind in kinds for field in _list_fields(kind, verb)]
    arguments = (_make_placeholder(f, hints[k][f.name]) for k, f in known if is_argument(f))
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
    for kind in kinds:
        for field in dataclasses.fields(kind):  # in which the parts come before the whole
            heading = _find_heading(kind, field)
            if heading not in groups and "help" in field.metadata:
                groups[heading] = parser.add_argument_group(heading)
    for kind, field in known:
        defaults = getattr(kind, "DEFAULTS", {}).get(verb, {})
        keywords = _make_keywords(field, hints[kind][field.name], defaults)
        if is_argument(field):
            parser.add_argument(field.name, **keywords)
            continue
        short = [f"-{field.metadata['short']}"] if field.metadata["short"] else []
        to = groups[_find_heading(kind, field)]
        to.add_argument(*short, flag(field), dest=field.name, **keywords)
    return parser


def option_fields(options: type, verb: str) -> list[dataclasses.Field[Any]]:
    """Return the fields that a verb's command line asks for: those that carry a help."""
    kinds = (options, *_list_parts(options).values())
    return [field for kind in kinds for field in _list_fields(kind, verb)]


def _list_fields(kind: type, verb: str) -> list[dataclasses.Field[Any]]:
    """Return the fields of one dataclass that a verb has, those of the class itself first."""
    fields = [
        option_of_verb(field, verb)
        for field in dataclasses.fields(kind)
        if "help" in field.metadata and is_option_of(field, verb)
    ]
    return sorted(fields, key=lambda field: field.name not in get_annotations(kind))


def _find_heading(kind: type, field: dataclasses.Field[Any]) -> str:
    """Return the heading under which the help lists a field."""
    if group := field.metadata.get("group"):
        return str(group)
    owner = next(base for base in kind.__mro__ if field.name in get_annotations(base))
    return str(getattr(owner, "GROUP", "options"))


def _put_dashes(argument: str) -> str:
    """Return an option with dashes in its name, as it is declared."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _make_keywords(
    field: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field of a type, with defaults in words."""
    text, default, facts = field.metadata["help"], field.default, field.metadata
    choices, kind = _list_choices(field, hint), next(iter(_list_types(hint)), str)
    if meaning := defaults.get(field.name):
        text = f"{text.rstrip('.')}; {'default' if default is None else default}: {meaning}."
    if is_argument(field) and choices:
        text = f"{text.rstrip('.')}: {_format_choices(choices)}"
    elif default not in ("", None) and type(default) in (str, int, float):
        value = f"{default:g}" if isinstance(default, float) else default
        text = f"{text.rstrip('.')} (default: {value})"
    keywords: dict[str, Any] = {"help": text.replace("%", "%%")}
    if hint is bool:
        return keywords | {"action": "store_const", "const": not default}
    keywords |= {"type": _make_reader(field.name, choices) if choices else _read_as(kind)}
    is_many = get_origin(hint) is tuple and not facts.get("repeated")
    if is_argument(field):
        optional = default is not dataclasses.MISSING
        nargs = ("*" if optional else "+") if is_many else ("?" if optional else None)
        return keywords | {"nargs": nargs, "metavar": _make_placeholder(field, hint).strip("[.] ")}
    keywords["required"] = default is dataclasses.MISSING
    if is_many:
        keywords["nargs"] = "+"
    elif facts["repeated"]:
        keywords["action"] = "append"
    return keywords | {"metavar": facts["metavar"] or "|".join(choices) or PLACEHOLDERS[kind]}


def _make_placeholder(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return how an argument without a flag is written in the usage: `[MODEL]`, `DATA ...`."""
    name = field.metadata["metavar"] or field.name.upper()
    name += " ..." if get_origin(hint) is tuple else ""
    return name if field.default is dataclasses.MISSING else f"[{name}]"


def _make_reader(name: str, choices: Sequence[str]) -> Any:
    """Return what reads a choice; names of functions may be typed with their underscores."""

    def read(text: str) -> str:
        for spelling in (text, text.replace("_", "-")):
            if spelling in choices:
                return spelling
        near = REMOVED_VALUES.get((name, text)) or _suggest(text, choices).rstrip()
        problem = f"must be {_format_choices(choices)}, got {text!r}"
        raise argparse.ArgumentTypeError(f"{problem} ({near})" if near else problem)

    return read


def _read_as(kind: type) -> Any:
    """Return what reads a value of a type."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None

    return read


def _format_choices(choices: Sequence[str]) -> str:
    return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]


def _flatten(hint: Any) -> list[Any]:
    """Return the types and literals of which a type is made."""
    return [each for arg in get_args(hint) for each in _flatten(arg)] or [hint]


def _list_choices(field: dataclasses.Field[Any], hint: Any) -> tuple[str, ...]:
    if field.metadata.get("choices") is not None:
        return tuple(field.metadata["choices"]())
    return tuple(each for each in _flatten(hint) if isinstance(each, str))


def _list_types(hint: Any) -> list[type]:
    return [each for each in _flatten(hint) if each in PLACEHOLDERS]


def unknown_verb(verb: str, verbs: Collection[str]) -> UsageError:
    """Return the error for a verb that there is not."""
    hint = f"{_suggest(verb, verbs)}`tiedgpt --help` lists all: {', '.join(verbs)}"
    return UsageError(f"`tiedgpt` has no verb {verb!r}", hint)


def _suggest(text: str, known: Collection[str]) -> str:
    """Return a question after the name that begins so, or that is nearest; "" for none."""
    begin = [name for name in known if name.startswith(text)]
    near = begin or get_close_matches(text, list(known), cutoff=0.7)
    return f"did you mean {near[0]}? " if near else ""


def _explain_unknown(argument: str, options: type, verb: str) -> UsageError:
    """Return the error for an argument that no option takes."""
    known = option_fields(options, verb)
    lists = f"`tiedgpt {verb} --help` lists all options"
    if not argument.startswith("-"):
        hint = lists
        if any(field.name == "prompt" for field in known):
            hint = hint_at_prompt(argument)
        return UsageError(f"`tiedgpt {verb}` has no place for {argument!r}", hint)
    from tiedgpt.infer.options import OTHER_NAMES as generation_names

    typed = argument.partition("=")[0]
    name = typed.lstrip("-").replace("-", "_")
    if remedy := REMOVED_OPTIONS.get(name):
        return UsageError(f"`tiedgpt {verb}` no longer has {typed}", remedy)
    flags = {field.name: flag(field) for field in known if not is_argument(field)}
    other = (OTHER_NAMES["TrainOptions"] | generation_names).get(name, "")
    near = f"did you mean {flags[other]}? " if other in flags else _suggest(typed, flags.values())
    return UsageError(f"`tiedgpt {verb}` has no option {typed}", near + lists)


def hint_at_prompt(text: str) -> str:
    """Return the hint for a prompt in another argument's place."""
    return f"a text to continue goes after --prompt: --prompt {shlex.quote(text)}"
