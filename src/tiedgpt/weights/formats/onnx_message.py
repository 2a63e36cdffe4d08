"""The messages of an ONNX file as they are written (onnx/onnx.proto): nodes, tensors, a model."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from tiedgpt.weights.formats import protobuf_writer as proto
from tiedgpt.weights.formats.protobuf_writer import Message, Payload

FLOAT32, INT64, BOOL, FLOAT16, BFLOAT16 = 1, 7, 9, 10, 16
"""TensorProto.DataType."""
PACKING = {FLOAT32: "f", FLOAT16: "e", INT64: "q"}
"""How a value of it is packed, little-endian."""

Attribute = int | float | Sequence[int]
Size = int | str
"""Of an axis: a number, or the name of one that is known when the graph runs."""


def node(
    op: str, inputs: Iterable[str], outputs: Sequence[str], **attributes: Attribute
) -> Message:
    """A NodeProto that bears the name of its first output."""
    parts = [part for name in inputs for part in proto.text(1, name)]
    parts += [part for name in outputs for part in proto.text(2, name)]
    parts += proto.text(3, outputs[0]) + proto.text(4, op)
    for name, value in attributes.items():
        parts += proto.message(5, _attribute(name, value))
    return parts


def _attribute(name: str, value: Attribute) -> Message:
    parts = proto.text(1, name)
    if isinstance(value, float):
        return parts + proto.real(2, value) + proto.number(20, 1)
    if isinstance(value, int):
        return parts + proto.number(3, value) + proto.number(20, 2)
    return parts + [part for item in value for part in proto.number(8, item)] + proto.number(20, 7)


def constant(output: str, data_type: int, values: Sequence[float] | float) -> Message:
    """A NodeProto that yields a list of numbers, or one number without axes."""
    flat = list(values) if isinstance(values, Sequence) else [values]
    raw = struct.pack(f"<{len(flat)}{PACKING[data_type]}", *flat)
    shape = (len(flat),) if isinstance(values, Sequence) else ()
    tensor = _head(output, shape, data_type) + proto.message(9, [raw])
    value = proto.text(1, "value") + proto.message(5, tensor) + proto.number(20, 4)
    return node("Constant", (), (output,)) + proto.message(5, value)


def tensor(name: str, shape: Sequence[int], data_type: int, data: Payload) -> Message:
    """A TensorProto that holds its data."""
    return _head(name, shape, data_type) + proto.message(9, [data])


def external_tensor(
    name: str, shape: Sequence[int], data_type: int, *, file: str, start: int, n_bytes: int
) -> Message:
    """A TensorProto whose data lie in another file of the same directory, from byte `start` on."""
    place = {"location": file, "offset": str(start), "length": str(n_bytes)}
    return _head(name, shape, data_type) + _entries(13, place) + proto.number(14, 1)


def _head(name: str, shape: Sequence[int], data_type: int) -> Message:
    dims = [part for size in shape for part in proto.number(1, size)]
    return dims + proto.number(2, data_type) + proto.text(8, name)


def _entries(field: int, entries: Mapping[str, str]) -> Message:
    return [
        part
        for key, value in entries.items()
        for part in proto.message(field, proto.text(1, key) + proto.text(2, value))
    ]


def value_info(name: str, data_type: int, shape: Sequence[Size]) -> Message:
    """A ValueInfoProto: an input or an output."""
    axes: Message = []
    for size in shape:
        axis = proto.number(1, size) if isinstance(size, int) else proto.text(2, size)
        axes += proto.message(1, axis)
    kind = proto.number(1, data_type) + proto.message(2, axes)
    return proto.text(1, name) + proto.message(2, proto.message(1, kind))


def model(
    graph: Message, *, opset: int, ir_version: int, version: str, metadata: Mapping[str, str]
) -> Message:
    """A ModelProto of ours around a GraphProto."""
    maker = proto.text(2, "tiedgpt") + proto.text(3, version)
    operators = proto.message(8, proto.text(1, "") + proto.number(2, opset))
    head = proto.number(1, ir_version) + maker + operators
    return head + _entries(14, metadata) + proto.message(7, graph)
