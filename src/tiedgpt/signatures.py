"""Check the types of arguments of public functions against their annotations.

    @checked
    def train(options: TrainOptions, out: str | None = None) -> Iterator[Event]: ...

A wrong type raises a `UserError` with the argument, its type and a way to make one. A check takes
some microseconds, so functions that are called for each token or text use `require_type`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from tiedgpt.errors import UserError
from tiedgpt.options import read_number

Called = TypeVar("Called", bound=Callable[..., Any])
REMEDIES = {
    "Engine": "Engine(source) opens one",
    "FileCorpus": 'documents(["my.txt"]) opens one',
    "GPT": "GPT.from_pretrained(source) loads one",
    "GPTConfig": 'GPTConfig.preset("gpt2") makes one, GPT.from_pretrained(source) loads a model',
    "Module": "GPT.from_pretrained(source) loads one",
    "AnsweringHead": "open_head(source) loads one",
    "Plan": "examples/own_task.py has one",
    "Preparation": 'tiedgpt.data.plan_preparation(["my.txt"]) makes one',
    "Split": "plan_split(documents([...])) makes one",
    "Tensor": "torch.tensor([tokenizer.encode(text)]) makes ids (B, T)",
    "Tokenizer": "Tokenizer.from_pretrained(source) loads one",
    "RunOptions": 'write TrainOptions(data=("my.txt",), steps=100)',
    "TrainOptions": 'write TrainOptions(data=("my.txt",), steps=100)',
    "list": "write a list, such as [first, second]",
    "path": "give a path, such as 'runs/my-1'",
}
"""How to make a value, by the name of its type."""
ITERABLES = (Iterable, Collection, Sequence, Iterator, list, tuple)
UNIONS = (typing.Union, types.UnionType)
CHECKED_ELEMENTS = 16
"""Number of elements of a list that are compared with their annotation."""


def checked(function: Called) -> Called:
    """Return a function that refuses arguments of other types than its annotations."""
    parameters = signature(function).parameters
    names = [name for name, one in parameters.items() if one.kind is not one.VAR_POSITIONAL]

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        hints = _hints(function)
        for name, value in (*zip(names, arguments, strict=False), *options.items()):
            if name in hints and name in parameters and not _fits(value, hints[name]):
                raise wrong_type(f"{function.__qualname__}()", name, _words(hints[name]), value)
        return function(*arguments, **options)

    return call  # type: ignore[return-value]


def require_type(owner: str, name: str, value: object, expected: type) -> None:
    """Raise `UserError` unless an argument is of the expected type."""
    if not isinstance(value, expected):
        raise wrong_type(owner, name, expected.__name__, value)


def check_fields(record: Any) -> None:
    """Raise `UserError` for a field of a dataclass that has another type, or exceeds its bounds.

    Its type, its `choices` and its bounds (`options.option`) decide. Numbers of NumPy and torch
    become Python's.
    """
    for field, hint, members in _fields(type(record)):  # type: ignore[arg-type]
        name, value = field.name, getattr(record, field.name)
        numbers = [cls for cls in (float, int) if cls in members]
        choices: tuple[Any, ...] = tuple(member for member in members if isinstance(member, str))
        if field.metadata.get("choices") is not None:
            choices = field.metadata["choices"]()
        if type(value) in members and isinstance(value, (bool, type(None))):
            continue
        if numbers and str not in members:
            bounds = field.metadata.get("bounds", {})
            object.__setattr__(record, name, read_number(name, value, numbers[0], **bounds))
        elif choices:
            choices += (True, False) if bool in members else ()
            if value not in choices:
                allowed = ", ".join(map(str, choices))
                raise UserError(f"must be one of {allowed}, got {_show(value)}", option=name)
            object.__setattr__(record, name, choices[choices.index(value)])  # True for 1
        elif not _fits(value, hint):
            problem = f"must be {_words(hint)}, got {_show(value)}"
            raise UserError(problem, option=name, hint=_remedy(_words(hint)))


@functools.cache
def _fields(cls: Any) -> list[tuple[dataclasses.Field[Any], Any, list[Any]]]:
    """Return the fields of a dataclass, each with its type and the members of that union."""
    hints = _hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.name in hints]
    return [(field, hints[field.name], union_members(hints[field.name])) for field in fields]


def union_members(hint: Any) -> list[Any]:
    """Return the types of a union, and the values of its literals."""
    if typing.get_origin(hint) not in (*UNIONS, typing.Literal):
        return [hint]
    return [member for one in typing.get_args(hint) for member in union_members(one)]


def wrong_type(owner: str, name: str, expected: str, value: object, *, hint: str = "") -> UserError:
    """Return the error for an argument of the wrong type, with how to make one of the right type.

    `expected` is a type's name, or several that are joined by "or".
    """
    problem = f"{owner} takes {name} as {expected}, got {_show(value)}"
    return UserError(problem, hint=hint or _remedy(expected))


def _remedy(expected: str) -> str | None:
    """Return how to make a value of the expected types, if a table knows it."""
    words = expected.replace(",", "").split()
    return "; ".join(REMEDIES[word] for word in words if word in REMEDIES) or None


def _show(value: object) -> str:
    """Return a short description of a value: its type, unless it is one of Python's own."""
    is_short = type(value).__module__ in ("builtins", "pathlib")
    return reprlib.repr(value) if is_short else type(value).__name__


@functools.cache
def _hints(function: Any) -> dict[str, Any]:
    """Return the types of arguments, or of fields, whose names are not for type checkers only."""
    hints: dict[str, Any] = {}
    for owner in getattr(function, "__mro__", [function]):
        names = vars(sys.modules[owner.__module__])
        for name, annotation in getattr(owner, "__annotations__", {}).items():
            one = types.SimpleNamespace(__annotations__={name: annotation})
            with contextlib.suppress(NameError, AttributeError, TypeError):
                hints.setdefault(name, typing.get_type_hints(one, names)[name])
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value may be of a type; types that say nothing about values accept all."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return any(_fits(value, one) for one in inner)
    if hint is int:
        return is_index(value)
    if hint is float:
        return isinstance(value, Real) or hasattr(value, "__float__")
    if (origin or hint) in ITERABLES:
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            return False
        shape = getattr(value, "shape", None)
        is_list = isinstance(value, (list, tuple)) or shape
        elements = value[:CHECKED_ELEMENTS] if is_list else ()
        is_record = origin is tuple and inner[1:] != (...,)  # its elements differ
        has_hint = inner and not is_record
        return shape != () and (not has_hint or all(_fits(one, inner[0]) for one in elements))
    if origin is Callable:
        return callable(value)
    if hint is Any or not isinstance(origin or hint, type):
        return True
    return isinstance(value, origin or hint)


def is_index(value: Any) -> bool:
    """Whether a value is an integer of any library."""
    try:
        operator.index(value)
    except (TypeError, ValueError):
        return False
    return True


def _words(hint: Any) -> str:
    """Return a type in words: "str or path", "list of str"."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(_words, inner)))
    if (origin or hint) in ITERABLES:
        return f"list of {_words(inner[0])}" if inner else "list"
    if origin is os.PathLike or hint is Path:
        return "path"
    return "None" if hint is type(None) else getattr(origin or hint, "__name__", str(hint))
