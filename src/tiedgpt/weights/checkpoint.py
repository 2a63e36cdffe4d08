"""A GPT in a file, by our names and in our layout, whoever wrote the file.

Each format's module has `as_gpt`, which translates the file's names and layout into ours. A format
that shares its container with others (safetensors, torch.save) also says whether a checkpoint is
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.tensors import FLOATS, StoredTensor, printable

if TYPE_CHECKING:
    from torch import Tensor

BY_FORMAT = {
    "GGUF": "gguf",
    "ONNX": "dialects.onnx",
    "llm.c": "llmc",
    "Keras HDF5": "keras",
    "packed": "packed",
    "TensorFlow": "openai_gpt2",
    "numpy": "openai_gpt1",
}
"""`Checkpoint.format` -> the module of this package whose `as_gpt` understands it."""
IN_SHARED_CONTAINERS = ("dialects.nanogpt", "dialects.transformers")
"""Modules with `recognizes` and `as_gpt`, asked in this order, of what several projects write."""


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint, none of them read, and what is said about them."""

    source: Path | str
    format: str
    """safetensors, torch, GGUF, ONNX, or module."""
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the file itself says beside its tensors, and what else a config.json beside it says."""
    claim: bool | None = None
    """Whether it is claimed that the head is tied; None where nothing says so."""
    claim_source: str = "nothing says whether the head is tied"
    reads: tuple[str, ...] = ()
    """Names of matrices that are known to be looked up, by graph or by module."""
    predicts: tuple[str, ...] = ()
    """Names of matrices that are known to predict, or, of a module, that may."""
    products: tuple[str, ...] | None = None
    """Names of all matrices that multiply, where a graph tells; else None."""
    files: tuple[Path, ...] = ()
    headless: bool = False
    """Whether it is known that nothing here predicts tokens: a bare body, a classifier."""
    derived: str = ""
    """Of a module, why its head computes with something derived from, or other than, W."""

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens, where the config tells it."""
        return self._told("vocab_size")

    @property
    def width(self) -> int | None:
        """The width of the model, where the config tells it."""
        told = (self._told(key) for key in ("n_embd", "hidden_size", "d_model"))
        return next((width for width in told if width is not None), None)

    def _told(self, key: str) -> int | None:
        inner = self.config.get("text_config")
        value = self.config.get(key, inner.get(key) if isinstance(inner, dict) else None)
        return value if type(value) is int and value > 0 else None


@dataclass(frozen=True)
class LazyTensor:
    """A stored tensor as one of ours: as it lies, or a matrix with its axes changed over."""

    stored: StoredTensor
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in our layout."""
        turned = self.transposed and len(self.stored.shape) == 2
        return self.stored.shape[::-1] if turned else self.stored.shape

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in memory as it is read."""
        return self.stored.count * FLOATS.get(self.stored.dtype, 4)

    def require_readable(self) -> None:
        """Raise `UserError` for a type that is not read here."""
        if not self.stored.is_decodable:
            raise UserError(
                f"{printable(self.stored.name)} is {self.stored.dtype}, which is not read as a "
                f"model's weights; {', '.join(FLOATS)} and GGUF's quantized types are"
            )

    def read(self) -> Tensor:
        """Return it in memory of its own; what is quantized as float32.

        Raises `UserError` for a type that is not read here.
        """
        import torch

        self.require_readable()
        rows = self.stored.matrix_shape[0]
        if self.stored.dtype in FLOATS:
            native = self.stored.native(0, rows)
            native = native if native.flags.owndata else native.copy()  # of memory that is mapped
            flat = torch.from_numpy(np.ascontiguousarray(native).reshape(-1).view(np.uint8))
            tensor = flat.view(getattr(torch, self.stored.dtype)).view(self.stored.shape)
        else:
            tensor = torch.from_numpy(self.stored.rows(0, rows)).view(self.stored.shape)
        return tensor.T.contiguous() if self.transposed and tensor.ndim == 2 else tensor


@dataclass(frozen=True)
class GPTCheckpoint:
    """What a checkpoint holds and says of a GPT."""

    layout: str
    """Whose names and layout: "transformers gpt2", "nanoGPT", ..."""
    fields: Mapping[str, Any]
    """What it says, under GPTConfig's names."""
    tensors: dict[str, LazyTensor]
    """Our names; `head.weight` where there is a second matrix."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """What such a checkpoint means where it is silent."""
    foreign: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its config that change nothing here."""
    notes: tuple[str, ...] = ()
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Notes on what is assumed and uncertain, by its field; one that the caller gives is none."""


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a checkpoint.

    Raises `UserError` where it is another kind of model, `CorruptInputError` where its tensors
    contradict each other.
    """
    names: tuple[str, ...] = IN_SHARED_CONTAINERS
    if checkpoint.format in BY_FORMAT:
        names = (BY_FORMAT[checkpoint.format],)
    for name in names:
        module = import_module(f"tiedgpt.weights.{name}")
        recognizes = getattr(module, "recognizes", lambda checkpoint: True)
        if recognizes(checkpoint):
            answer: GPTCheckpoint = module.as_gpt(checkpoint)
            return answer
    raise CorruptInputError(f"{checkpoint.source} holds no GPT that is known here")
