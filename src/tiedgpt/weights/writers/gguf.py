"""Write a GGUF file with which llama.cpp computes what the model computes.

Types as llama.cpp's own converter chooses them: vectors and `position_embd` stay F32, matrices get
the precision that was asked for; Q8_0 falls back to F16 where rows are no multiple of 32. One copy
of a tied W: llama.cpp takes `token_embd` for the head where there is no `output.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.dialects.gguf import ARCHITECTURE, EPSILON_KEY, SIZE_KEYS, to_theirs
from tiedgpt.weights.formats import q8_0
from tiedgpt.weights.formats.gguf_file import TIE_CLAIM, TYPES
from tiedgpt.weights.names import EMBEDDING, HEAD, shapes
from tiedgpt.weights.save import require_plain_head
from tiedgpt.weights.tensors import BLOCK_BYTES
from tiedgpt.weights.writers.gguf_pairs import Info, Pair, header, padding
from tiedgpt.weights.writers.gguf_vocabulary import vocabulary_pairs
from tiedgpt.weights.writers.limits import require_gelu

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "q8_0": "Q8_0"}
FILE_TYPES = {"fp32": 0, "fp16": 1, "bf16": 32, "q8_0": 7}
"""llama.cpp's `enum llama_ftype`."""
TYPE_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
QUANTIZATION_VERSION = 2
POSITIONS = "wpe.weight"


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: rows of a parameter, or zeros where the model has no bias."""

    info: Info
    dtype: str
    parameter: Tensor | None

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield its bytes in order, a few megabytes at a time."""
        if self.parameter is None:
            yield np.zeros(self.info.shape, np.float32)
            return
        rows = self.parameter.detach().reshape(-1, self.info.shape[-1])
        step = max(1, BLOCK_BYTES // (4 * rows.shape[1]))
        for start in range(0, len(rows), step):
            yield self._encoded(rows[start : start + step].cpu())

    def _encoded(self, rows: Tensor) -> NDArray[Any]:
        if self.dtype != "Q8_0":
            wanted = getattr(torch, self.dtype)
            encoded = rows.to(wanted).contiguous()
            if wanted is torch.float16 and encoded.isinf().any() and not rows.isinf().any():
                raise UserError(
                    f"{self.info.name} has numbers beyond float16's: write bf16 or fp32"
                )
            return encoded.view(torch.uint8).numpy()
        numbers = rows.float().numpy()
        if not np.abs(numbers).max(initial=0) <= 127 * 65504:
            raise UserError(
                f"{self.info.name} has numbers not finite or too large for Q8_0: write fp32"
            )
        return q8_0.quantize(numbers)


def write_gguf(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    duplicate_head: bool = False,
    approximate_gelu: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GPT-2 and its tokenizer into one GGUF file, atomically.

    `precision` is fp32, fp16, bf16 or q8_0; None means the model's own. `duplicate_head` writes a
    tied W once more as `output.weight`, for readers that do not know of tying. `approximate_gelu`
    writes a model of the exact GELU, though llama.cpp computes the tanh form. `progress` is given
    the bytes written and their total. Without biases, zeros are written. Raises `UserError`, before
    anything is written, for what llama.cpp's gpt2 does not compute and for a tokenizer that
    it does not have.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of a file, such as model.gguf")
    precision = _checked_precision(model, precision)
    _refuse_what_llama_cpp_lacks(model)
    require_gelu("llama.cpp's gpt2", model, "gelu_new", approximate_gelu=approximate_gelu)
    entries = _entries(model, precision, duplicate_head)
    pairs = _pairs(model.config, path, precision) | vocabulary_pairs(tokenizer, model.config)
    infos = [entry.info for entry in entries]
    head = header(pairs, infos)
    total = sum(info.n_bytes for info in infos)
    require_room(path.parent, len(head) + sum(i.n_bytes + padding(i.n_bytes) for i in infos))
    done = 0
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(head)
        for entry in entries:
            for block in entry.blocks():
                file.write(block.data)
                done += block.nbytes
                if progress is not None:
                    progress(done, total)
            file.write(bytes(padding(entry.info.n_bytes)))


def _checked_precision(model: GPT, precision: str | None) -> str:
    if precision in PRECISIONS:
        return precision
    choices = ", ".join(PRECISIONS)
    if precision is not None:
        raise UserError(f"precision={precision!r} is none that GGUF is written in: {choices}")
    own = str(model.wte.weight.dtype).removeprefix("torch.")
    for name, dtype in PRECISIONS.items():
        if dtype == own:
            return name
    raise UserError(f"the model is {own}, which llama.cpp does not run: give precision ({choices})")


def _refuse_what_llama_cpp_lacks(model: GPT) -> None:
    config = model.config
    lacking = {
        "norm='post' (GPT-1)": config.norm != "pre",
        "attention_windows (banded attention)": config.attention_windows is not None,
    }
    for what, lacks in lacking.items():
        if lacks:
            raise UserError(
                f"{what} cannot be written into GGUF: llama.cpp's gpt2 computes GPT-2 (pre-norm, "
                "dense attention) and nothing else"
            )
    require_plain_head(model, "llama.cpp's gpt2")


def _entries(model: GPT, precision: str, duplicate_head: bool) -> list[_Entry]:
    """Return every tensor that llama.cpp wants, which has biases everywhere."""
    config, parameters = model.config, dict(model.named_parameters())
    wanted = shapes(replace(config, bias=True))
    if extra := next((name for name in parameters if name not in wanted), None):
        raise UserError(f"{extra} is not a plain GPT-2's: merge or remove it before writing GGUF")
    if duplicate_head and model.head is None:
        wanted[HEAD] = wanted[EMBEDDING]
        parameters[HEAD] = parameters[EMBEDDING]
    entries = []
    for name, shape in wanted.items():
        parameter = parameters.get(name)
        absent = parameter is None and not config.bias and name.endswith(".bias")
        if not absent and (parameter is None or parameter.shape != shape):
            has = "missing" if parameter is None else f"of shape {tuple(parameter.shape)}"
            raise UserError(f"{name} is {has}; by the model's config it is of shape {shape}")
        entries.append(_entry(name, parameter, shape, precision))
    return entries


def _entry(name: str, parameter: Tensor | None, shape: tuple[int, ...], precision: str) -> _Entry:
    dtype = "float32" if len(shape) == 1 or name == POSITIONS else PRECISIONS[precision]
    if dtype == "Q8_0" and shape[-1] % q8_0.BLOCK:
        dtype = "float16"
    number = TYPE_NUMBERS[dtype]
    _, block, block_bytes = TYPES[number]
    n_bytes = math.prod(shape) // block * block_bytes
    return _Entry(Info(to_theirs(name), shape, number, n_bytes), dtype, parameter)


def _pairs(config: GPTConfig, path: Path, precision: str) -> dict[str, Pair]:
    sizes = {name: getattr(config, name) for name in SIZE_KEYS} | {"n_inner": config.inner_dim}
    return {
        "general.architecture": Pair("text", ARCHITECTURE),
        "general.type": Pair("text", "model"),
        "general.name": Pair("text", path.stem),
        "general.file_type": Pair("u32", FILE_TYPES[precision]),
        "general.quantization_version": Pair("u32", QUANTIZATION_VERSION),
        **{f"{ARCHITECTURE}.{SIZE_KEYS[name]}": Pair("u32", n) for name, n in sizes.items()},
        f"{ARCHITECTURE}.{EPSILON_KEY}": Pair("f32", config.layer_norm_epsilon),
        TIE_CLAIM: Pair("bool", config.tie_word_embeddings),
    }
