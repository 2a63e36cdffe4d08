"""HDF5 as h5py writes it by default: where its datasets lie, read without the HDF5 library.

Layout (The HDF Group's "HDF5 File Format Specification", the structures of versions 1.0 to 1.6,
which every later version still writes unless asked for newer ones): a superblock at the start
points to the root group; a group is a B-tree of tables of symbols, whose names lie in a local heap;
an object header is a list of messages. Numbers are little-endian, addresses of 8 bytes.

    superblock -> object header -> symbol table message -> TREE -> SNOD -> object headers
                                                       `-> HEAP (names)

Read are contiguous and compact datasets. Compressed, chunked and virtual ones, data in other files
and links of every kind but the plain one are refused: no other file is ever opened from here.
Every object may be reached once, and no two datasets share a byte, so that a small file cannot
pretend to be large.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.weights.formats.hdf5_bytes import Hdf5Bytes
from tiedgpt.weights.tensors import printable

MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_DEPTH = 32
MAX_NAMES = 16 << 20
"""Bytes of names in a group, and of messages in an object's header."""
MAX_AXES = 8
UNDEFINED = (1 << 64) - 1
DATASPACE, DATATYPE, LINK_INFO, LINK, ELSEWHERE, LAYOUT = 0x01, 0x03, 0x02, 0x06, 0x07, 0x08
FILTERS, CONTINUED, SYMBOLS = 0x0B, 0x10, 0x11
USED = (DATASPACE, DATATYPE, LINK_INFO, LINK, ELSEWHERE, LAYOUT, FILTERS, CONTINUED, SYMBOLS)
FLOATS = {
    (2, 16, 10, 5, 0, 10, 15): "float16",
    (4, 32, 23, 8, 0, 23, 127): "float32",
    (8, 64, 52, 11, 0, 52, 1023): "float64",
    (2, 16, 7, 8, 0, 7, 127): "bfloat16",
}
"""Bytes, bits, place and bits of the exponent, of the mantissa, and bias -> name."""


@dataclass(frozen=True)
class Dataset:
    """An array in a file: where its bytes begin, counted from the start of the HDF5 file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    start: int

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.item_bytes


def read_datasets(path: Path, *, begin: int = 0, size: int | None = None) -> dict[str, Dataset]:
    """Return all datasets by their full names, `a/b/0`, of a file or of a range of one.

    Raises `CorruptInputError` where structures contradict themselves or the file's size,
    `UserError` for what is sound and not read here.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size - begin if size is None else size
            datasets = {d.name: d for d in _walk(Hdf5Bytes(file, str(path), begin, size))}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    _check_overlaps(path, datasets)
    return datasets


def _walk(hdf5: Hdf5Bytes) -> Iterator[Dataset]:
    """Yield the datasets of all groups, the root's first."""
    pending = [("", _root(hdf5), 0)]
    while pending:
        name, address, depth = pending.pop()
        hdf5.visit(address, f"the header of {printable(name)[:80] or 'the root'}")
        messages = _messages(hdf5, address)
        shown = printable(name)[:200]
        if LINK in messages or LINK_INFO in messages:
            raise hdf5.refused(f"the group {shown!r}, of HDF5's newer kind or with links in it,")
        if SYMBOLS in messages:
            if depth == MAX_DEPTH:
                raise hdf5.corrupt(f"its groups lie more than {MAX_DEPTH} deep")
            members = list(_members(hdf5, messages[SYMBOLS][1]))
            pending += [
                (f"{name}/{part}" if name else part, at, depth + 1)
                for part, at in reversed(members)
            ]
        elif DATASPACE in messages:
            yield _dataset(hdf5, name, messages)
        else:
            raise hdf5.corrupt(f"{shown!r} is neither a group nor a dataset")


def _root(hdf5: Hdf5Bytes) -> int:
    head = hdf5.at(0, 24, "the superblock")
    if not head.startswith(MAGIC):
        raise hdf5.corrupt("it does not begin as one")
    version = head[8]
    if version in (2, 3):
        raise hdf5.refused(f"an HDF5 file of the newer kind (superblock version {version})")
    if version > 1 or head[13:15] != b"\x08\x08":
        raise hdf5.corrupt(f"superblock version {version} with addresses of {head[13]} bytes")
    start = 24 if version == 0 else 28
    base, _, end, _, _, root = struct.unpack("<6Q", hdf5.at(start, 48, "the superblock"))
    if base != 0 or end > hdf5.size:
        raise hdf5.corrupt(f"it ends at byte {end:,} by its own account, and has {hdf5.size:,}")
    return int(root)


