"""Hostile and damaged files: our error, at once, and no memory taken on a header's word."""

import json
import struct

import pytest

from tiedgpt.errors import CorruptInputError
from tiedgpt.weights.containers import SafetensorsFile


def file_of(path, header, data: bytes = b"", length: int | None = None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ONE = json.dumps(entry([1], 0, 4)).encode()
HOSTILE = {
    "empty": (b"", b"", 0),
    "huge header": ({}, b"", 2**62),
    "header past the end": ({}, b"", 1000),
    "not json": (b"\x80{{{", b"", None),
    "a list": (b"[]", b"", None),
    "a hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12), None),
    "an overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8), None),
    "bytes left over": ({"a": entry([1], 0, 4)}, bytes(12), None),
    "cut off": ({"a": entry([100], 0, 400)}, bytes(12), None),
    "shape and size differ": ({"a": entry([3], 0, 4)}, bytes(4), None),
    "product overflows": ({"a": entry([2**40, 2**40], 0, 4)}, bytes(4), None),
    "negative": ({"a": entry([-1], 0, 4)}, bytes(4), None),
    "a bool for a size": ({"a": entry([True], 0, 4)}, bytes(4), None),
    "a float for a size": ({"a": entry([1.0], 0, 4)}, bytes(4), None),
    "unknown type": ({"a": entry([1], 0, 4, "F13")}, bytes(4), None),
    "no type": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4), None),
    "an entry that is text": ({"a": "x"}, b"", None),
    "metadata that is text": ({"__metadata__": "x"}, b"", None),
    "a name that is no text": (b'{"\\ud800": %b}' % ONE, bytes(4), None),
    "too many tensors": (b"[" * 40_000_000, b"", None),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name, tmp_path):
    header, data, length = HOSTILE[name]
    path = tmp_path / "x.safetensors"
    if name == "empty":
        path.write_bytes(b"")
    else:
        file_of(path, header, data, length)
    with pytest.raises(CorruptInputError, match=r"x\.safetensors"):
        SafetensorsFile.open(path)


def test_every_type_of_the_format_is_known(tmp_path):
    for dtype, size in {"C64": 8, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}.items():
        path = file_of(tmp_path / "a", {"a": entry([1], 0, size, dtype)}, bytes(size))
        assert SafetensorsFile.open(path).entries["a"].n_bytes == size
