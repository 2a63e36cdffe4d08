"""A whole GPT packed for CPU kernels: from tensors to panels, layer stacked on layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.weights.packed.panels import DTYPES, Form, pack, padded, shapes

NAMES = {
    "c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc",
    "mlp_proj": "mlp.c_proj",
}  # fmt: skip
"""What a stack is called in a block."""
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class PackedModel:
    """A GPT's arrays, in memory or in a mapped file."""

    config: GPTConfig
    precision: Form
    arrays: dict[str, NDArray[Any]]
    """As `layout` lists them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def require_whole(self) -> None:
        """Raise `CorruptInputError` where a file that the arrays are mapped from was cut short."""


def sizes(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Return (rows, width) of each stacked matrix."""
    d, inner = config.n_embd, config.inner_dim
    return {"c_attn": (3 * d, d), "attn_proj": (d, d), "c_fc": (inner, d), "mlp_proj": (d, inner)}


def layout(config: GPTConfig, precision: Form) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of every array of a packed model."""
    layers, d = config.n_layer, config.n_embd
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    matrices = ["wte"] if config.tie_word_embeddings else ["wte", "head"]
    for name in matrices:
        weights, scales = shapes(precision, config.vocab_size, d)
        found[f"{name}.weights"] = (weights, DTYPES[precision][0])
        found[f"{name}.scales"] = (scales, DTYPES[precision][1])
    if not config.tie_word_embeddings:
        found["head.bias"] = ((padded(config.vocab_size),), np.float32)
    found["wpe"] = ((config.n_positions, padded(d)), np.float32)
    for name, (rows, width) in sizes(config).items():
        weights, scales = shapes(precision, rows, width)
        found[f"{name}.weights"] = ((layers, *weights), DTYPES[precision][0])
        found[f"{name}.scales"] = ((layers, *scales), DTYPES[precision][1])
        found[f"{name}.bias"] = ((layers, padded(rows)), np.float32)
    found["norms"] = ((layers, 2, 2, d), np.float32)
    found["ln_f"] = ((2, d), np.float32)
    return found


def pack_model(config: GPTConfig, tensors: Tensors, precision: Form) -> PackedModel:
    """Pack a GPT's tensors, named and laid out as in `GPT.state_dict()`.

    A model with a head of its own packs that too. Raises `UserError` for weights that are not
    finite.
    """
    arrays = {
        name: np.zeros(shape, dtype) for name, (shape, dtype) in layout(config, precision).items()
    }

    def fill(name: str, matrix: NDArray[Any], form: Form, layer: int | None = None) -> None:
        try:
            panels = pack(matrix, form)
        except UserError as error:
            place = name if layer is None else f"{name} of layer {layer}"
            raise UserError(f"{place}: {error}") from None
        at = ... if layer is None else layer
        arrays[f"{name}.weights"][at] = panels.weights
        arrays[f"{name}.scales"][at] = panels.scales

    fill("wte", tensors["wte.weight"], precision)
    if not config.tie_word_embeddings:
        fill("head", tensors["head.weight"], precision)
        if "head.bias" in tensors:
            arrays["head.bias"][: config.vocab_size] = tensors["head.bias"]
    arrays["wpe"][:, : config.n_embd] = tensors["wpe.weight"]
    for layer in range(config.n_layer):
        for name, inside in NAMES.items():
            fill(name, tensors[f"h.{layer}.{inside}.weight"], precision, layer)
            bias = tensors.get(f"h.{layer}.{inside}.bias")
            if bias is not None:
                arrays[f"{name}.bias"][layer, : len(bias)] = bias
        for number, norm in enumerate(("ln_1", "ln_2")):
            _fill_norm(arrays["norms"][layer, number], tensors, f"h.{layer}.{norm}")
    if config.norm == "pre":
        _fill_norm(arrays["ln_f"], tensors, "ln_f")
    return PackedModel(config, precision, arrays)


def _fill_norm(into: NDArray[np.float32], tensors: Tensors, name: str) -> None:
    into[0] = tensors[f"{name}.weight"]
    bias = tensors.get(f"{name}.bias")
    if bias is not None:
        into[1] = bias
