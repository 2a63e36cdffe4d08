"""A packed model: a directory that opens by memory map, in milliseconds and without torch.

    config.json           our fields, under a `model_type` that transformers refuses
    packed.safetensors    the arrays of `layout`, each from a multiple of 64 bytes on
    tokenizer.json, ...   whatever the tokenizer writes

The matrices lie as `packed_panels.py` describes: U8 are int8 and int4, BF16 the bits of bf16. The
engine's kernels read the mapped arrays; for any other tool `read` unpacks them under our names.
`packed_write.py` makes such directories.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.huggingface import PACKED, config_fields, model_type_from
from tiedgpt.weights.packed_panels import (
    CHUNK,
    DTYPES,
    PANEL,
    PRECISIONS,
    Panels,
    Precision,
    padded,
    shapes,
    unpack,
)
from tiedgpt.weights.safetensors_file import PACKED_FORMAT, SafetensorsFile
from tiedgpt.weights.tensors import Native, Read, Storage, StoredTensor, plain_reader

FILE = "packed.safetensors"
FORMAT, VERSION = PACKED_FORMAT, "1"
ALIGNMENT = 64
PADDING = "padding"
"""The name of zeros in the file that align the array after them."""
TYPE_NAMES = {"float32": "F32", "uint16": "BF16", "uint8": "U8"}
STACKS = {
    "c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc",
    "mlp_proj": "mlp.c_proj",
}  # fmt: skip
"""Matrices that are stacked over the layers -> their names in a block."""


@dataclass(frozen=True)
class PackedModel:
    """A GPT's arrays, in memory or in a mapped file.

    A file that is replaced by another stays as it was for a process that has mapped it. If a file
    is cut short in place, the system kills a process (SIGBUS) that reads beyond its end;
    `require_whole` raises an error instead, between reads.
    """

    config: GPTConfig
    precision: Precision
    arrays: dict[str, NDArray[Any]]
    """As `layout` lists them."""
    path: Path | None = None
    mapped: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def require_whole(self) -> None:
        """Raise `CorruptInputError` where the mapped file was cut short."""
        if self.mapped is not None and self.mapped.size() < len(self.mapped):
            raise CorruptInputError(
                f"{self.path} was cut short while it was in use: pack the model again, and replace "
                "files instead of writing into them"
            )


def stack_sizes(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Return (rows, width) of each matrix in `STACKS`."""
    d, inner = config.n_embd, config.inner_dim
    return {"c_attn": (3 * d, d), "attn_proj": (d, d), "c_fc": (inner, d), "mlp_proj": (d, inner)}


