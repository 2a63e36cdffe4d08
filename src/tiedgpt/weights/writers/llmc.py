"""Write llm.c's model checkpoint, which its C and CUDA programs read: a header, then all numbers.

Version 3 holds float32, version 5 bfloat16. wte gets rows of zeros up to a multiple of 128, which
llm.c wants and no softmax of its sees. The tokenizer is a file of its own there and is not written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.formats.llmc_file import HEADER_BYTES, HEADER_INTS, MAGIC, count, parameters
from tiedgpt.weights.writers.limits import require_computed, require_gelu

VERSIONS = {"fp32": (3, torch.float32), "bf16": (5, torch.bfloat16)}
"""Precision -> llm.c's version and the type of every number."""
PADDING = 128
FIXED = {
    "norm": "pre",
    "attention_windows": None,
    "layer_norm_epsilon": 1e-5,
}
"""What llm.c computes, and a model must have."""


def write_llmc(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    approximate_gelu: bool = False,
) -> None:
    """Write `path` for llm.c, in "fp32" or "bf16"; None is the model's own type.

    Raises `UserError`, before anything is written, for what llm.c does not compute: a head of its
    own, GPT-1's norm, banded attention, another activation, MLP width or epsilon; with
    `approximate_gelu` a model of the exact GELU is written, too. A model without biases is written
    with zeros. The tokenizer has no place in the file.
    """
    config = model.config
    require_computed("llm.c", model, FIXED)
    require_gelu("llm.c", model, "gelu_new", approximate_gelu=approximate_gelu)
    version, dtype = _version(model, precision)
    rows = -(-config.vocab_size // PADDING) * PADDING
    sizes = (config.n_layer, config.n_embd, rows, config.n_positions)
    n_bytes = count(*sizes) * dtype.itemsize
    require_room(path.parent, HEADER_BYTES + n_bytes)
    tensors = dict(model.named_parameters())
    done = 0
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(_header(config, version, rows))
        for name, shape in parameters(*sizes):
            done += _write(file, tensors.get(name), shape, dtype)
            if progress is not None:
                progress(done, n_bytes)


def _version(model: GPT, precision: str | None) -> tuple[int, torch.dtype]:
    if precision is not None:
        if precision not in VERSIONS:
            raise UserError(f"precision={precision!r}: llm.c has {' and '.join(VERSIONS)}")
        return VERSIONS[precision]
    own = model.wte.weight.dtype
    for version, dtype in VERSIONS.values():
        if dtype == own:
            return version, dtype
    raise UserError(f'llm.c has no {own}: give precision="fp32" or "bf16"')


def _header(config: GPTConfig, version: int, rows: int) -> bytes:
    numbers = (
        MAGIC, version, config.n_positions, config.vocab_size, config.n_layer, config.n_head,
        config.n_embd, rows,
    )  # fmt: skip
    return struct.pack(f"<{HEADER_INTS}i", *numbers, *[0] * (HEADER_INTS - len(numbers)))


def _write(
    file: BinaryIO, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Write a tensor, followed by zeros up to the shape; return the number of bytes."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    done = 0
    if tensor is not None:
        flat = tensor.detach().to("cpu", dtype).contiguous().flatten()
        done = file.write(flat.view(torch.uint8).numpy().data)
    file.write(bytes(n_bytes - done))
    return n_bytes
