"""A packed model: a directory that opens by memory map, in milliseconds and without torch.

    config.json           our fields, under a `model_type` that transformers refuses
    packed.safetensors    the arrays of `layout`, each from a multiple of 64 bytes on
    tokenizer.json, ...   whatever the tokenizer writes

The matrices lie as `panels.py` describes: U8 are int8 and int4, BF16 the bits of bf16. The
engine's kernels read the mapped arrays; for any other tool `open_checkpoint` unpacks them
under our names. `writer.py` makes such directories.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import read_json, reading
from tiedgpt.weights.checkpoint import Checkpoint, Format, GPTCheckpoint, Program, Writer
from tiedgpt.weights.containers import is_safetensors, read_safetensors
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.packed.panels import (
    PANEL,
    PRECISIONS,
    Layout,
    Panels,
    Precision,
    layouts,
    padded,
    unpack,
)
from tiedgpt.weights.formats.transformers import PACKED, config_fields
from tiedgpt.weights.gpt import shapes
from tiedgpt.weights.registry import defer
from tiedgpt.weights.tensors import Native, Storage, StoredTensor, tensor_in_file

FILE = "packed.safetensors"
FORMAT_NAME, VERSION = "tiedgpt-packed", "1"
"""`format` and `version` in the metadata of the safetensors file."""
ALIGNMENT = 64
PADDING = "padding"
"""The name of zeros in the file that align the array after them."""
TYPES = {np.float32: "float32", np.uint16: "bfloat16", np.uint8: "uint8"}
STACKS = {
    "c_attn": "attn.c_attn",
    "attn_proj": "attn.c_proj",
    "c_fc": "mlp.c_fc",
    "mlp_proj": "mlp.c_proj",
}
"""Matrices that are stacked over the layers -> their names in a block."""
IN_LAYER = {inside: stack for stack, inside in STACKS.items()}


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
    """Arrays by the names of `layout`."""
    path: Path | None = None
    mapped: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def require_whole(self) -> None:
        """Raise `CorruptInputError` if the mapped file was cut short."""
        if self.mapped is not None and self.mapped.size() < len(self.mapped):
            raise CorruptInputError(
                f"{self.path} was cut short while it was in use",
                hint="pack the model again, and replace files instead of writing into them",
            )


def stack_sizes(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Return (rows, width) of each matrix in `STACKS`."""
    d, inner = config.n_embd, config.inner_dim
    return {"c_attn": (3 * d, d), "attn_proj": (d, d), "c_fc": (inner, d), "mlp_proj": (d, inner)}


def layout(config: GPTConfig, precision: Precision) -> dict[str, Layout]:
    """Return the shape and the dtype of every array of a packed model."""
    layers, d = config.n_layer, config.n_embd
    matrix = layouts(precision, config.vocab_size, d)
    arrays = {"wte.weights": matrix[0], "wte.scales": matrix[1]}
    if not config.tie_word_embeddings:
        arrays |= {"head.weights": matrix[0], "head.scales": matrix[1]}
        arrays["head.bias"] = ((padded(config.vocab_size),), np.float32)
    arrays["wpe"] = ((config.n_positions, padded(d)), np.float32)
    for name, (rows, width) in stack_sizes(config).items():
        for suffix, (shape, dtype) in zip(
            ("weights", "scales"), layouts(precision, rows, width), strict=True
        ):
            arrays[f"{name}.{suffix}"] = ((layers, *shape), dtype)
        arrays[f"{name}.bias"] = ((layers, padded(rows)), np.float32)
    arrays["norms"] = ((layers, 2, 2, d), np.float32)  # ln_1 and ln_2; weight and bias
    arrays["ln_f"] = ((2, d), np.float32)
    return arrays


