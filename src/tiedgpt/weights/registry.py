"""Registry of checkpoint formats, one record each, in the order in which a file is tried.

    formats()            every `Format`; its module is imported when it is reached
    register(format)     add a format of your own, from anywhere

Opening, loading, converting, hub downloads, the search for a tokenizer, `tiedgpt doctor` and
docs/formats.md use these records. A format's name occurs in its own file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.signatures import checked
from tiedgpt.weights.checkpoint import Format, Writer

MODULES = (
    "transformers", "packed", "mingpt", "nanogpt", "state_dict", "gguf", "llmc", "onnx",
    "openai_gpt2",
)  # fmt: skip
"""Modules of `weights/formats/`; each defines its record as FORMAT."""
_registered: list[Format] = []


@checked
def register(format: Format) -> None:
    """Add a format after all others; replace a registered one of the same name."""
    if format.name in MODULES:
        raise UserError(f"there is a format named {format.name!r}: give yours another name")
    _registered[:] = [other for other in _registered if other.name != format.name] + [format]


def unregister(name: str) -> None:
    """Remove a registered format."""
    _registered[:] = [format for format in _registered if format.name != name]


def formats() -> Iterator[Format]:
    """Yield every format in the order in which a file is tried."""
    for name in MODULES:
        format: Format = import_module(f"tiedgpt.weights.formats.{name}").FORMAT
        yield format
    yield from _registered


def suffixes() -> tuple[str, ...]:
    """Return the suffixes of files of weights."""
    return tuple(dict.fromkeys(suffix for format in formats() for suffix in format.suffixes))


def writers() -> dict[str, Writer]:
    """Return the formats that can be written, by name."""
    return {format.name: format.writer for format in formats() if format.writer}


def writer_named(name: str) -> Writer:
    """Return the writer of a format; raise `UserError` if none exists."""
    by_name = writers()
    if name not in by_name:
        matches = get_close_matches(name, by_name, n=1)
        advice = f"did you mean {matches[0]}? " if matches else ""
        raise UserError(
            f"cannot write the format {name!r}", hint=f"{advice}choose one of {', '.join(by_name)}"
        )
    return by_name[name]


def defer(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports its module in `weights/formats/` when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        function = getattr(import_module(f"tiedgpt.weights.formats.{module}"), name)
        return function(*arguments, **options)

    return call
