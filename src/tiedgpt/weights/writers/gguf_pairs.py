"""Everything of a GGUF file that comes before its tensors' bytes.

Layout (ggml-org/ggml docs/gguf.md, version 3, little-endian): "GGUF", version, number of tensors,
number of pairs, the pairs, the tensors' infos, zeros up to a multiple of 32.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiedgpt.weights.formats.gguf_file import ARRAY, MAGIC, SCALARS, STRING

VERSION = 3
ALIGNMENT = 32
KINDS = {"u32": 4, "i32": 5, "f32": 6, "bool": 7}


@dataclass(frozen=True)
class Pair:
    """A value and GGUF's type of it, which llama.cpp checks: u32, i32, f32, bool or text."""

    kind: str
    value: Any
    """A list makes an array."""

    def encoded(self) -> bytes:
        """Return its bytes, its type first."""
        kind = STRING if self.kind == "text" else KINDS[self.kind]
        if not isinstance(self.value, list):
            return struct.pack("<I", kind) + self._items([self.value], kind)
        head = struct.pack("<IIQ", ARRAY, kind, len(self.value))
        return head + self._items(self.value, kind)

    @staticmethod
    def _items(values: list[Any], kind: int) -> bytes:
        if kind == STRING:
            return b"".join(text(value) for value in values)
        return struct.pack(f"<{len(values)}{SCALARS[kind]}", *values)


@dataclass(frozen=True)
class Info:
    """What the header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    n_bytes: int


def text(value: str) -> bytes:
    """Return a text with its length before it."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def padding(n_bytes: int) -> int:
    """Return how many zeros follow so many bytes."""
    return -n_bytes % ALIGNMENT


def header(pairs: Mapping[str, Pair], infos: Sequence[Info]) -> bytes:
    """Return all bytes up to the first tensor's; tensors follow in order, each padded."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(infos), len(pairs))]
    parts += [text(key) + pair.encoded() for key, pair in pairs.items()]
    offset = 0
    for info in infos:
        sizes = info.shape[::-1]
        parts.append(text(info.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", info.type_number, offset))
        offset += info.n_bytes + padding(info.n_bytes)
    whole = b"".join(parts)
    return whole + bytes(padding(len(whole)))
