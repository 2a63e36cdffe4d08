"""Registry of checkpoint formats, one record each, in the order in which a file is tried.

    formats()            every `Format`; its module is imported when it is reached
    register(format)     add a format of your own, from anywhere

Opening, loading, converting, hub downloads, the search for a tokenizer, `tiedgpt doctor` and
docs/formats.md use these records. A format's name occurs in its own file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError
from tiedgpt.signatures import checked
from tiedgpt.weights.file import OpenFile

if TYPE_CHECKING:
    from torch import nn

    from tiedgpt.text.tokenizer import Tokenizer
    from tiedgpt.weights.checkpoint import Checkpoint, Claim
    from tiedgpt.weights.gpt import GPTCheckpoint

MODULES = (
    "transformers", "packed", "mingpt", "nanogpt", "state_dict", "gguf", "llmc", "onnx",
    "openai_gpt2",
)  # fmt: skip
"""Modules of `weights/formats/`; each defines its record as FORMAT."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """Tokenizer of a format, inside the file of the weights or next to it."""

    read: Callable[[OpenFile], Tokenizer]
    """Function that reads the tokenizer."""
    detect: Callable[[OpenFile], bool]
    """Whether a file holds a tokenizer, by its first bytes, its members or its name."""
    pattern: str
    """Glob pattern of the files that may hold a tokenizer."""
    hub_name: str = ""
    """Name of the tokenizer file in hub repositories."""
    is_in_weights: bool = False
    """Whether the file of the weights holds it, so that it belongs to that model alone."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Function that writes a format, and the limits of the format."""

    write: Callable[..., tuple[str, ...] | None]
    """`write(model, path, precision=, tokenizer=, progress=, **options)`; may return notes."""
    program: str = ""
    """Program that runs such a file, for messages: "llama.cpp's gpt2"."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    """Supported precisions of the tensors."""
    default: str = ""
    """Default precision; "" for the precision of the model."""
    suffix: str = ""
    """Suffix of the file; "" for a format that is a directory."""
    bundled: str = ""
    """Name of the file in a directory with config and tokenizer, written if DEST has no suffix."""
    holds_tokenizer: bool = False
    """Whether the format stores the tokenizer."""
    options: tuple[str, ...] = ()
    """Further keywords of `write` that `convert` offers."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Config fields for which the program supports a single value."""
    activation: str = ""
    """Only activation that the program computes; "" for any."""

    def is_directory(self, path: Path) -> bool:
        """Return whether a directory is written at `path`."""
        return not self.suffix or (bool(self.bundled) and path.suffix != self.suffix)


@dataclass(frozen=True, kw_only=True)
class Format:
    """Checkpoint format: how to recognize, open, translate and write it.

    `tests/weights/test_registry.py` defines one in some thirty lines.
    """

    name: str
    """Name for `convert --to`."""
    title: str
    """Name in messages and documentation: "GGUF"."""
    about: str
    """Supported files, for the table in docs/formats.md."""
    about_tokenizer: str = ""
    """Tokenizer files, for the table in docs/formats.md."""
    detect: Callable[[OpenFile], bool]
    """Whether a file has this format, by its first bytes, its members or a name of its own."""
    open: Callable[[OpenFile], Checkpoint]
    """Function that reads the headers of a file."""
    open_module: Callable[[nn.Module], Checkpoint] | None = None
    """Function that opens a model in memory and raises `UserError` for any other."""
    to_gpt: Callable[[Checkpoint], GPTCheckpoint]
    """Function that translates names and layout into ours."""
    detect_checkpoint: Callable[[Checkpoint], bool] = lambda checkpoint: True
    """Whether a checkpoint in a shared container (safetensors, torch.save) has this format."""
    claim: Callable[[Checkpoint], Claim | None] = lambda checkpoint: None
    """Convention of the format for two matrices without any claim."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of its files."""
    is_model_file: Callable[[OpenFile], bool] = lambda file: True
    """Whether a file with one of the suffixes holds weights."""
    file_names: tuple[str, ...] = ()
    """Names of the file of the weights in a directory, the likeliest first."""
    hub_patterns: tuple[tuple[str, ...], ...] = ()
    """Groups of patterns of files in a hub repository; the first group present is downloaded."""
    hub_configs: tuple[str, ...] = ()
    """Other files that are downloaded with them."""
    is_whole_in_one_file: bool = False
    """Whether each file in a repository is a separate model, so that the user must name one."""
    any_layout: bool = False
    """Whether a matrix may be stored as (D, V); otherwise such a matrix is an error."""
    tokenizer: TokenizerFile | None = None
    """Its tokenizer, if it is not one of transformers' or OpenAI's files."""
    writer: Writer | None = None
    """None for a format that is only read."""
    packages: tuple[str, ...] = ()
    """Packages, beyond the base installation, that some of its files need."""
    extra: str = "formats"
    """Extra that installs these packages."""


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
