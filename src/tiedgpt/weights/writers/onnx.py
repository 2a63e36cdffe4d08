"""Write a GPT as ONNX: a graph that runs anywhere, with W once in the file, streamed.

    write_onnx(model, Path("gpt2.onnx"), tokenizer=tokenizer)

    input_ids, position_ids (batch, sequence) int64; attention_mask (batch, past + sequence) int64,
    1 where there is a token; past_key_values.N.key and .value (batch, heads, past, D / heads)
      -> logits (batch, sequence, V), present.N.key and .value (batch, heads, past + sequence, ...)

as Hugging Face's optimum and transformers.js name them. All positions' logits are given, as the
convention is. Prompts of different lengths are padded with attention_mask 0; the logits of padding
mean nothing. The config lies in the file's metadata, so that it is read back as the same model.

onnxruntime packs the matrix that predicts into a copy of its own when it loads a file; where memory
counts more than the time of a step, set "session.disable_prepacking" to "1": then W is there once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from tiedgpt import __version__
from tiedgpt.core.model import GPT
from tiedgpt.errors import UserError
from tiedgpt.files import replacing, require_room
from tiedgpt.weights.checkpoint import shapes
from tiedgpt.weights.formats import onnx_message as onnx
from tiedgpt.weights.formats import protobuf_writer as proto
from tiedgpt.weights.formats.onnx_file import METADATA_KEY
from tiedgpt.weights.formats.protobuf_writer import Message
from tiedgpt.weights.huggingface import is_transposed
from tiedgpt.weights.plain_model import require_plain_head
from tiedgpt.weights.tensors import BLOCK_BYTES
from tiedgpt.weights.writers.onnx_graph import IR_VERSION, OPSET, gpt_graph

if TYPE_CHECKING:
    from tiedgpt.text import Tokenizer

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DATA_TYPES = {
    torch.float32: onnx.FLOAT32, torch.float16: onnx.FLOAT16, torch.bfloat16: onnx.BFLOAT16,
}  # fmt: skip
LARGEST_FILE = 1_900_000_000
"""Bytes of weights that a file holds itself: no reader takes a message of 2 GiB."""
ALIGNMENT = 4096
"""Of tensors in a file of their own, so that a runtime can map them."""

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


def write_onnx(
    model: GPT,
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: str | None = None,
    progress: Progress | None = None,
    largest_file: int = LARGEST_FILE,
) -> None:
    """Write `path`; a graph holds no tokenizer, and one that is given must only fit.

    `precision`: "fp32"; "fp16", computed in that too; "bf16", stored so and computed in fp32; None:
    the model's own. Weights of more than `largest_file` bytes go to `<name>_data` beside it.
    A head that is no plain matrix (V, D) is a `UserError`.
    """
    path = Path(path)
    parameters = _parameters(model)
    dtype = _dtype(model, precision)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of a file to write")
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}: "
            "they do not belong together"
        )
    data = {
        name: _Data(name, parameter, dtype, is_transposed(name))
        for name, parameter in parameters.items()
    }
    report = _Report(progress, sum(each.n_bytes for each in data.values()))
    require_room(path.parent, report.n_bytes + (ALIGNMENT + 256) * len(data))
    if report.n_bytes > largest_file:
        _write_two(model, path, data, dtype, report)
    else:
        held = {
            name: onnx.tensor(name, each.shape, DATA_TYPES[dtype], each)
            for name, each in data.items()
        }
        with replacing(path) as temporary, temporary.open("wb") as file:
            _write(file, _message(model, dtype, held), report)


def _write_two(
    model: GPT, path: Path, data: dict[str, _Data], dtype: torch.dtype, report: _Report
) -> None:
    """Write the tensors to a file of their own; it takes its place before the graph does."""
    beside = path.with_name(path.name + "_data")
    parts: Message = []
    held = {}
    end = 0
    for name, each in data.items():
        start = end + -end % ALIGNMENT
        held[name] = onnx.external_tensor(
            name, each.shape, DATA_TYPES[dtype],
            file=beside.name, start=start, n_bytes=each.n_bytes,
        )  # fmt: skip
        parts += [bytes(start - end), each]
        end = start + each.n_bytes
    with replacing(path) as graph, replacing(beside) as weights:
        with weights.open("wb") as file:
            _write(file, parts, report)
        with graph.open("wb") as file:
            _write(file, _message(model, dtype, held), report)


def _message(model: GPT, dtype: torch.dtype, tensors: dict[str, Message]) -> Message:
    """Return the whole file; `tensors` are the initializers."""
    initializers = [part for each in tensors.values() for part in proto.message(5, each)]
    return onnx.model(
        gpt_graph(model.config, DATA_TYPES[dtype], initializers),
        opset=OPSET, ir_version=IR_VERSION, version=__version__,
        metadata={METADATA_KEY: json.dumps(asdict(model.config))},
    )  # fmt: skip


def _parameters(model: GPT) -> dict[str, Tensor]:
    """Return the model's parameters, which must be a plain GPT's, all of them and no others."""
    config = model.config
    require_plain_head(model, "the graph")
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    expected = shapes(config)
    for name in [*expected, *parameters]:
        if name not in expected or name not in parameters:
            wrong = "is not a GPT's" if name in parameters else "is missing"
            raise UserError(f"this model cannot be written as ONNX: {name} {wrong}")
        if tuple(parameters[name].shape) != expected[name]:
            raise UserError(
                f"this model cannot be written as ONNX: {name} is "
                f"{tuple(parameters[name].shape)}, its config says {expected[name]}"
            )
        if parameters[name].is_meta:
            raise UserError(f"{name} has no data to write (it lies on the meta device)")
    return parameters


def _dtype(model: GPT, precision: str | None) -> torch.dtype:
    if precision is not None and precision not in DTYPES:
        raise UserError(f"precision={precision!r} is none of {', '.join(DTYPES)}")
    dtype = model.wte.weight.dtype if precision is None else DTYPES[precision]
    if dtype not in DATA_TYPES:
        raise UserError(f"a model in {dtype} is not written as ONNX: give a precision, say fp32")
    return dtype


@dataclass(frozen=True)
class _Data:
    """A parameter's bytes as they are written: of another type, or with its axes changed over."""

    name: str
    parameter: Tensor
    dtype: torch.dtype
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.parameter.shape)
        return shape[::-1] if self.transposed else shape

    @property
    def n_bytes(self) -> int:
        return self.parameter.numel() * self.dtype.itemsize

    def blocks(self) -> Iterator[memoryview]:
        tensor = self.parameter.detach()
        tensor = tensor.T if self.transposed else tensor
        step = max(1, BLOCK_BYTES * len(tensor) // self.n_bytes)
        for rows in tensor.split(step):
            block = rows.to("cpu", self.dtype)
            if self.dtype == torch.float16 and bool((block.isinf() & ~rows.cpu().isinf()).any()):
                raise UserError(
                    f"{self.name} has numbers beyond float16's 65,504: give another precision"
                )
            yield block.contiguous().flatten().view(torch.uint8).numpy().data


@dataclass
class _Report:
    """Tells how much of the weights is written."""

    progress: Progress | None
    n_bytes: int
    done: int = 0

    def add(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.progress is not None:
            self.progress(self.done, self.n_bytes)


def _write(file: BinaryIO, parts: Message, report: _Report) -> None:
    for part in parts:
        if isinstance(part, bytes):
            file.write(part)
            continue
        for block in part.blocks():
            file.write(block)
            report.add(len(block))