def _messages(hdf5: Hdf5Bytes, address: int) -> dict[int, tuple[int, bytes]]:
    """Return the messages of an object that matter: type -> (where it lies, its bytes)."""
    if hdf5.at(address, 4, "an object's header") == b"OHDR":
        raise hdf5.refused(f"the object at byte {address:,}, of HDF5's newer kind,")
    version, _, n_messages, _, size = struct.unpack(
        "<BBHII", hdf5.at(address, 12, "an object's header")
    )
    if version != 1:
        raise hdf5.corrupt(f"there is no object's header at byte {address:,}")
    found: dict[int, tuple[int, bytes]] = {}
    blocks = [(address + 16, size)]
    n_bytes = 0
    while blocks and n_messages:
        start, size = blocks.pop(0)
        n_bytes += size
        if n_bytes > MAX_NAMES:
            raise hdf5.corrupt(f"the header at byte {address:,} has more than {MAX_NAMES:,} bytes")
        block, at = hdf5.at(start, size, "an object's header"), 0
        while at + 8 <= size and n_messages:
            kind, length, flags = struct.unpack_from("<HHB", block, at)
            n_messages -= 1
            body = block[at + 8 : at + 8 + length]
            if len(body) < length:
                raise hdf5.corrupt(f"a message of the header at byte {address:,} is cut off")
            if kind == CONTINUED:
                where, more = hdf5.unpack("<QQ", body)
                hdf5.visit(where, "a header's next part")
                blocks.append((where, more))
            elif kind in USED:
                if flags & 2:
                    raise hdf5.refused(f"a shared message in the header at byte {address:,}")
                if kind in found:
                    raise hdf5.corrupt(f"the header at byte {address:,} says one thing twice")
                found[kind] = start + at + 8, body
            at += 8 + length
    return found


def _members(hdf5: Hdf5Bytes, symbols: bytes) -> Iterator[tuple[str, int]]:
    """Yield the names in a group, and the addresses of their headers."""
    tree, heap = hdf5.unpack("<QQ", symbols)
    hdf5.visit(heap, "a heap")
    magic, size, _, where = struct.unpack("<8s3Q", hdf5.at(heap, 32, "a heap"))
    if magic != b"HEAP\0\0\0\0" or size > MAX_NAMES:
        raise hdf5.corrupt(f"there is no heap of names at byte {heap:,}")
    names = hdf5.at(where, size, "names")
    seen: set[str] = set()
    for table in _tables(hdf5, tree):
        magic, n_symbols = struct.unpack("<6sH", hdf5.at(table, 8, "a table of symbols"))
        if magic != b"SNOD\1\0":
            raise hdf5.corrupt(f"there is no table of symbols at byte {table:,}")
        entries = hdf5.at(table + 8, 40 * n_symbols, "a table of symbols")
        for name_at, header, cache in struct.iter_unpack("<QQI20x", entries):
            end = names.find(b"\0", name_at) if name_at < size else -1
            try:
                name = names[name_at:end].decode("utf-8") if end >= 0 else ""
            except UnicodeDecodeError:
                name = ""
            if not name or "/" in name or name == "." or name in seen or end - name_at > 1024:
                raise hdf5.corrupt(f"a name in the table at byte {table:,} is none, or there twice")
            if cache == 2 or header == UNDEFINED:
                raise hdf5.refused(f"the link {printable(name)[:80]!r}")
            seen.add(name)
            yield name, header


