"""Write a GGUF file with which llama.cpp computes what the model computes.

Tensor types as llama.cpp's own converter chooses them: vectors and `position_embd` stay F32,
matrices get the requested precision; Q8_0 falls back to F16 where rows are no multiple of 32. A
tied W is written once: without an `output.weight`, llama.cpp predicts with `token_embd.weight`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD
from tiedgpt.weights.gguf import ARCHITECTURE, EPSILON_KEY, SIZE_KEYS, TIE_CLAIM, to_theirs
from tiedgpt.weights.gguf_tokenizer import MODEL, SPLIT, Vocabulary, vocabulary
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.plain_model import (
    PRECISIONS,
    converted,
    plain_parameters,
    require_gelu,
    zero_biases,
)

TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Precision -> gguf.GGMLQuantizationType."""
FILE_TYPES = {
    "fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0",
}  # fmt: skip
"""Precision -> gguf.LlamaFileType."""
DTYPES = {TYPES[name]: dtype for name, dtype in PRECISIONS.items()}
Q8_0_BLOCK = 32
LARGEST_Q8_0 = 127 * 65504
"""A block's largest number is 127 times its float16 scale."""
POSITIONS = to_theirs("wpe.weight")


def write(
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

    `precision` is fp32, fp16, bf16 or q8_0; None means the model's own. `duplicate_head` also
    writes a tied W as `output.weight`, for readers that do not support tying. `approximate_gelu`
    permits a model with the exact GELU, although llama.cpp computes the tanh form. `progress`
    receives the bytes written and their total. Missing biases are written as zeros.

    Raises `UserError`, before anything is written, for what llama.cpp's gpt2 does not compute and
    for a tokenizer that it does not have.
    """
    gguf = require_package("gguf", "writing GGUF files")
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of a file, such as model.gguf")
    precision = _precision(model, precision)
    _refuse_what_llama_cpp_lacks(model)
    require_gelu("llama.cpp's gpt2", model, "gelu_new", approximate_gelu=approximate_gelu)
    config = model.config
    parameters = plain_parameters(model, "llama.cpp's gpt2") | zero_biases(config, torch.float32)
    if duplicate_head and model.head is None:
        parameters[HEAD] = parameters[EMBEDDING]
    tensors = {to_theirs(name): parameter for name, parameter in parameters.items()}
    kinds = {name: _kind(name, tensor, precision) for name, tensor in tensors.items()}
    sizes = {name: _n_bytes(gguf, tensors[name], kind) for name, kind in kinds.items()}
    words = vocabulary(tokenizer, config)
    total = sum(sizes.values())
    require_room(path.parent, total)
    done = 0
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        with contextlib.closing(writer):
            _add_metadata(gguf, writer, config, path.stem, precision)
            _add_vocabulary(writer, words)
            for name, tensor in tensors.items():
                ggml = gguf.GGMLQuantizationType[kinds[name]]
                writer.add_tensor_info(name, tensor.shape, np.float32, sizes[name], ggml)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors.items():
                writer.write_tensor_data(_encoded(gguf, name, tensor, kinds[name]))
                done += sizes[name]
                if progress is not None:
                    progress(done, total)


def _precision(model: GPT, precision: str | None) -> str:
    choices = ", ".join(TYPES)
    if precision is not None and precision not in TYPES:
        raise UserError(f"precision={precision!r} cannot be written into GGUF; choose of {choices}")
    own = model.wte.weight.dtype
    precision = precision or next((n for n, dtype in PRECISIONS.items() if dtype is own), None)
    if precision is None:
        raise UserError(f"llama.cpp does not run {own}: give a precision ({choices})")
    return precision


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


def _kind(name: str, tensor: Tensor, precision: str) -> str:
    """Return ggml's type for a tensor."""
    if tensor.ndim == 1 or name == POSITIONS:
        return "F32"
    if precision == "q8_0" and tensor.shape[-1] % Q8_0_BLOCK:
        return "F16"
    return TYPES[precision]


def _n_bytes(gguf: Any, tensor: Tensor, kind: str) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return math.prod(tensor.shape) // block * block_bytes


def _encoded(gguf: Any, name: str, tensor: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """Return a tensor's data as it is stored."""
    if kind in DTYPES:
        flat = converted(name, tensor, DTYPES[kind]).flatten()
        return flat.view(torch.uint8).numpy()
    numbers = converted(name, tensor, torch.float32)
    smallest, largest = (float(bound) for bound in numbers.aminmax())
    if not max(-smallest, largest) <= LARGEST_Q8_0:  # also where they are nan
        raise UserError(f"{name} has numbers that are not finite or too large for Q8_0: write fp32")
    with np.errstate(over="ignore", divide="ignore"):
        return gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType[kind])


def _add_metadata(gguf: Any, writer: Any, config: GPTConfig, name: str, precision: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[precision]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    sizes = {field: getattr(config, field) for field in SIZE_KEYS} | {"n_inner": config.inner_dim}
    for field, size in sizes.items():
        writer.add_uint32(f"{ARCHITECTURE}.{SIZE_KEYS[field]}", size)
    writer.add_float32(f"{ARCHITECTURE}.{EPSILON_KEY}", config.layer_norm_epsilon)
    writer.add_bool(TIE_CLAIM, config.tie_word_embeddings)


def _add_vocabulary(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(SPLIT)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    for key, id in words.special_ids.items():
        writer.add_uint32(key, id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
