"""The checkpoint formats: a record for each, in the order in which they are asked about a file.

    formats()            every `Format`; a format's module is imported when its turn comes
    format_named(name)   the one of that name
    register(format)     add one of your own, from anywhere

Opening, loading, converting, hub downloads, the search for a tokenizer, `tiedgpt doctor` and
docs/formats.md go through these records. Only a format's own file knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiedgpt.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from tiedgpt.text.tokenizer import Tokenizer
    from tiedgpt.weights.checkpoint import Checkpoint, Claim, GPTCheckpoint

MODULES = (
    "transformers", "packed", "mingpt", "nanogpt", "state_dict", "gguf", "llmc", "onnx",
    "openai_gpt2",
)  # fmt: skip
"""Modules of `weights/formats/`, each with its record in FORMAT."""
HEAD_BYTES = 32
"""Bytes of a file by which formats recognize it."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """Where a format keeps a tokenizer: in the file of the weights, or in a file beside it."""

    read: Callable[[Path], Tokenizer]
    """Return the tokenizer in such a file."""
    detect: Callable[[Path, bytes], bool]
    """Whether a file of these first bytes holds one."""
    pattern: str
    """Names of the files of a directory that may hold one."""
    hub_name: str = ""
    """The one name that it has in hub repositories."""
    is_in_weights: bool = False
    """Whether it is part of the file of the weights, and so belongs to that model alone."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How a format is written, and what it cannot hold."""

    write: Callable[..., tuple[str, ...] | None]
    """`write(model, path, precision=, tokenizer=, progress=, **options)`; may return notes."""
    program: str = ""
    """Who computes such a file, for messages: "llama.cpp's gpt2"."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    """In which its tensors can be written."""
    default: str = ""
    """The precision where none is asked for; "": the model's own, where it is one of these."""
    suffix: str = ""
    """Of the file; "": a directory is written."""
    bundled: str = ""
    """Where DEST has another suffix, the file's name in a directory with config and tokenizer."""
    holds_tokenizer: bool = False
    """Whether what is written has a place for the tokenizer."""
    options: tuple[str, ...] = ()
    """Further keywords of `write`, which `convert` offers."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of a config for which the program knows one value."""
    activation: str = ""
    """The one activation that the program computes; "": any."""

    def is_directory(self, path: Path) -> bool:
        """Whether a directory is written at `path`."""
        return not self.suffix or (bool(self.bundled) and path.suffix != self.suffix)


def is_any(checkpoint: Checkpoint) -> bool:
    """Return True: a format whose files nobody else writes recognizes them all."""
    return True


def is_weights(path: Path, head: bytes) -> bool:
    """Return True: a file with this format's suffix holds a model."""
    return True


def no_claim(checkpoint: Checkpoint) -> None:
    """Return None: nothing is meant by two matrices."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One checkpoint format: how to recognize, open, understand and write it.

    `tests/weights/test_registry.py` has a whole one in some thirty lines.
    """

    name: str
    """As `convert --to` has it."""
    title: str
    """As people call its files: "GGUF"."""
    about: str
    """What is read, for the table of formats."""
    about_tokenizer: str = ""
    """Which tokenizer is found with it, for the table of formats."""
    detect: Callable[[Path, bytes], bool]
    """Whether a file is of this format, by its first bytes (or by a name that only it has)."""
    open: Callable[[Path], Checkpoint]
    """Open the file: headers only."""
    open_module: Callable[[nn.Module], Checkpoint] | None = None
    """Open a model in memory; `UserError` for any other."""
    to_gpt: Callable[[Checkpoint], GPTCheckpoint]
    """Translate names and layout into ours."""
    recognizes: Callable[[Checkpoint], bool] = is_any
    """Of formats that share a container (safetensors, torch.save): whether this one is its own."""
    claim: Callable[[Checkpoint], Claim | None] = no_claim
    """What two matrices mean where neither the file nor a config.json beside it says so."""
    suffixes: tuple[str, ...] = ()
    """How names of its files end."""
    is_model_file: Callable[[Path, bytes], bool] = is_weights
    """Whether a file with one of the suffixes is one of weights; False for a project's others."""
    file_names: tuple[str, ...] = ()
    """Names that the file of the weights has in a directory, the likeliest first."""
    hub_patterns: tuple[tuple[str, ...], ...] = ()
    """Groups of files of a hub repository; the first group that it has is fetched."""
    hub_configs: tuple[str, ...] = ()
    """Other files that are fetched with them."""
    is_whole_in_one_file: bool = False
    """Whether each file in a repository is a model of its own, of which the user names one."""
    any_layout: bool = False
    """Whether its files tell which matrices are stored as (D, V); else that is a fault."""
    is_copied_by_fix: bool = False
    """Whether a copy in safetensors keeps names and layout; else `tie fix` writes it as our GPT."""
    tokenizer: TokenizerFile | None = None
    """Where its tokenizer is, if it is not one of transformers' or OpenAI's files."""
    writer: Writer | None = None
    """None where it is only read."""
    packages: tuple[str, ...] = ()
    """What reading or writing some of its files needs besides the base installation."""
    extra: str = "formats"
    """The extra that brings these packages."""


_registered: list[Format] = []


def register(format: Format) -> None:
    """Add a format after all others; one of the same name is replaced."""
    if format.name in MODULES:
        raise UserError(f"there is a format named {format.name!r}: give yours another name")
    _registered[:] = [other for other in _registered if other.name != format.name] + [format]


def unregister(name: str) -> None:
    """Forget a format that was registered."""
    _registered[:] = [format for format in _registered if format.name != name]


def formats() -> Iterator[Format]:
    """Yield every format in the order in which they are asked."""
    for name in MODULES:
        format: Format = import_module(f"tiedgpt.weights.formats.{name}").FORMAT
        yield format
    yield from _registered


def suffixes() -> tuple[str, ...]:
    """Return how names of files of weights end."""
    return tuple(dict.fromkeys(suffix for format in formats() for suffix in format.suffixes))


def writers() -> dict[str, Writer]:
    """Return the formats that can be written, by name."""
    return {format.name: format.writer for format in formats() if format.writer}


def writer_named(name: str) -> Writer:
    """Return how a format is written; `UserError` where it is not."""
    known = writers()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"{name!r} is no format that is written here",
            hint=f"{meant}there are {', '.join(known)}",
        )
    return known[name]


def defer(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module in `weights/formats/` that is imported when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        function = getattr(import_module(f"tiedgpt.weights.formats.{module}"), name)
        return function(*arguments, **options)

    return call


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file; `UserError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def require_package(name: str, purpose: str) -> Any:
    """Import a package of the extra `formats`; `UserError` where it is not installed.

    `purpose` says what needs it: "reading ONNX files".
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the package {name.partition('.')[0]} ({error})",
            hint="pip install 'tiedgpt[formats]'",
        ) from None
