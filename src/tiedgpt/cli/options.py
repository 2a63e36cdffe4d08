"""The command line of a verb: the fields of a frozen dataclass as arguments of `argparse`.

A field carries its help, placeholder, letter and group (`tiedgpt.options`); its type and default
decide the rest. A field whose type is a dataclass stands for the fields of that dataclass. Errors
are `UsageError`, with a hint for misspelt words.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from inspect import get_annotations
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from tiedgpt.errors import EXIT_USAGE, TiedGPTError
from tiedgpt.names import NOT_HERE, OTHER_NAMES
from tiedgpt.options import NUMBER_WORDS, flag, is_argument, option_of_verb
from tiedgpt.signatures import check_fields, union_members

Options = TypeVar("Options")
PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
HELP_COLUMN, HELP_WIDTH = 26, 79


class UsageError(TiedGPTError):
    """A command that cannot be understood."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)


class Parser(argparse.ArgumentParser):
    """argparse's parser, which raises `UsageError`."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        message = message.removeprefix("argument ").replace(": must be ", " must be ", 1)
        raise UsageError(message, f"`{self.prog} --help` lists all options")


def parse(
    options: type[Options], verb: str, arguments: Sequence[str], description: str, **fixed: Any
) -> Options:
    """Return the options; raise `UsageError` for bad arguments, `SystemExit(0)` after help.

    Options may be written as in Python (`--batch_size`), and stand before and after arguments.
    `fixed` are fields by name that the command line does not decide.
    """
    parser = make_parser(options, verb, description)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = list[str]()
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        words.append(name + equals + value)
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
    """Return a dataclass, and its nested ones, from values by name; check types and bounds."""
    direct = {f.name: values[f.name] for f in dataclasses.fields(options) if f.name in values}
    parts = {name: _build(cls, values) for name, cls in _list_parts(options).items()}
    built = options(**direct, **parts)
    check_fields(built)
    return built


@cache
def _list_parts(options: type) -> dict[str, type]:
    """Return the nested dataclasses of one, by field name."""
    hints = get_type_hints(options).items()
    return {name: cls for name, cls in hints if hasattr(cls, "__dataclass_fields__")}


def make_parser(options: type, verb: str, description: str) -> Parser:
    """Return argparse's parser for the fields of a dataclass and of its nested ones."""
    blocks = description.strip().split("\n\n")
    blocks = [block if "  " in block else textwrap.fill(block, HELP_WIDTH) for block in blocks]
    classes = (options, *_list_parts(options).values())
    hints = {cls: get_type_hints(cls) for cls in classes}
    fields = [(cls, field) for cls in classes for field in _list_fields(cls, verb)]
    arguments = (_make_placeholder(f, hints[k][f.name]) for k, f in fields if is_argument(f))
    parser = Parser(
        prog=f"tiedgpt {verb}",
        usage=" ".join([f"tiedgpt {verb}", *arguments, "[options]"]),
        description="\n\n".join(blocks),
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=HELP_COLUMN, width=HELP_WIDTH
        ),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {"options": parser}
    for cls in classes:
        for field in dataclasses.fields(cls):  # in which the parts come before the whole
            heading = _find_heading(cls, field)
            if heading not in groups and "help" in field.metadata:
                groups[heading] = parser.add_argument_group(heading)
    for cls, field in fields:
        defaults = getattr(cls, "DEFAULTS", {}).get(verb, {})
        keywords = _make_keywords(field, hints[cls][field.name], defaults)
        if is_argument(field):
            parser.add_argument(field.name, **keywords)
            continue
        short = [f"-{field.metadata['short']}"] if field.metadata["short"] else []
        to = groups[_find_heading(cls, field)]
        to.add_argument(*short, flag(field), dest=field.name, **keywords)
    return parser


def option_fields(options: type, verb: str) -> list[dataclasses.Field[Any]]:
    """Return the fields that a verb's command line asks for: those that carry a help."""
    classes = (options, *_list_parts(options).values())
    return [field for cls in classes for field in _list_fields(cls, verb)]


def _list_fields(cls: type, verb: str) -> list[dataclasses.Field[Any]]:
    """Return the fields of one dataclass that a verb has, those of the class itself first."""
    options = (option_of_verb(field, verb) for field in dataclasses.fields(cls))
    fields = [field for field in options if field is not None and "help" in field.metadata]
    declared = get_annotations(cls)
    inherited = [field for field in fields if field.name not in declared]
    return [*(field for field in fields if field.name in declared), *inherited]


def _find_heading(cls: type, field: dataclasses.Field[Any]) -> str:
    """Return the heading under which the help lists a field."""
    if group := field.metadata.get("group"):
        return str(group)
    owner = next(base for base in cls.__mro__ if field.name in get_annotations(base))
    return str(getattr(owner, "GROUP", "options"))


