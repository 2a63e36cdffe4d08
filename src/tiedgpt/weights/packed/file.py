"""A packed model on disk: a directory that opens by memory map, in milliseconds and without torch.

    config.json           our fields, under a `model_type` that transformers refuses
    packed.safetensors    the arrays of `layout`, each from a multiple of 64 bytes on
    tokenizer.json, ...   whatever the tokenizer writes; not written here

The container is safetensors': the header is padded with spaces, and what is no multiple of 64 bytes
long comes last. U8 are int8 and int4 as `panels.py` describes, BF16 the bits of bf16.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, replacing, require_room, write_json
from tiedgpt.weights.config_json import config_fields, config_json, model_type_from
from tiedgpt.weights.formats.safetensors_file import SafetensorsFile, write_safetensors
from tiedgpt.weights.names import PACKED
from tiedgpt.weights.packed.model import PackedModel, layout
from tiedgpt.weights.packed.panels import FORMS, Form

FILE = "packed.safetensors"
FORMAT, VERSION = "tiedgpt-packed", "1"
ALIGNMENT = 64
PADDING = "padding"
"""Zeros between the norms where one is no multiple of 64 bytes."""
TYPE_NAMES = {"float32": "F32", "uint16": "BF16", "uint8": "U8"}


@dataclass(frozen=True)
class _Array:
    """An array to be written; see `safetensors_file.Writable`."""

    array: NDArray[Any]

    @property
    def format_name(self) -> str:
        return TYPE_NAMES[self.array.dtype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def n_bytes(self) -> int:
        return self.array.nbytes

    def blocks(self) -> Iterator[NDArray[Any]]:
        if self.array.size:
            yield self.array


@dataclass(frozen=True)
class MappedModel(PackedModel):
    """A packed model whose arrays are read from a file when they are used.

    A file that is replaced by another stays as it was for who has it open. One that is cut short in
    its place is not: the system kills a process (SIGBUS) that reads where nothing is any more.
    Between reads `require_whole` sees it and raises instead; in the midst of one nothing can.
    """

    path: Path
    mapped: mmap.mmap

    def require_whole(self) -> None:
        """Raise `CorruptInputError` where the file has become shorter than it was."""
        if self.mapped.size() < len(self.mapped):
            raise CorruptInputError(
                f"{self.path} was cut short while it was in use: pack the model again, and replace "
                "files instead of writing into them"
            )


def save_packed(
    model: PackedModel, directory: str | os.PathLike[str], foreign: Mapping[str, Any] | None = None
) -> None:
    """Write config.json, packed.safetensors and a model card.

    `foreign` holds keys for config.json that change nothing here. Raises `UserError` where the
    directory holds a model that is not packed, `NoRoomError` where the disk is too full.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; give a directory to save the model in")
    if (directory / "config.json").exists() and not is_packed(directory):
        raise UserError(f"{directory} holds another model: give a directory of its own")
    require_room(directory, model.nbytes)
    with replacing(directory / FILE) as temporary:
        metadata = {"format": FORMAT, "version": VERSION, "precision": model.precision}
        write_safetensors(temporary, _in_order(model), metadata, alignment=ALIGNMENT)
    description = config_json(model.config, foreign or {}, model.precision, PACKED)
    write_json(directory / "config.json", description)
    with replacing(directory / "README.md") as temporary:
        temporary.write_text(card(model), encoding="utf-8")


def _in_order(model: PackedModel) -> dict[str, _Array]:
    """Return arrays so that each begins at a multiple of 64 bytes after the one before."""
    even = {n: _Array(a) for n, a in model.arrays.items() if a.nbytes % ALIGNMENT == 0}
    odd = {n: _Array(a) for n, a in model.arrays.items() if n not in even}
    ordered = dict(even)
    for number, (name, array) in enumerate(odd.items()):
        ordered[name] = array
        if number < len(odd) - 1:
            rest = -array.n_bytes % ALIGNMENT
            ordered[PADDING] = _Array(np.zeros(rest, np.uint8))
    return ordered


def is_packed(path: Path) -> bool:
    """Whether a path is a directory in which a packed model lies."""
    return (path / FILE).is_file()


def find_packed(source: str | os.PathLike[str]) -> Path | None:
    """Return the packed directory that a source names, itself or by its file; None: it does not."""
    try:
        path = Path(source).expanduser()
        path = path.parent if path.name == FILE else path
        return path if is_packed(path) else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL in it
        return None


