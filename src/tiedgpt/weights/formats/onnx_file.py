"""The ONNX format: a graph's initializers where they lie, and which of them read and predict.

Only the fields needed are walked (onnx/onnx.proto); the tensors' bytes, in the file or in external
files beside it, are stepped over and read on request. No torch, no onnx, no protobuf.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import leads_out
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.formats.protobuf import Span
from tiedgpt.weights.tensors import Storage, StoredTensor, plain_reader, printable

TYPES = {
    1: ("float32", 4), 2: ("uint8", 1), 3: ("int8", 1), 4: ("uint16", 2), 5: ("int16", 2),
    6: ("int32", 4), 7: ("int64", 8), 9: ("bool", 1), 10: ("float16", 2), 11: ("float64", 8),
    12: ("uint32", 4), 13: ("uint64", 8), 16: ("bfloat16", 2),
}  # fmt: skip
"""TensorProto.DataType -> name, bytes an element."""
MODEL_GRAPH, MODEL_METADATA = 7, 14
METADATA_KEY = "tiedgpt"
"""Under which our own files say, in JSON, what GPT they hold."""
CONSTANT = "constant."
"""What the names of their graphs' own numbers begin with: they are no parameters."""
GRAPH_NODE, GRAPH_INITIALIZER = 1, 5
NODE_INPUT, NODE_OUTPUT, NODE_OP, NODE_ATTRIBUTE = 1, 2, 4, 5
ATTRIBUTE_TENSOR, ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 5, 6, 11
TENSOR_DIMS, TENSOR_TYPE, TENSOR_FLOATS, TENSOR_NAME, TENSOR_RAW, TENSOR_DOUBLES = 1, 2, 4, 8, 9, 10
TENSOR_EXTERNAL = 13
SAME_MATRIX = ("Transpose", "Identity", "Cast", "DequantizeLinear", "Reshape", "Unsqueeze")
PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "FusedMatMul", "MatMulNBits")
LOOKUPS = ("Gather", "GatherBlockQuantized")
MAX_DEPTH = 16


@dataclass
class _Graph:
    """What a walk over the graph collects."""

    path: Path
    file_size: int
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    is_graph: bool = False
    others: dict[Path, None] = field(default_factory=dict)
    """The files beside it in which tensors lie."""
    said: dict[str, Any] = field(default_factory=dict)
    """The config of a file of ours."""
    aliases: dict[str, str] = field(default_factory=dict)
    """A node's output -> the initializer that it is a transposed, cast or plain copy of."""
    reads: list[str] = field(default_factory=list)
    products: list[str] = field(default_factory=list)
    last: str | None = None
    """What the last product multiplies with, whatever its shape."""


def open_onnx(path: Path) -> Checkpoint:
    """Read the graph of an ONNX file; `CorruptInputError` where it is damaged."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            graph = _Graph(path, len(data))
            for number, value in Span(data, 0, len(data)).fields():
                if number == MODEL_GRAPH and isinstance(value, Span):
                    graph.is_graph = True
                    _walk(graph, value, 0)
                elif number == MODEL_METADATA and isinstance(value, Span):
                    _metadata(graph, value)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        text = str(error)
        where = text if text.startswith(str(path)) else f"{path} is no sound ONNX file: {text}"
        raise CorruptInputError(where) from None
    if not graph.is_graph:
        raise CorruptInputError(f"{path} is no ONNX file: it holds no graph")
    claim = graph.said.get("tie_word_embeddings")
    source = "an ONNX graph says nothing of a tie"
    if isinstance(claim, bool):
        source = f"its metadata say tie_word_embeddings: {str(claim).lower()}"
    return Checkpoint(
        path, "ONNX", graph.tensors,
        config={**graph.said, METADATA_KEY: graph.said} if graph.said else {},
        files=(path, *graph.others),
        claim=claim if isinstance(claim, bool) else None, claim_source=source,
        reads=tuple(dict.fromkeys(graph.reads)),
        predicts=() if graph.last is None else (graph.last,),
        products=tuple(dict.fromkeys(graph.products)),
    )  # fmt: skip


def _metadata(graph: _Graph, span: Span) -> None:
    """Take the entry of our own files; what others say may be of any kind and size."""
    both = {number: value for number, value in span.fields() if isinstance(value, Span)}
    if not {1, 2} <= both.keys() or len(both[1]) > 64 or both[1].text() != METADATA_KEY:
        return
    try:
        said = json.loads(both[2].text())
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or graph.said:
        raise CorruptInputError(f"its metadata under {METADATA_KEY!r} are no config")
    graph.said = said


def _walk(graph: _Graph, span: Span, depth: int) -> None:
    """Collect initializers first, then the nodes that use them, in the graph's order."""
    if depth > MAX_DEPTH:
        raise CorruptInputError("graphs lie within graphs more than 16 deep")
    nodes = []
    for number, value in span.fields():
        if isinstance(value, Span) and number == GRAPH_INITIALIZER:
            tensor = _tensor(graph, value)
            if tensor is not None:
                if tensor.name in graph.tensors and depth == 0:
                    raise CorruptInputError(f"the initializer {tensor.name[:80]!r} stands twice")
                graph.tensors.setdefault(tensor.name, tensor)
        elif isinstance(value, Span) and number == GRAPH_NODE:
            nodes.append(value)
    for node in nodes:
        _node(graph, node, depth)


