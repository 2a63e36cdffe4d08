"""Write a GGUF file for llama.cpp.

Tensor types as llama.cpp's own converter chooses them: vectors and `position_embd` stay F32,
matrices get the requested precision; blocks of 32 fall back to F16 where rows are not a multiple
of 32. W gets 8 bits where the others get fewer. A tied W is written once: without an
`output.weight`, llama.cpp predicts with `token_embd.weight`. `NAME.Modelfile` is for Ollama.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiedgpt.core.config import GPTConfig
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.runtime import require_package
from tiedgpt.text.tokenizer import Tokenizer
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD
from tiedgpt.weights.formats.gguf import (
    ARCHITECTURE,
    EPSILON_KEY,
    SIZE_KEYS,
    TIE_CLAIM,
    WRITER,
    to_theirs,
)
from tiedgpt.weights.formats.gguf.vocabulary import add_tokenizer
from tiedgpt.weights.parameters import PRECISIONS, convert_tensor, parameters_for, zero_biases

TYPES = {name: name.upper().replace("P", "") for name in WRITER.precisions}
"""Precision -> gguf.GGMLQuantizationType: fp16 -> F16, q4_0 -> Q4_0."""
DTYPES = {TYPES[name]: dtype for name, dtype in PRECISIONS.items()}
STEPS = {"Q8_0": 127, "Q5_0": 16, "Q4_0": 8, "Q5_1": 1, "Q4_1": 1}
"""A block's largest number over the float16 that is stored with it: a scale, or for _1 the least
number."""
LARGEST_HALF = 65504
POSITIONS = to_theirs("wpe.weight")
MATRICES = to_theirs(EMBEDDING), to_theirs(HEAD)
TRACKED = "{%- generation -%}", "{%- endgeneration -%}"
"""Tags of transformers around trained replies, which other Jinja engines refuse."""


def write(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str = "fp32",
    w_precision: str | None = None,
    duplicate_head: bool = False,
    approximate_gelu: bool = False,
    chat_template: str = "",
    ollama_template: str = "",
    ollama_system: str | None = None,
    end_ids: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a GPT-2 and its tokenizer into one GGUF file, atomically.

    `precision` is one of `TYPES`. `w_precision` is that of W, and of an untied head; None means
    `precision`, but at least 8 bits. `duplicate_head` also writes a tied W as `output.weight`, for
    readers that do not support tying. `approximate_gelu` permits a model with the exact GELU,
    although llama.cpp computes the tanh form. `chat_template` is Jinja, `ollama_template` Go's;
    `ollama_system` is the default system message; `end_ids` end a reply, beside the config's end
    of text. `progress` receives the bytes written and their total. Missing biases are written as
    zeros.

    Raises `UserError`, before anything is written, for what llama.cpp's gpt2 does not compute and
    for a tokenizer that it does not have.
    """
    gguf = require_package("gguf", "writing GGUF files")
    if any(line.rstrip().endswith('"""') for line in (ollama_system or "").split("\n")[:-1]):
        raise UserError(
            "the default system message has a line that ends in three quotes, which ends it in "
            "Ollama's Modelfile"
        )
    config = model.config
    parameters = parameters_for(WRITER.program, model, approximate_gelu=approximate_gelu)
    w_precision = w_precision or ("q8_0" if precision.startswith(("q4", "q5")) else precision)
    if w_precision not in TYPES:
        raise UserError(
            f"must be one of {', '.join(TYPES)}, got {w_precision!r}", option="w_precision"
        )
    parameters |= zero_biases(config, torch.float32)
    if duplicate_head and model.head is None:
        parameters[HEAD] = parameters[EMBEDDING]
    tensors = {to_theirs(name): parameter for name, parameter in parameters.items()}
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    _add_metadata(gguf, writer, config, path.stem, precision)
    add_tokenizer(writer, tokenizer, config, end_ids)
    if chat_template:
        for tag in TRACKED:
            chat_template = chat_template.replace(tag, "")
        writer.add_chat_template(chat_template)
    qtypes, total = {}, 0
    for name, tensor in tensors.items():
        target = w_precision if name in MATRICES else precision
        if tensor.ndim == 1 or name == POSITIONS:
            target = "fp32"
        elif target.startswith("q") and tensor.shape[-1] % 32:  # not whole blocks
            target = "fp16"
        qtypes[name] = qtype = gguf.GGMLQuantizationType[TYPES[target]]
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        n_bytes = tensor.numel() // block * block_bytes
        writer.add_tensor_info(name, tensor.shape, np.float32, n_bytes, qtype)
        total += n_bytes
    require_room(path.parent, total)
    done = 0
    with replacing(path) as temporary, contextlib.closing(writer):
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            data = _encoded(gguf, name, tensor, qtypes[name])
            writer.write_tensor_data(data)
            done += data.nbytes
            if progress is not None:
                progress(done, total)
    if not (ollama_template or chat_template):  # Ollama knows the usual ones of Jinja
        ollama_template = "{{ .Prompt }}"
    assert tokenizer is not None  # or `add_tokenizer` had refused
    with replacing(path.with_suffix(".Modelfile")) as temporary:
        text = _modelfile(path.name, config, tokenizer, ollama_template, ollama_system, end_ids)
        temporary.write_text(text, encoding="utf-8")


def _modelfile(
    name: str,
    config: GPTConfig,
    tokenizer: Tokenizer,
    template: str,
    system: str | None,
    end_ids: Sequence[int],
) -> str:
    """Return the Modelfile that `ollama create` reads for a file next to it."""
    ends = [config.eos_token_id, tokenizer.eos_token_id, *end_ids]
    texts = dict.fromkeys(tokenizer.decode([id]) for id in ends if id is not None)
    lines = [f"FROM ./{name}", f"PARAMETER num_ctx {config.n_positions}"]
    lines += [f'TEMPLATE """{template}"""'] if template else []
    lines += [] if system is None else [f'SYSTEM """{system}"""']
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in texts]
    return "\n".join(lines) + "\n"


def _encoded(gguf: Any, name: str, tensor: Tensor, qtype: Any) -> np.ndarray[Any, Any]:
    if qtype.name in DTYPES:
        return convert_tensor(name, tensor, DTYPES[qtype.name]).flatten().view(torch.uint8).numpy()
    numbers = convert_tensor(name, tensor, torch.float32)
    if not float(numbers.abs().max()) <= STEPS[qtype.name] * LARGEST_HALF:  # also where it is nan
        raise UserError(
            f"{name} has numbers that are not finite or too large for {qtype.name}",
            hint="write fp32",
        )
    with np.errstate(over="ignore", divide="ignore"):
        return gguf.quants.quantize(numbers.numpy(), qtype)


def _add_metadata(gguf: Any, writer: Any, config: GPTConfig, name: str, precision: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    prefix = "ALL" if precision == "fp32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{TYPES[precision]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    sizes = {field: getattr(config, field) for field in SIZE_KEYS} | {"n_inner": config.inner_dim}
    for field, size in sizes.items():
        writer.add_uint32(SIZE_KEYS[field], size)
    writer.add_float32(EPSILON_KEY, config.layer_norm_epsilon)
    writer.add_bool(TIE_CLAIM, config.tie_word_embeddings)
