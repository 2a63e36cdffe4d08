"""ONNX: a graph's initializers as tensors, and which of them are looked up and which predict.

Anyone's graph can be opened, for `tie audit`. Only a graph that tiedgpt wrote is read as a GPT: its
initializers have our names, its metadata hold the config, and its own constants begin with
`constant.`.

The package onnx parses the file (twice its size in memory for a moment; no ONNX file exceeds
2 GiB). Data in other files beside it stay there until they are read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import CorruptInputError, TiedGPTError, UserError
from tiedgpt.files import leads_out
from tiedgpt.weights.checkpoint import EMBEDDING, HEAD, Checkpoint, GPTCheckpoint, LazyTensor
from tiedgpt.weights.huggingface import is_transposed
from tiedgpt.weights.packages import require_package
from tiedgpt.weights.tensors import Native, Storage, StoredTensor, plain_reader, printable

FORMAT = "ONNX"
METADATA_KEY = "tiedgpt"
"""In the metadata of our own files: the GPTConfig as JSON."""
CONSTANT = "constant."
"""Prefix of the names of our graphs' constants, which are no parameters."""
LARGEST_FILE = 2**31 - 1
MAX_NAME, MAX_AXES = 64 << 10, 64
FIELDS_THAT_FOLLOW = b"\x12\x1a\x22\x28\x32\x3a\x42\x72"
"""Tags of a ModelProto's other fields, one of which follows its ir_version."""
SAME_MATRIX = ("Transpose", "Identity", "Cast", "DequantizeLinear", "Reshape", "Unsqueeze")
PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "FusedMatMul", "MatMulNBits")
PACKED = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")
"""Types of less than a byte, which are listed and not read from other files."""
LOOKUPS = ("Gather", "GatherBlockQuantized")


def detect(path: Path, head: bytes) -> bool:
    """Whether it is named .onnx, or begins with an ir_version and the tag of another field."""
    begins = head[:1] == b"\x08" and head[1:2] < b" " and head[2:3] in FIELDS_THAT_FOLLOW
    return path.suffix == ".onnx" or (begins and len(head) > 2)


