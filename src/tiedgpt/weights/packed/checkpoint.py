"""A packed directory as a checkpoint: every matrix of every layer by our names, unpacked when read.

Tools that know no panels (`tie`, `convert`, `GPT.from_pretrained`) read it like any checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.names import EMBEDDING, HEAD
from tiedgpt.weights.packed.file import FILE, open_with_places
from tiedgpt.weights.packed.model import NAMES, sizes
from tiedgpt.weights.packed.panels import CHUNK, PANEL, Form, Panels, unpack
from tiedgpt.weights.tensors import PANEL_TYPES, Native, Read, Storage, StoredTensor

TYPES: dict[Form, str] = dict(zip(("fp32", "bf16", "int8", "int4"), PANEL_TYPES, strict=True))


def open_packed_checkpoint(path: Path) -> Checkpoint:
    """Return what packed.safetensors at `path` holds; raises as `open_packed`."""
    if path.name != FILE:
        raise UserError(f"{path} is packed for CPU kernels: it is read as {FILE} of a directory")
    model, places = open_with_places(path.parent)
    config, arrays = model.config, model.arrays
    if "head.bias" in arrays and arrays["head.bias"].any():
        raise UserError(f"{path}: its head has a bias, which a GPT here has not")
    tensors: dict[str, StoredTensor] = {}

    def lies(name: str, index: tuple[int, ...] = ()) -> Storage:
        array = arrays[name]
        size = array[index].nbytes
        start = places[name]
        for at, step in zip(index, array.strides, strict=False):
            start += at * step
        return Storage(str(path), start, start + size)

    def matrix(name: str, stack: str, form: Form, rows: int, width: int, *layer: int) -> None:
        weights, scales = arrays[f"{stack}.weights"], arrays[f"{stack}.scales"]
        if layer:
            weights, scales = weights[layer], scales[layer]
        tensors[name] = StoredTensor(
            name, (rows, width), TYPES[form], weights.nbytes + scales.nbytes,
            lies(f"{stack}.weights", layer), _unpacking(weights, scales),
        )  # fmt: skip

    def plain(name: str, stack: str, values: NDArray[Any], *index: int) -> None:
        tensors[name] = StoredTensor(
            name, values.shape, "float32", values.nbytes, lies(stack, index), _reading(values)
        )

    width = config.n_embd
    matrix(EMBEDDING, "wte", model.precision, config.vocab_size, width)
    if not config.tie_word_embeddings:
        matrix(HEAD, "head", model.precision, config.vocab_size, width)
    plain("wpe.weight", "wpe", arrays["wpe"][:, :width])
    for layer in range(config.n_layer):
        for stack, (rows, columns) in sizes(config).items():
            name = f"h.{layer}.{NAMES[stack]}"
            matrix(f"{name}.weight", stack, model.precision, rows, columns, layer)
            if config.bias:
                plain(f"{name}.bias", f"{stack}.bias", arrays[f"{stack}.bias"][layer, :rows], layer)
    for name, array, *index in _norms(config):
        plain(name, array, arrays[array][tuple(index)], *index)
    return Checkpoint(path, "packed", tensors, files=(path,))


def _norms(config: GPTConfig) -> Iterator[Any]:
    """Yield the name of each norm's vector and where it lies."""
    kinds = ("weight", "bias") if config.bias else ("weight",)
    for kind, suffix in enumerate(kinds):
        for layer in range(config.n_layer):
            yield f"h.{layer}.ln_1.{suffix}", "norms", layer, 0, kind
            yield f"h.{layer}.ln_2.{suffix}", "norms", layer, 1, kind
        if config.norm == "pre":
            yield f"ln_f.{suffix}", "ln_f", kind


def _unpacking(weights: NDArray[Any], scales: NDArray[Any]) -> Read:
    """Return a reader of a matrix in panels."""

    def read(first: int, end: int, left: int, right: int) -> Native:
        values = np.empty((end - first, right - left), np.float32)
        for panel in range(first // PANEL, -(-end // PANEL), CHUNK):
            part = slice(panel, panel + CHUNK)
            rows = len(weights[part]) * PANEL
            begin = panel * PANEL
            block = unpack(Panels(weights[part], scales[part], rows, right))
            low, high = max(first, begin), min(end, begin + rows)
            values[low - first : high - first] = block[low - begin : high - begin, left:]
        return values.view("<u4")

    return read


def _reading(values: NDArray[Any]) -> Read:
    """Return a reader of float32 in memory."""
    rows = values.reshape(-1, values.shape[-1])

    def read(first: int, end: int, left: int, right: int) -> Native:
        return np.ascontiguousarray(rows[first:end, left:right]).view("<u4")

    return read