def open_packed(path: str | os.PathLike[str]) -> PackedModel:
    """Open a packed directory: its arrays are read-only views of the file, read when they are used.

    Raises `UserError` where there is no packed model or a later version wrote it,
    `CorruptInputError` where it is damaged, cut off, or not what its config says.
    """
    return open_with_places(Path(path))[0]


def open_with_places(path: Path) -> tuple[PackedModel, Mapping[str, int]]:
    """Open a packed directory; return also the byte of the file at which each array begins."""
    if not is_packed(path):
        raise UserError(f"{path} holds no packed model: tiedgpt convert SOURCE DEST --to packed")
    config = _config(path / "config.json")
    file = SafetensorsFile.open(path / FILE)
    precision = _precision(file)
    expected = layout(config, precision)
    present = {name: entry for name, entry in file.entries.items() if name != PADDING}
    if odd := expected.keys() ^ present.keys():
        raise CorruptInputError(f"{file.path}: {min(odd)[:80]!r} is missing, or one too many")
    mapped = _mapped(file)
    arrays: dict[str, NDArray[Any]] = {}
    for name, (shape, dtype) in expected.items():
        entry, kind = present[name], np.dtype(dtype)
        if (entry.shape, entry.dtype) != (shape, TYPE_NAMES[kind.name]):
            raise CorruptInputError(
                f"{file.path}: {name} is {entry.dtype} {entry.shape}, and its config makes it "
                f"{TYPE_NAMES[kind.name]} {shape}"
            )
        if entry.start % ALIGNMENT:
            raise CorruptInputError(
                f"{file.path}: {name} begins at byte {entry.start:,}, no multiple of {ALIGNMENT}: "
                "another tool wrote it anew; pack the model again"
            )
        arrays[name] = _view(mapped, kind, shape, entry.start)
    model = MappedModel(config, precision, arrays, file.path, mapped)
    return model, {name: entry.start for name, entry in present.items()}


def _mapped(file: SafetensorsFile) -> mmap.mmap:
    """Map a file, which must still be as long as its header says."""
    size = max(entry.start + entry.size for entry in file.entries.values())
    try:
        with file.path.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"cannot read {file.path}: {error.strerror}") from None
    except ValueError:  # empty
        mapped = None
    if mapped is None or len(mapped) != size:
        raise CorruptInputError(f"{file.path} changed while it was opened: try again")
    return mapped


def _view(mapped: mmap.mmap, dtype: Any, shape: tuple[int, ...], start: int) -> NDArray[Any]:
    count = int(np.prod(shape))
    flat = np.frombuffer(mapped, dtype, count, start) if count else np.empty(0, dtype)
    return flat.reshape(shape)


def _config(path: Path) -> GPTConfig:
    """Return the config of a packed directory."""
    described = read_json(path)
    if model_type_from(described) is not PACKED:
        raise CorruptInputError(f"{path} describes another model than the packed one beside it")
    fields, _ = config_fields(described)
    try:
        return GPTConfig(**fields)
    except (UserError, TypeError) as error:
        raise CorruptInputError(f"{path} describes no GPT: {error}") from None


def _precision(file: SafetensorsFile) -> Form:
    """Return what the metadata say the arrays are in."""
    said = file.metadata
    if said.get("format") != FORMAT:
        raise CorruptInputError(f"{file.path} is safetensors of another kind: pack the model again")
    if said.get("version") != VERSION:
        raise UserError(
            f"{file.path} is of version {str(said.get('version'))[:20]}, and version {VERSION} is "
            "read here: another version of tiedgpt wrote it; pack the model again"
        )
    for form in FORMS:
        if said.get("precision") == form:
            return form
    raise CorruptInputError(
        f"{file.path} is in {str(said.get('precision'))[:20]!r}, none of {', '.join(FORMS)}"
    )


def card(model: PackedModel) -> str:
    """Return a short model card."""
    config = model.config
    return f"""---
library_name: tiedgpt
pipeline_tag: text-generation
tags: [{PACKED.name}]
---
# A GPT, packed in {model.precision}

{config.parameter_count():,} parameters in {model.nbytes / 1e6:,.1f} MB, laid out for tiedgpt's CPU
kernels: {config.n_layer} blocks of width {config.n_embd}, {config.n_positions} positions.

    tiedgpt generate DIRECTORY --prompt "..."

or `tiedgpt.infer.Engine(DIRECTORY)`. transformers has no class that computes it;
`GPT.from_pretrained(DIRECTORY)` unpacks it to float32.
"""
