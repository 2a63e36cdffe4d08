"""Open ONNX graphs: their initializers as tensors, and the use of each matrix.

Anyone's graph can be opened, for `tie audit`. Only a graph that tiedgpt wrote is read as a GPT: its
initializers have our names, its metadata hold the config, and its own constants begin with
`constant.`.

The package onnx parses the file (twice its size in memory for a moment; no ONNX file exceeds
2 GiB). Data in other files next to it stay there until they are read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, reading
from tiedgpt.runtime import require_package
from tiedgpt.weights.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    Claim,
    Format,
    GPTCheckpoint,
    Program,
    Usage,
    Writer,
)
from tiedgpt.weights.file import OpenFile
from tiedgpt.weights.formats.transformers import CONV1D
from tiedgpt.weights.registry import defer
from tiedgpt.weights.tensors import FLOATS, Native, Storage, StoredTensor, printable, tensor_in_file

METADATA_KEY = "tiedgpt"
"""In the metadata of our own files: the GPTConfig as JSON."""
CONSTANT = "constant."
"""Prefix of the names of our graphs' constants, which are not parameters."""
LARGEST_FILE = 2**31 - 1
MAX_NAME, MAX_AXES = 64 << 10, 64
FIELDS_THAT_FOLLOW = b"\x12\x1a\x22\x28\x32\x3a\x42\x72"
"""Tags of a ModelProto's other fields; the field after ir_version is one of them."""
SAME_MATRIX = ("Transpose", "Identity", "Cast", "DequantizeLinear", "Reshape", "Unsqueeze")
PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "FusedMatMul", "MatMulNBits")
LOOKUPS = ("Gather", "GatherBlockQuantized")


def detect(file: OpenFile) -> bool:
    """Whether it begins with an ir_version and the tag of another field."""
    head = file.head
    begins = head[:1] == b"\x08" and head[1:2] < b" " and head[2:3] in FIELDS_THAT_FOLLOW
    return begins and len(head) > 2