def layout(config: GPTConfig, precision: Precision) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and the dtype of every array of a packed model."""
    layers, d = config.n_layer, config.n_embd
    weight_dtype, scale_dtype = DTYPES[precision]
    arrays: dict[str, tuple[tuple[int, ...], Any]] = {}
    for name in ("wte",) if config.tie_word_embeddings else ("wte", "head"):
        weights, scales = shapes(precision, config.vocab_size, d)
        arrays[f"{name}.weights"] = (weights, weight_dtype)
        arrays[f"{name}.scales"] = (scales, scale_dtype)
    if not config.tie_word_embeddings:
        arrays["head.bias"] = ((padded(config.vocab_size),), np.float32)
    arrays["wpe"] = ((config.n_positions, padded(d)), np.float32)
    for name, (rows, width) in stack_sizes(config).items():
        weights, scales = shapes(precision, rows, width)
        arrays[f"{name}.weights"] = ((layers, *weights), weight_dtype)
        arrays[f"{name}.scales"] = ((layers, *scales), scale_dtype)
        arrays[f"{name}.bias"] = ((layers, padded(rows)), np.float32)
    arrays["norms"] = ((layers, 2, 2, d), np.float32)  # ln_1 and ln_2; weight and bias
    arrays["ln_f"] = ((2, d), np.float32)
    return arrays


def is_packed(path: Path) -> bool:
    """Whether a path is a directory with a packed model."""
    return (path / FILE).is_file()


def find_packed(source: str | os.PathLike[str]) -> Path | None:
    """Return the packed directory that a source names, itself or by its file; else None."""
    try:
        path = Path(source).expanduser()
        path = path.parent if path.name == FILE else path
        return path if is_packed(path) else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL in it
        return None


def open_packed(path: str | os.PathLike[str]) -> PackedModel:
    """Open a packed directory: its arrays are read-only views of the mapped file.

    Raises `UserError` where there is no packed model or a later version wrote it,
    `CorruptInputError` where it is damaged, cut off, or contradicts its config.
    """
    path = Path(path)
    if not is_packed(path):
        raise UserError(f"{path} holds no packed model: tiedgpt convert SOURCE DEST --to packed")
    config = _read_config(path / "config.json")
    file = SafetensorsFile.open(path / FILE)
    precision = _read_precision(file)
    expected = layout(config, precision)
    entries = {name: entry for name, entry in file.entries.items() if name != PADDING}
    if odd := expected.keys() ^ entries.keys():
        raise CorruptInputError(f"{file.path}: {min(odd)[:80]!r} is missing, or one too many")
    mapped = _map(file)
    raw = np.frombuffer(mapped, np.uint8)
    arrays: dict[str, NDArray[Any]] = {}
    for name, (shape, dtype) in expected.items():
        entry, kind = entries[name], np.dtype(dtype)
        if (entry.shape, entry.dtype) != (shape, TYPE_NAMES[kind.name]):
            raise CorruptInputError(
                f"{file.path}: {name} is {entry.dtype} {entry.shape}, and its config makes it "
                f"{TYPE_NAMES[kind.name]} {shape}"
            )
        if entry.start % ALIGNMENT:
            raise CorruptInputError(
                f"{file.path}: {name} begins at byte {entry.start:,}, no multiple of {ALIGNMENT}: "
                "another tool wrote the file again; pack the model again"
            )
        arrays[name] = raw[entry.start : entry.start + entry.size].view(kind).reshape(shape)
    return PackedModel(config, precision, arrays, file.path, mapped)


def _map(file: SafetensorsFile) -> mmap.mmap:
    """Map a file, which must still be as long as its header says."""
    size = max(entry.start + entry.size for entry in file.entries.values())
    try:
        with file.path.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file.path}: {error}") from None
    if len(mapped) != size:
        raise CorruptInputError(f"{file.path} changed while it was opened: try again")
    return mapped


def _read_config(path: Path) -> GPTConfig:
    described = read_json(path)
    if model_type_from(described) is not PACKED:
        raise CorruptInputError(f"{path} describes another model than the packed one beside it")
    fields, _ = config_fields(described)
    try:
        return GPTConfig(**fields)
    except (UserError, TypeError) as error:
        raise CorruptInputError(f"{path} describes no GPT: {error}") from None


def _read_precision(file: SafetensorsFile) -> Precision:
    """Check the metadata; return the precision of the arrays."""
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        raise CorruptInputError(f"{file.path} is another kind of safetensors: pack the model again")
    if metadata.get("version") != VERSION:
        raise UserError(
            f"{file.path} has version {str(metadata.get('version'))[:20]}, version {VERSION} is "
            "supported: another version of tiedgpt wrote it; pack the model again"
        )
    for precision in PRECISIONS:
        if metadata.get("precision") == precision:
            return precision
    raise CorruptInputError(
        f"{file.path} has the precision {str(metadata.get('precision'))[:20]!r}, it must be one of "
        f"{', '.join(PRECISIONS)}"
    )


# As a checkpoint: every matrix of every layer under our names, unpacked when it is read.


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in packed.safetensors at `path`; raises as `open_packed`."""
    if path.name != FILE:
        raise UserError(f"{path} is a packed model: it must be named {FILE}, in a directory")
    model = open_packed(path.parent)
    config, arrays = model.config, model.arrays
    if "head.bias" in arrays and arrays["head.bias"].any():
        raise UserError(f"{path}: its head has a bias, and a GPT's head has none")
    tensors: dict[str, StoredTensor] = {}
    assert model.mapped is not None
    begin = np.frombuffer(model.mapped, np.uint8).ctypes.data

    def storage(array: NDArray[Any]) -> Storage:
        start = array.ctypes.data - begin
        return Storage(str(path), start, start + array.nbytes)

    def add_matrix(name: str, panels: Panels) -> None:
        weights, n_bytes = panels.weights, panels.weights.nbytes + panels.scales.nbytes
        tensors[name] = StoredTensor(
            name, (panels.rows, panels.width), f"{panels.precision} panels", n_bytes,
            storage(weights), _unpacking(panels),
        )  # fmt: skip

    def add_vectors(name: str, array: NDArray[Any], width: int) -> None:
        values, place = array[..., :width], storage(array)
        tensors[name] = StoredTensor(
            name, values.shape, "float32", values.nbytes, place,
            plain_reader(path, place.start, array.shape[-1], 4),
        )  # fmt: skip

    def add_norm(name: str, weight_and_bias: NDArray[Any]) -> None:
        add_vectors(f"{name}.weight", weight_and_bias[0], config.n_embd)
        if config.bias:
            add_vectors(f"{name}.bias", weight_and_bias[1], config.n_embd)

    for name, inside in ((EMBEDDING, "wte"), (HEAD, "head")):
        if f"{inside}.weights" in arrays:
            weights, scales = arrays[f"{inside}.weights"], arrays[f"{inside}.scales"]
            add_matrix(name, Panels(weights, scales, config.vocab_size, config.n_embd))
    add_vectors("wpe.weight", arrays["wpe"], config.n_embd)
    for layer in range(config.n_layer):
        for stack, (rows, width) in stack_sizes(config).items():
            name = f"h.{layer}.{STACKS[stack]}"
            weights, scales = arrays[f"{stack}.weights"][layer], arrays[f"{stack}.scales"][layer]
            add_matrix(f"{name}.weight", Panels(weights, scales, rows, width))
            if config.bias:
                add_vectors(f"{name}.bias", arrays[f"{stack}.bias"][layer], rows)
        add_norm(f"h.{layer}.ln_1", arrays["norms"][layer, 0])
        add_norm(f"h.{layer}.ln_2", arrays["norms"][layer, 1])
    if config.norm == "pre":
        add_norm("ln_f", arrays["ln_f"])
    return Checkpoint(path, "packed", tensors, files=(path,))


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT whose weights the panels stand for."""
    fields, foreign = config_fields(checkpoint.config)
    tensors = {name: LazyTensor(tensor) for name, tensor in checkpoint.tensors.items()}
    coarse = sorted({t.dtype for t in checkpoint.tensors.values()} - {"float32", "fp32 panels"})
    notes = [f"{' and '.join(coarse)} become float32 where torch loads them"] if coarse else []
    return GPTCheckpoint("tiedgpt packed", fields, tensors, foreign=foreign, notes=tuple(notes))


def _unpacking(panels: Panels) -> Read:
    """Return a reader of a matrix in panels, which unpacks a chunk of them at a time."""

    def read(first: int, end: int, left: int, right: int) -> Native:
        values = np.empty((end - first, right - left), np.float32)
        for panel in range(first // PANEL, -(-end // PANEL), CHUNK):
            weights, scales = (a[panel : panel + CHUNK] for a in (panels.weights, panels.scales))
            begin, rows = panel * PANEL, len(weights) * PANEL
            block = unpack(Panels(weights, scales, rows, right))
            low, high = max(first, begin), min(end, begin + rows)
            values[low - first : high - first] = block[low - begin : high - begin, left:]
        return values.view("<u4")

    return read