def _make_keywords(
    field: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field of a type, with defaults in words."""
    text, default, facts = field.metadata["help"], field.default, field.metadata
    members = [inner for one in union_members(hint) for inner in get_args(one) or [one]]
    choices = tuple(member for member in members if isinstance(member, str))
    if facts.get("choices") is not None:
        choices = facts["choices"]()
    cls = next((member for member in members if member in PLACEHOLDERS), str)
    if meaning := defaults.get(field.name):
        text = f"{text.rstrip('.')}; {'default' if default is None else default}: {meaning}."
    notes = []
    if is_argument(field) and choices:
        text = f"{text.rstrip('.')}: {_format_choices(choices)}"
    elif default not in ("", None) and type(default) in (str, int, float):
        notes.append(
            f"default: {default:g}" if isinstance(default, float) else f"default: {default}"
        )
    if {"least", "most"} <= facts.get("bounds", {}).keys():
        notes.append(f"{facts['bounds']['least']} to {facts['bounds']['most']}")
    if notes:
        text = f"{text.rstrip('.')} ({'; '.join(notes)})"
    keywords: dict[str, Any] = {"help": text.replace("%", "%%")}
    if hint is bool:
        return keywords | {"action": "store_const", "const": not default}
    keywords |= {"type": partial(_read_choice, choices) if choices else partial(_read_as, cls)}
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
    return keywords | {"metavar": facts["metavar"] or "|".join(choices) or PLACEHOLDERS[cls]}


def _make_placeholder(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return an argument without a flag for the usage line: `[MODEL]`, `DATA ...`."""
    name = field.metadata["metavar"] or field.name.upper()
    name += " ..." if get_origin(hint) is tuple else ""
    return name if field.default is dataclasses.MISSING else f"[{name}]"


def _read_choice(choices: Sequence[str], text: str) -> str:
    """Return the choice that a text names, with dashes or underscores."""
    for spelling in (text, text.replace("_", "-")):
        if spelling in choices:
            return spelling
    near = _suggest(text, choices).rstrip()
    problem = f"must be {_format_choices(choices)}, got {text!r}"
    raise argparse.ArgumentTypeError(f"{problem} ({near})" if near else problem)


def _read_as(cls: type, text: str) -> Any:
    """Return the value of a type that a text stands for."""
    try:
        return cls(text)
    except ValueError:
        problem = f"must be {NUMBER_WORDS[cls]}, got {text!r}"
        raise argparse.ArgumentTypeError(problem) from None


def _format_choices(choices: Sequence[str]) -> str:
    return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]


def unknown_verb(verb: str, verbs: Collection[str]) -> UsageError:
    """Return the error for an unknown verb."""
    hint = f"{_suggest(verb, verbs)}`tiedgpt --help` lists all: {', '.join(verbs)}"
    return UsageError(f"`tiedgpt` has no verb {verb!r}", hint)


def _suggest(text: str, names: Collection[str]) -> str:
    """Return "did you mean ...?" for the most similar name, or ""."""
    begin = [name for name in names if name.startswith(text)]
    near = begin or get_close_matches(text, list(names), cutoff=0.7)
    return f"did you mean {near[0]}? " if near else ""


def _explain_unknown(argument: str, options: type, verb: str) -> UsageError:
    """Return the error for an unknown argument."""
    fields = option_fields(options, verb)
    lists = f"`tiedgpt {verb} --help` lists all options"
    if not argument.startswith("-"):
        hint = lists
        if any(field.name == "prompt" for field in fields):
            hint = hint_at_prompt(argument)
        return UsageError(f"`tiedgpt {verb}` has no place for {argument!r}", hint)
    typed = argument.partition("=")[0]
    name = typed.lstrip("-").replace("-", "_")
    flags = {field.name: flag(field) for field in fields if not is_argument(field)}
    others = (OTHER_NAMES[table].get(name, "") for table in ("TrainOptions", "GenerationConfig"))
    other = next((other for other in others if other in flags), None)
    near = f"did you mean {flags[other]}? " if other else _suggest(typed, flags.values())
    classes = (*_list_parts(options).values(), *options.__mro__[1:])
    owners = [cls.__name__ for cls in classes if name in getattr(cls, "__dataclass_fields__", {})]
    if owners and name not in flags:
        near = f"Python has it: {owners[0]}({name}=). "
    elif name in NOT_HERE and "temperature" in flags:
        near = f"{NOT_HERE[name]}; "
    return UsageError(f"`tiedgpt {verb}` has no option {typed}", near + lists)


def hint_at_prompt(text: str) -> str:
    """Return the hint for a prompt without --prompt."""
    return f"a text to continue goes after --prompt: --prompt {shlex.quote(text)}"