def open_onnx(file: OpenFile) -> Checkpoint:
    """Read the graph of an ONNX file; `CorruptInputError` if it is damaged."""
    onnx, path = require_package("onnx", "reading ONNX files"), file.path
    with reading(path, "ONNX file"):
        if file.size > LARGEST_FILE:
            raise ValueError("those have less than 2 GiB")
        model = onnx.ModelProto.FromString(file.stream().read())
        if not model.HasField("graph"):
            raise ValueError("it holds no graph")
        graph = _Graph(onnx, path)
        graph.walk(model.graph, is_outermost=True)
        config = _our_config(model)
    claim = Claim(source="an ONNX graph does not say whether the head is tied")
    if isinstance(tied := config.get("tie_word_embeddings"), bool):
        claim = Claim(tied, f"its metadata say tie_word_embeddings: {str(tied).lower()}")
    usage = Usage(
        reads=tuple(dict.fromkeys(graph.reads)),
        predicts=tuple(graph.products[-1:]),
        products=tuple(
            n for n in dict.fromkeys(graph.products) if len(graph.tensors[n].shape) == 2
        ),
    )
    return Checkpoint(
        path,
        "ONNX",
        graph.tensors,
        config={**config, METADATA_KEY: config} if config else {},
        files=(path, *graph.other_files),
        claim=claim,
        usage=usage,
    )


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a file of ours; another's, or a later version's, is a `UserError`."""
    source, fields = checkpoint.source, checkpoint.config.get(METADATA_KEY)
    if not isinstance(fields, dict):
        raise UserError(
            f"{source} is ONNX that tiedgpt did not write: `tie` looks into it, and it is not "
            "loaded as a model",
            hint="load the checkpoint that it was exported from",
        )
    if unknown := sorted(fields.keys() - GPTConfig.__dataclass_fields__.keys()):
        raise UserError(
            f"{source} says {printable(unknown[0])[:80]}, which this version of tiedgpt does not "
            "know: it was written by a later one"
        )
    if not isinstance(tied := fields.get("tie_word_embeddings"), bool):
        raise CorruptInputError(f"{source} does not say whether its head is tied")
    head = EMBEDDING if tied else HEAD
    if EMBEDDING not in checkpoint.usage.reads or checkpoint.usage.predicts != (head,):
        predicts = ", ".join(printable(name) for name in checkpoint.usage.predicts) or "nothing"
        raise CorruptInputError(
            f"{source}: its metadata say that {EMBEDDING} reads and {head} predicts, its graph "
            f"predicts with {predicts[:200]}: it was changed after tiedgpt wrote it"
        )
    tensors = {
        name: tensor.transpose() if CONV1D.fullmatch(name) else tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(CONSTANT)
    }
    return GPTCheckpoint(layout="tiedgpt ONNX", fields=fields, tensors=tensors)


def _our_config(model: Any) -> dict[str, Any]:
    """Return the config in the metadata of our own files; {} of others."""
    configs = [
        json.loads(entry.value) for entry in model.metadata_props if entry.key == METADATA_KEY
    ]
    if len(configs) > 1 or not all(isinstance(config, dict) for config in configs):
        raise ValueError(f"its metadata under {METADATA_KEY!r} are no config")
    return configs[0] if configs else {}


class _Graph:
    """A walk over a graph: its tensors, and which of them its nodes look up and multiply."""

    def __init__(self, onnx: Any, path: Path) -> None:
        self.onnx, self.path = onnx, path
        self.tensors: dict[str, StoredTensor] = {}
        self.aliases: dict[str, str] = {}  # a node's output -> the tensor of which it is a copy
        self.other_files: dict[Path, OpenFile] = {}
        self.reads: list[str] = []
        self.products: list[str] = []  # of any shape

    def walk(self, graph: Any, *, is_outermost: bool = False) -> None:
        """Collect the initializers, then the nodes that use them, in the graph's order."""
        for tensor in graph.initializer:
            if is_outermost and tensor.name in self.tensors:
                raise ValueError(f"the initializer {tensor.name[:80]!r} occurs twice")
            self.add(tensor.name, tensor)
        for node in graph.node:
            for attribute in node.attribute:  # a Constant's tensor; the branches of an If
                if attribute.HasField("t") and node.output:
                    self.add(node.output[0], attribute.t)
                for inner in [attribute.g, *attribute.graphs]:
                    self.walk(inner)
            self.use(node)

    def use(self, node: Any) -> None:
        """Record the use of stored tensors in a node."""
        inputs = [self.aliases.get(name, name) for name in node.input]
        stored = [name for name in inputs if name in self.tensors]
        matrices = [name for name in stored if len(self.tensors[name].shape) == 2]
        if stored and node.op_type in SAME_MATRIX and node.output:
            self.aliases[node.output[0]] = stored[0]
        elif matrices and node.op_type in LOOKUPS and inputs[0] == matrices[0]:
            self.reads.append(matrices[0])
        elif stored and node.op_type in PRODUCTS:
            packed = node.op_type == "MatMulNBits" or not matrices
            self.products.append(stored[0] if packed else matrices[0])

    def add(self, name: str, tensor: Any) -> None:
        """List a tensor, unless there is one of its name."""
        if not isinstance(name, str) or len(name) > MAX_NAME or len(tensor.dims) > MAX_AXES:
            raise ValueError(f"{name[:80]!r} has a name or a shape that nobody writes")
        if name not in self.tensors:
            make = self.external if tensor.external_data else self.in_memory
            self.tensors[name] = make(name, tensor)

    def in_memory(self, name: str, tensor: Any) -> StoredTensor:
        """Return a tensor whose data were parsed with the graph."""
        array = self.onnx.numpy_helper.to_array(tensor)
        width, columns = array.dtype.itemsize, array.shape[-1] if array.shape else 1
        reader = None
        if not array.dtype.hasobject and width in (1, 2, 4, 8):  # not texts
            native = np.ascontiguousarray(array).view(f"<u{width}")
            native = native.reshape(math.prod(array.shape[:-1]), columns)

            def reader(first: int, end: int, low: int, high: int) -> Native:
                return native[first:end, low:high]

        storage = Storage((str(self.path), name), 0, array.nbytes)
        return StoredTensor(name, array.shape, str(array.dtype), array.nbytes, storage, reader)

    def external(self, name: str, tensor: Any) -> StoredTensor:
        """Return a tensor in a file beside the graph; the file must hold all of it."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = beside(self.path, entries.get("location", ""))
        opened = self.other_files.get(file) or OpenFile(file)
        self.other_files[file] = opened
        dtype = self.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        shape = tuple(tensor.dims)
        size = math.prod(shape) * dtype.itemsize
        start, length = int(entries.get("offset", 0)), int(entries.get("length", size))
        wrong = min((*shape, start, length)) < 0 or (str(dtype) in FLOATS and length != size)
        if wrong or start + length > opened.size:
            raise ValueError(
                f"{name[:80]!r} of shape {shape} in {dtype} cannot be {length:,} bytes from byte "
                f"{start:,} of {file.name}"
            )
        return tensor_in_file(opened, name, shape, str(dtype), start, length)


PROGRAM = Program("an ONNX graph", fields=(
    "n_inner", "activation_function", "norm", "layer_norm_epsilon", "bias", "attention_windows",
    "tie_word_embeddings",
))  # fmt: skip
WRITER = Writer(
    write=defer("onnx.writer", "write"),
    program=PROGRAM,
    suffix=".onnx",
    bundled="model.onnx",
)
FORMAT = Format(
    name="onnx",
    title="ONNX",
    about="any exporter's graphs, for `tie audit` and `tie show`; as models, those of tiedgpt",
    detect=detect,
    open=open_onnx,
    to_gpt=to_gpt,
    suffixes=(".onnx",),
    any_layout=True,
    file_names=("model.onnx", "onnx/model.onnx"),
    hub_patterns=(("*.onnx", "*.onnx_data", "*.onnx.data"),),
    writer=WRITER,
    packages=("onnx",),
)