def read(path: Path) -> Checkpoint:
    """Read the graph of an ONNX file; `CorruptInputError` where it is damaged."""
    onnx = require_package("onnx", "reading ONNX files")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise CorruptInputError(f"{path} is no ONNX file: those have less than 2 GiB")
        model = onnx.ModelProto.FromString(path.read_bytes())
        if not model.HasField("graph"):
            raise CorruptInputError(f"{path} is no ONNX file: it holds no graph")
        graph = _Graph(onnx, path)
        graph.walk(model.graph, is_outermost=True)
        config = _our_config(path, model)
    except TiedGPTError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # protobuf's DecodeError; ValueError, KeyError, ... of numpy_helper
        why = printable(str(error))[:200]
        raise CorruptInputError(f"{path} is damaged or no ONNX file: {why}") from None
    claim = config.get("tie_word_embeddings")
    source = "an ONNX graph does not say whether the head is tied"
    if isinstance(claim, bool):
        source = f"its metadata say tie_word_embeddings: {str(claim).lower()}"
    return Checkpoint(
        path, FORMAT, graph.tensors,
        config={**config, METADATA_KEY: config} if config else {},
        files=(path, *graph.other_files),
        claim=claim if isinstance(claim, bool) else None, claim_source=source,
        reads=tuple(dict.fromkeys(graph.reads)),
        predicts=() if graph.last is None else (graph.last,),
        products=tuple(dict.fromkeys(graph.products)),
    )  # fmt: skip


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT in a file of ours; another's, or a later version's, is a `UserError`."""
    source, fields = checkpoint.source, checkpoint.config.get(METADATA_KEY)
    if not isinstance(fields, dict):
        raise UserError(
            f"{source} is ONNX that tiedgpt did not write: `tie` looks into it, and it "
            "is not loaded as a model; load the checkpoint that it was exported from"
        )
    known = GPTConfig.__dataclass_fields__
    if unknown := sorted(printable(name) for name in fields.keys() - known.keys()):
        raise UserError(
            f"{source} says {unknown[0][:80]}, which this version of tiedgpt does not "
            "know: it was written by a later one"
        )
    if not isinstance(tied := fields.get("tie_word_embeddings"), bool):
        raise CorruptInputError(f"{source} does not say whether its head is tied")
    head = EMBEDDING if tied else HEAD
    if EMBEDDING not in checkpoint.reads or checkpoint.predicts != (head,):
        predicts = ", ".join(printable(name) for name in checkpoint.predicts) or "nothing"
        raise CorruptInputError(
            f"{source}: its metadata say that {EMBEDDING} reads and {head} predicts, its graph "
            f"predicts with {predicts[:200]}: it was changed after tiedgpt wrote it"
        )
    tensors = {
        name: LazyTensor(tensor, transposed=is_transposed(name))
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(CONSTANT)
    }
    return GPTCheckpoint(layout="tiedgpt ONNX", fields=fields, tensors=tensors)


def _our_config(path: Path, model: Any) -> dict[str, Any]:
    """Return the config in the metadata of our own files; {} of others."""
    values = [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]
    if not values:
        return {}
    try:
        config = json.loads(values[0])
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or len(values) > 1:
        raise CorruptInputError(f"{path}: its metadata under {METADATA_KEY!r} are no config")
    return config


@dataclass
class _Graph:
    """What a walk over a graph collects."""

    onnx: Any
    path: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    other_files: dict[Path, None] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """A node's output -> the initializer that it is a transposed, cast or plain copy of."""
    reads: list[str] = field(default_factory=list)
    products: list[str] = field(default_factory=list)
    last: str | None = None
    """The initializer in the last product, whatever its shape."""

    def walk(self, graph: Any, *, is_outermost: bool = False) -> None:
        """Collect the initializers, then the nodes that use them, in the graph's order."""
        for tensor in graph.initializer:
            if tensor.name in self.tensors and is_outermost:
                raise CorruptInputError(
                    f"{self.path}: the initializer {tensor.name[:80]!r} occurs twice"
                )
            self.add(tensor.name, tensor)
        for node in graph.node:
            for attribute in node.attribute:  # a Constant's tensor; the branches of an If
                if attribute.HasField("t") and node.output:
                    self.add(node.output[0], attribute.t)
                inner = [attribute.g] if attribute.HasField("g") else []
                for each in [*inner, *attribute.graphs]:
                    self.walk(each)
            self.use(node)

    def use(self, node: Any) -> None:
        """Note what a node does with an initializer."""
        inputs = [self.aliases.get(name, name) for name in node.input]
        stored = [name for name in inputs if name in self.tensors]
        matrices = [name for name in stored if len(self.tensors[name].shape) == 2]
        if not stored:
            return
        if node.op_type in SAME_MATRIX and node.output:
            self.aliases[node.output[0]] = stored[0]
        elif node.op_type in LOOKUPS and matrices and inputs[0] == matrices[0]:
            self.reads.append(matrices[0])
        elif node.op_type in PRODUCTS:
            self.last = matrices[0] if matrices and node.op_type != "MatMulNBits" else stored[0]
            if len(self.tensors[self.last].shape) == 2:
                self.products.append(self.last)

    def add(self, name: str, tensor: Any) -> None:
        """List a tensor, unless there is one of its name."""
        if len(name.encode()) > MAX_NAME:
            raise CorruptInputError(f"{self.path}: a name of {len(name):,} characters is too long")
        if len(tensor.dims) > MAX_AXES:
            raise CorruptInputError(f"{self.path}: {name[:80]!r} has {len(tensor.dims):,} axes")
        if name in self.tensors:
            return
        if tensor.external_data:
            self.tensors[name] = self.external(name, tensor)
        else:
            array = self.onnx.numpy_helper.to_array(tensor)
            self.tensors[name] = _in_memory(name, str(self.path), array)

    def external(self, name: str, tensor: Any) -> StoredTensor:
        """Return a tensor in a file beside the graph; the file must hold all of it."""
        dtype = self.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        shape, columns = tuple(tensor.dims), tensor.dims[-1] if tensor.dims else 1
        size = math.prod(shape) * dtype.itemsize
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = _beside(self.path, name, entries.get("location", ""))
        try:
            start, length = int(entries.get("offset", 0)), int(entries.get("length", size))
        except ValueError:
            raise CorruptInputError(
                f"{self.path}: {name[:80]!r} has an offset or length that is no number"
            ) from None
        packed = str(dtype) in PACKED
        if min(shape, default=0) < 0 or start < 0 or (length != size and not packed):
            raise CorruptInputError(
                f"{self.path}: {name[:80]!r} of shape {shape} in {dtype} cannot be {length:,} "
                f"bytes from byte {start:,}"
            )
        if start + length > file.stat().st_size:
            raise CorruptInputError(
                f"{self.path}: {name[:80]!r} ends at byte {start + length:,}, after the end of "
                f"{file.name}"
            )
        self.other_files[file] = None
        storage = Storage(str(file), start, start + length)
        reader = None if packed else plain_reader(file, start, columns, dtype.itemsize)
        return StoredTensor(name, shape, str(dtype), length, storage, reader)


def _in_memory(name: str, place: str, array: NDArray[Any]) -> StoredTensor:
    """Return a tensor whose data were parsed with the graph."""
    storage = Storage((place, name), 0, array.nbytes)
    width = array.dtype.itemsize
    if array.dtype.hasobject or width not in (1, 2, 4, 8):  # strings
        return StoredTensor(name, array.shape, str(array.dtype), array.nbytes, storage, None)
    columns = array.shape[-1] if array.shape else 1
    rows = math.prod(array.shape[:-1])
    native = np.ascontiguousarray(array).view(f"<u{width}").reshape(rows, columns)

    def read(first: int, end: int, left: int, right: int) -> Native:
        return native[first:end, left:right]

    return StoredTensor(name, array.shape, str(array.dtype), array.nbytes, storage, read)


def _beside(path: Path, name: str, location: str) -> Path:
    """Return the file in the graph's directory that a tensor names; no other may be read."""
    parts, shown = PurePosixPath(location), printable(location[:80])
    if not parts.parts or parts.is_absolute() or ".." in parts.parts or "\0" in location:
        raise CorruptInputError(
            f"{path}: {name[:80]!r} points to {shown!r}, which leads out of the directory"
        )
    file = path.parent / parts
    if not file.is_file():
        raise CorruptInputError(f"{path}: {name[:80]!r} is in {shown}, which is not beside it")
    if leads_out(path.parent, file):
        raise CorruptInputError(f"{path}: {name[:80]!r} is in {shown}, a link out of the directory")
    return file