def place_of(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the array that holds a parameter, and the parameter's index in it."""
    scope, _, last = name.rpartition(".")
    layer: tuple[int, ...] = ()
    if scope.startswith("h."):
        _, number, scope = scope.split(".", 2)
        layer = (int(number),)
    if scope == "wpe":
        return scope, ()
    if scope == "ln_f":
        return scope, (int(last == "bias"),)
    if scope.startswith("ln_"):
        return "norms", (*layer, int(scope[3:]) - 1, int(last == "bias"))
    return f"{IN_LAYER.get(scope, scope)}.{'bias' if last == 'bias' else 'weights'}", layer


def find_packed(source: str | os.PathLike[str]) -> Path | None:
    """Return the packed directory of a path to it or to its file, or None."""
    path = Path(source)
    path = path.parent if path.name == FILE else path
    return path if (path / FILE).is_file() else None


def open_packed(path: str | os.PathLike[str], opened: OpenFile | None = None) -> PackedModel:
    """Open a packed directory: its arrays are read-only views of the mapped file.

    `opened` is that file, if it is open already.

    Raises `UserError` without a packed model, or if a later version wrote it, `CorruptInputError`
    if it is damaged, cut off, or contradicts its config.
    """
    path = Path(path)
    file = path / FILE
    if not file.is_file():
        raise UserError(f"{path} holds no packed model: tiedgpt convert MODEL DEST --to packed")
    opened = opened or OpenFile(file)
    config = _read_config(path / "config.json", opened)
    entries, metadata = read_safetensors(opened)
    entries.pop(PADDING, None)
    precision: Any = metadata.get("precision")
    if metadata.get("format") == FORMAT_NAME and metadata.get("version") != VERSION:
        raise UserError(
            f"{file} has version {str(metadata.get('version'))[:20]} of the format, version "
            f"{VERSION} is supported",
            hint="pack the model again",
        )
    described = layout(config, precision) if precision in PRECISIONS else {}
    expected = {name: (TYPES[dtype], shape, 0) for name, (shape, dtype) in described.items()}
    arrays: dict[str, NDArray[Any]] = {}
    if expected != {n: (e.dtype, e.shape, e.storage.start % ALIGNMENT) for n, e in entries.items()}:
        raise CorruptInputError(
            f"{file} does not hold the arrays that its config.json and its precision "
            f"{str(precision)[:20]!r} need, each from a multiple of {ALIGNMENT} bytes on",
            hint="pack the model again",
        )
    with reading(file, "packed model"):  # it may be cut off since its header was read
        mapped = opened.map()
        raw = np.frombuffer(mapped, np.uint8)
        for name, (shape, dtype) in described.items():
            start, size = entries[name].storage.start, entries[name].n_bytes
            arrays[name] = raw[start : start + size].view(dtype).reshape(shape)
    return PackedModel(config, precision, arrays, file, mapped)


def _read_config(path: Path, file: OpenFile) -> GPTConfig:
    described = read_json(path, file.read)
    try:
        if described.get("model_type") != PACKED.name:
            raise UserError("it is of another model")
        return GPTConfig(**config_fields(described)[0])
    except (UserError, TypeError) as error:
        raise CorruptInputError(f"{path} does not describe the packed model: {error}") from None


# As a checkpoint: every matrix of every layer under our names, unpacked when it is read.


def open_checkpoint(file: OpenFile) -> Checkpoint:
    """Return the checkpoint in packed.safetensors; raises as `open_packed`."""
    path = file.path
    if path.name != FILE:
        raise UserError(f"{path} is a packed model: it must be named {FILE}, in a directory")
    model = open_packed(path.parent, file)
    if "head.bias" in model.arrays and model.arrays["head.bias"].any():
        raise UserError(f"{path}: its head has a bias, and a GPT's head has none")
    tensors = {
        name: _make_tensor(file, model, name, shape) for name, shape in shapes(model.config).items()
    }
    return Checkpoint(path, "packed", tensors, files=(path,))


def _make_tensor(
    file: OpenFile, model: PackedModel, name: str, shape: tuple[int, ...]
) -> StoredTensor:
    """Return a parameter, whose matrix is unpacked when it is read."""
    assert model.mapped is not None
    key, index = place_of(name)
    array = model.arrays[key][index]
    start = array.ctypes.data - np.frombuffer(model.mapped, np.uint8).ctypes.data
    if not key.endswith(".weights"):
        tensor = tensor_in_file(file, name, array.shape, "float32", start)
        return replace(tensor, shape=shape, n_bytes=4 * math.prod(shape))
    scales = model.arrays[key.replace("weights", "scales")][index]

    def read(first: int, end: int, low: int, high: int) -> Native:
        skipped = first // PANEL
        panels = Panels(array[skipped:], scales[skipped:], end - skipped * PANEL, high)
        return np.ascontiguousarray(unpack(panels)[first - skipped * PANEL :, low:]).view("<u4")

    return StoredTensor(
        name,
        shape,
        f"{model.precision} panels",
        array.nbytes + scales.nbytes,
        Storage(str(file.path), start, start + array.nbytes),
        read,
    )


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT whose weights the panels stand for."""
    fields, foreign = config_fields(checkpoint.config)
    tensors = dict(checkpoint.tensors)
    coarse = sorted({t.dtype for t in checkpoint.tensors.values()} - {"float32", "fp32 panels"})
    notes = [f"{' and '.join(coarse)} become float32 where torch loads them"] if coarse else []
    return GPTCheckpoint("tiedgpt packed", fields, tensors, foreign=foreign, notes=tuple(notes))


def detect(file: OpenFile) -> bool:
    """Whether it is a safetensors file whose metadata, which we write first, say "packed"."""
    return is_safetensors(file.head) and f'"{FORMAT_NAME}"'.encode() in file.head


PROGRAM = Program("a packed model", fields=(
    "n_inner", "activation_function", "norm", "layer_norm_epsilon", "bias", "attention_windows",
    "tie_word_embeddings",
))  # fmt: skip
FORMAT = Format(
    name="packed",
    title="packed",
    about="directories packed for tiedgpt's CPU kernels",
    about_tokenizer="`tokenizer.json`",
    detect=detect,
    open=open_checkpoint,
    to_gpt=to_gpt,
    file_names=(FILE,),
    writer=Writer(
        write=defer("packed.writer", "write"),
        program=PROGRAM,
        precisions=("int8", "int4", "bf16", "fp32"),
        default="int8",
        holds_tokenizer=True,
        options=("calibration",),
    ),
)