def _tables(hdf5: Hdf5Bytes, tree: int) -> Iterator[int]:
    """Yield the addresses of a group's tables, in order; a child lies one level below."""
    pending: list[tuple[int, int | None]] = [(tree, None)]
    while pending:
        address, expected = pending.pop()
        hdf5.visit(address, "a part of a tree")
        if expected == -1:
            yield address
            continue
        magic, kind, level, n_children = struct.unpack(
            "<4sBBH", hdf5.at(address, 8, "a part of a tree")
        )
        if magic != b"TREE" or kind != 0 or level != (level if expected is None else expected):
            raise hdf5.corrupt(f"there is no tree of a group at byte {address:,}")
        pairs = hdf5.at(address + 24, 16 * n_children, "a part of a tree")
        children = [child for _, child in struct.iter_unpack("<QQ", pairs)]
        pending += [(child, level - 1) for child in reversed(children)]


def _dataset(hdf5: Hdf5Bytes, name: str, messages: dict[int, tuple[int, bytes]]) -> Dataset:
    shown = printable(name)[:200]
    if FILTERS in messages:
        raise hdf5.refused(f"{shown}, which is compressed,")
    if ELSEWHERE in messages:
        raise hdf5.refused(f"{shown}, whose numbers lie in another file,")
    if DATATYPE not in messages or LAYOUT not in messages:
        raise hdf5.corrupt(f"{shown} has no type or no place")
    shape = _shape(hdf5, shown, messages[DATASPACE][1])
    dtype, item_bytes = _type(hdf5, messages[DATATYPE][1])
    lies, body = messages[LAYOUT]
    version, kind = hdf5.unpack("<BB", body)
    if version not in (3, 4) or kind > 3:
        raise hdf5.corrupt(f"{shown} has a layout that is none")
    if kind > 1:
        raise hdf5.refused(f"{shown}, which is {('chunked', 'virtual')[kind - 2]},")
    if kind == 0:
        start, (n_bytes,) = lies + 4, hdf5.unpack("<H", body, 2)
        hdf5_end = lies + len(body)
    else:
        start, n_bytes = hdf5.unpack("<QQ", body, 2)
        hdf5_end = hdf5.size
    dataset = Dataset(name, shape, dtype, item_bytes, start)
    if dataset.n_bytes == 0:
        return Dataset(name, shape, dtype, item_bytes, 0)
    if start == UNDEFINED:
        raise hdf5.corrupt(f"the numbers of {shown} were never written")
    if n_bytes != dataset.n_bytes or start > hdf5_end - n_bytes:
        raise hdf5.corrupt(
            f"{shown} of shape {shape} takes {dataset.n_bytes:,} bytes; it has {n_bytes:,} from "
            f"byte {start:,} on, in a file of {hdf5.size:,}"
        )
    return dataset


def _shape(hdf5: Hdf5Bytes, name: str, space: bytes) -> tuple[int, ...]:
    version, rank, _, kind = hdf5.unpack("<4B", space)
    if version not in (1, 2) or rank > MAX_AXES or (version == 2 and kind > 1):
        raise hdf5.corrupt(f"{name} has no shape of up to {MAX_AXES} axes")
    return hdf5.unpack(f"<{rank}Q", space, 8 if version == 1 else 4)


def _type(hdf5: Hdf5Bytes, data: bytes) -> tuple[str, int]:
    """Return the name of a type and its bytes; Keras writes bfloat16 as two opaque bytes."""
    kind, bits, _, _, size = hdf5.unpack("<4BI", data)
    kind &= 15
    if size == 0:
        raise hdf5.corrupt("a type takes no bytes")
    if kind == 5 and size == 2:
        return "bfloat16", 2
    if kind == 0 and size in (1, 2, 4, 8):
        return f"{'int' if bits & 8 else 'uint'}{8 * size}", size
    if kind == 1 and not bits & 0x41:
        offset, *described = hdf5.unpack("<HH4BI", data, 8)
        key = (size, *described)
        if offset == 0 and key in FLOATS:
            return FLOATS[key], size
    return f"HDF5 type {kind}", size


def _check_overlaps(path: Path, datasets: dict[str, Dataset]) -> None:
    end, last = 0, ""
    for dataset in sorted(datasets.values(), key=lambda dataset: dataset.start):
        if dataset.n_bytes == 0:
            continue
        if dataset.start < end:
            raise CorruptInputError(
                f"{path}: {printable(dataset.name)} lies on the bytes of {printable(last)}"
            )
        end, last = dataset.start + dataset.n_bytes, dataset.name