def _node(graph: _Graph, span: Span, depth: int) -> None:
    inputs: list[str] = []
    outputs: list[str] = []
    op = ""
    for number, value in span.fields():
        if not isinstance(value, Span):
            continue
        if number == NODE_INPUT:
            inputs.append(value.text())
        elif number == NODE_OUTPUT:
            outputs.append(value.text())
        elif number == NODE_OP:
            op = value.text()
        elif number == NODE_ATTRIBUTE:
            _attribute(graph, value, outputs, depth)
    matrices = [graph.aliases.get(name, name) for name in inputs]
    matrices = [name for name in matrices if name in graph.tensors]
    known = [name for name in matrices if len(graph.tensors[name].shape) == 2]
    if not matrices:
        return
    if op in SAME_MATRIX and outputs:
        graph.aliases[outputs[0]] = matrices[0]
    elif op in LOOKUPS and known and graph.aliases.get(inputs[0], inputs[0]) == known[0]:
        graph.reads.append(known[0])
    elif op in PRODUCTS:
        graph.last = known[0] if known and op != "MatMulNBits" else matrices[0]
        if len(graph.tensors[graph.last].shape) == 2:
            graph.products.append(graph.last)


def _attribute(graph: _Graph, span: Span, outputs: list[str], depth: int) -> None:
    """Take a Constant's tensor for an initializer, and walk into the branches of an If."""
    for number, value in span.fields():
        if not isinstance(value, Span):
            continue
        if number == ATTRIBUTE_TENSOR and outputs:
            tensor = _tensor(graph, value, name=outputs[0])
            if tensor is not None:
                graph.tensors.setdefault(tensor.name, tensor)
        elif number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
            _walk(graph, value, depth + 1)


def _tensor(graph: _Graph, span: Span, name: str = "") -> StoredTensor | None:
    shape: list[int] = []
    type_number = 0
    data: Span | None = None
    pieces = 0
    external: dict[str, str] = {}
    for number, value in span.fields():
        if number == TENSOR_DIMS:
            shape += [value] if isinstance(value, int) else _sizes(value)
        elif number == TENSOR_TYPE and isinstance(value, int):
            type_number = value
        elif number == TENSOR_NAME and isinstance(value, Span):
            name = name or value.text()
        elif number in (TENSOR_RAW, TENSOR_FLOATS, TENSOR_DOUBLES) and isinstance(value, Span):
            data = value
            pieces += 1
        elif number == TENSOR_EXTERNAL and isinstance(value, Span):
            external |= _entry(value)
    if len(shape) > 64 or any(size >= 1 << 63 for size in shape):
        raise CorruptInputError(f"{name[:80]!r} has an impossible shape")
    dtype, width = TYPES.get(type_number, (f"ONNX type {type_number}", 0))
    size = math.prod(shape) * width
    columns = shape[-1] if shape else 1
    if external:
        place, start = _external(graph.path, name, external, size if width else None)
        graph.others[place] = None
    elif data is not None and width and pieces == 1 and len(data) == size:
        place, start = graph.path, data.start
    elif data is not None and width and (pieces == 1 or len(data) > size):
        raise CorruptInputError(
            f"{name[:80]!r} of shape {tuple(shape)} in {dtype} cannot fill {len(data):,} bytes"
        )
    else:  # values spread over int32_data, strings, sub-byte types: listed, not read
        storage = Storage(str(graph.path), span.start, span.start + min(size, len(span)))
        return StoredTensor(name, tuple(shape), dtype, min(size, len(span)), storage, None)
    read = plain_reader(place, start, columns, width) if width else None
    return StoredTensor(
        name, tuple(shape), dtype, size, Storage(str(place), start, start + size), read
    )


def _sizes(span: Span) -> list[int]:
    if len(span) > 64 * 10:
        raise CorruptInputError(f"a shape of {len(span):,} bytes at byte {span.start:,} is none")
    return span.varints()


def _entry(span: Span) -> dict[str, str]:
    both = {number: value.text() for number, value in span.fields() if isinstance(value, Span)}
    return {both.get(1, ""): both.get(2, "")}


def _external(path: Path, name: str, entries: dict[str, str], size: int | None) -> tuple[Path, int]:
    """Return the file beside the graph, and the byte in it, where a tensor's data lie."""
    location = PurePosixPath(entries.get("location", ""))
    shown = printable(str(location)[:80])
    if (
        not location.parts
        or location.is_absolute()
        or ".." in location.parts
        or "\0" in str(location)
    ):
        raise CorruptInputError(
            f"{name[:80]!r} points to {shown!r}, which leads out of the directory"
        )
    file = path.parent / location
    try:
        start, length = int(entries.get("offset", 0)), int(entries.get("length", size or 0))
    except ValueError:
        raise CorruptInputError(f"{name[:80]!r}: its external offset is no number") from None
    if not file.is_file():
        raise CorruptInputError(f"{name[:80]!r} lies in {shown}, which is not beside {path}")
    if leads_out(path.parent, file):
        raise CorruptInputError(f"{name[:80]!r} lies in {shown}, a link out of the directory")
    if (
        start < 0
        or length < 0
        or start + length > file.stat().st_size
        or (size is not None and length != size)
    ):
        raise CorruptInputError(
            f"{name[:80]!r}: {length:,} bytes from byte {start:,} of {shown} are not its data"
        )
    return file, start
