"""GPT-1 as OpenAI released it: one long row of numbers, cut into .npy files wherever it was full.

    params_shapes.json          [[512, 768], [40478, 768], [1, 768, 2304], ...]
    params_0.npy ... _9.npy     the numbers of all tensors in that order, in pieces of equal length
    parameters_names.json       the tensors' names, which others added; the order is always the same

(openai/finetune-transformer-lm, `model/` and train.py.) Nothing is joined in memory: a tensor is
read from the files over which it lies. Of .npy (numpy.lib.format) the plain kind is read, a row of
floats; its header is matched, not evaluated, and no pickle is opened.
"""

from __future__ import annotations

import json
import math
import re
import struct
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json
from tiedgpt.weights.checkpoint import Checkpoint
from tiedgpt.weights.tensors import (
    BLOCK_BYTES,
    FLOATS,
    Native,
    Read,
    Storage,
    StoredTensor,
    plain_reader,
    printable,
)

SHAPES, NAMES, ENCODER = "params_shapes.json", "parameters_names.json", "encoder_bpe_40000.json"
HPARAMS = "hparams.json"
PIECE = re.compile(r"params_(0|[1-9]\d{0,3})\.npy")
MATRIX = "model/we"
"""Tokens, special tokens and positions in one matrix, as the running model has it."""
TOKENS, POSITIONS = "model/wte", "model/wpe"
"""What we call the two matrices that the release holds in place of that one; it has no names."""
BLOCK = tuple(
    f"{layer}/{parameter}"
    for layer, parameters in (
        ("attn/c_attn", "wb"), ("attn/c_proj", "wb"), ("ln_1", "gb"),
        ("mlp/c_fc", "wb"), ("mlp/c_proj", "wb"), ("ln_2", "gb"),
    )
    for parameter in parameters
)  # fmt: skip
"""A block's tensors in the order in which the model makes them."""
CLASSIFIER = ("model/clf/w", "model/clf/b")
MAGIC = b"\x93NUMPY"
HEADER = re.compile(
    rb"\{'descr': '([^']{1,20})', 'fortran_order': (?:True|False), 'shape': "
    rb"(?:\((\d{1,18})L?,\)|\([\dL, ]*\)), \} *\n?"
)
TYPES = {b"<f4": "float32", b"<f2": "float16", b"<f8": "float64"}
MAX_HEADER = 1 << 16
MAX_JSON = 1 << 20
MAX_TENSORS = 1 << 14


@dataclass(frozen=True)
class _Piece:
    """A file: what it holds, from which byte on, and how many numbers."""

    path: Path
    dtype: str
    start: int
    count: int


def open_npy_shards(directory: Path) -> Checkpoint:
    """Read the shapes and the headers of a release's directory.

    The checkpoint's config tells `encoder_size`, the number of tokens in the encoder beside, where
    one matrix holds tokens and positions, and what `hparams.json` says, where there is one.

    Raises `CorruptInputError` where something is damaged or missing, or where the numbers are not
    as many as the shapes need; `UserError` for what is not read here, such as pickled objects.
    """
    shapes = _shapes(directory / SHAPES)
    names = _names(directory, shapes)
    pieces = _pieces(directory)
    dtype = pieces[0].dtype
    width = FLOATS[dtype]
    starts = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    there = sum(piece.count for piece in pieces)
    if there != starts[-1]:
        at = next((name for name, end in zip(names, starts[1:], strict=True) if end > there), "")
        why = f"{printable(at)} is cut off" if at else "some of them belong to no tensor"
        raise CorruptInputError(
            f"{directory}: the shapes need {starts[-1]:,} numbers, the .npy files hold {there:,}: "
            f"{why}"
        )
    place = str(directory / "params_*.npy")
    read_flat = _flat_reader(pieces, width)
    tensors = {}
    for name, shape, (start, stop) in zip(names, shapes, pairwise(starts), strict=True):
        tensors[name] = StoredTensor(
            name, shape, dtype, (stop - start) * width, Storage(place, start * width, stop * width),
            _reader(read_flat, start, shape[-1], width),
        )  # fmt: skip
    config: dict[str, Any] = {}
    if MATRIX in tensors and (directory / ENCODER).is_file():
        config["encoder_size"] = len(read_json(directory / ENCODER))
    if (directory / HPARAMS).is_file():
        config["hparams"] = read_json(directory / HPARAMS)
    files = (directory / SHAPES, *(piece.path for piece in pieces))
    return Checkpoint(
        directory, "numpy", tensors, config, files=files,
        claim_source="an .npy file says nothing of a tie",
    )  # fmt: skip


def _json_list(path: Path) -> list[Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > MAX_JSON:
        raise CorruptInputError(f"{path} is larger than {MAX_JSON:,} bytes")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptInputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TENSORS:
        raise CorruptInputError(f"{path} holds no list of 1 to {MAX_TENSORS:,} things")
    return value


def _shapes(path: Path) -> list[tuple[int, ...]]:
    shapes = []
    for at, shape in enumerate(_json_list(path)):
        sound = isinstance(shape, list) and 1 <= len(shape) <= 8
        if not sound or not all(type(size) is int and 0 < size < 1 << 40 for size in shape):
            raise CorruptInputError(f"{path}: entry {at} is no shape: {str(shape)[:80]}")
        shapes.append(tuple(shape))
    return shapes


def _names(directory: Path, shapes: list[tuple[int, ...]]) -> list[str]:
    """Return a name for each shape: those of the file beside, or those of the release's order.

    The names are the running model's. It has one matrix where the release has two: the first name
    stands for both. Names may go on after the last shape, for a classifier that is not there.
    """
    two = len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][1]
    path = directory / NAMES
    if path.is_file():
        names = _json_list(path)
        if not all(isinstance(name, str) and 0 < len(name) <= 200 for name in names):
            raise CorruptInputError(f"{path} holds names that are no text")
        names = [name.removesuffix(":0") for name in names]
    else:
        n_layer, n_others = divmod(len(shapes) - 1 - two, len(BLOCK))
        if n_others not in (0, len(CLASSIFIER)):
            raise CorruptInputError(
                f"{directory / SHAPES}: {len(shapes)} tensors are not those of whole layers, "
                f"{len(BLOCK)} each: give the names in {NAMES}"
            )
        blocks = (f"model/h{layer}/{name}" for layer in range(n_layer) for name in BLOCK)
        names = [MATRIX, *blocks, *CLASSIFIER]
    if two and names[0] == MATRIX:
        names[:1] = [POSITIONS, TOKENS]
    if len(names) < len(shapes):
        raise CorruptInputError(f"{path} has {len(names)} names for {len(shapes)} tensors")
    names = names[: len(shapes)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CorruptInputError(f"{path} names {printable(twice)} twice")
    return names


def _pieces(directory: Path) -> list[_Piece]:
    """Return the pieces in order; none may be missing between two, and all are of one type."""
    there = {int(match[1]) for f in directory.iterdir() if (match := PIECE.fullmatch(f.name))}
    pieces: list[_Piece] = []
    for number in count():
        if number not in there:
            break
        pieces.append(_piece(beside(directory, f"params_{number}.npy")))
        if pieces[-1].dtype != pieces[0].dtype:
            raise CorruptInputError(
                f"{pieces[-1].path} holds {pieces[-1].dtype}, params_0.npy {pieces[0].dtype}"
            )
    if len(pieces) < max(len(there), 1):
        raise CorruptInputError(f"{directory} lacks params_{len(pieces)}.npy: put it there")
    return pieces


def _piece(path: Path) -> _Piece:
    """Read a header (numpy.lib.format) and hold it against the size of the file."""
    try:
        with path.open("rb") as file:
            head = file.read(MAX_HEADER)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    wide = head[6:8] == b"\2\0"
    start = 12 if wide else 10
    if not head.startswith(MAGIC) or len(head) < start or head[6:8] not in (b"\1\0", b"\2\0"):
        raise CorruptInputError(f"{path} is no .npy file of version 1 or 2, or is cut off")
    (length,) = struct.unpack_from("<I" if wide else "<H", head, 8)
    match = HEADER.fullmatch(head[start : start + length])
    if match is None or start + length > len(head):
        raise CorruptInputError(
            f"{path}: its header describes no row of numbers, or is damaged: "
            f"{printable(head[start : start + min(length, 100)].decode('latin-1')).strip()}"
        )
    if match[1].startswith(b"|O"):
        raise UserError(f"{path} holds Python objects (a pickle), which are never opened here")
    if match[1] not in TYPES:
        raise CorruptInputError(f"{path} holds {match[1].decode('latin-1')!r}, not floats")
    if match[2] is None:
        raise CorruptInputError(f"{path} holds an array that is not one long row")
    dtype, n_numbers, start = TYPES[match[1]], int(match[2]), start + length
    if start + n_numbers * FLOATS[dtype] != size:
        raise CorruptInputError(
            f"{path} is cut off or too long: {n_numbers:,} numbers of {dtype} from byte {start:,} "
            f"on are claimed, the file has {size:,} bytes"
        )
    return _Piece(path, dtype, start, n_numbers)


def _flat_reader(pieces: list[_Piece], width: int) -> Callable[[Native, int], None]:
    """Return a function that fills a row with the numbers from one on, over all pieces."""
    ends = list(accumulate(piece.count for piece in pieces))
    readers = [plain_reader(piece.path, piece.start, 1, width) for piece in pieces]
    most = BLOCK_BYTES // width

    def fill(row: Native, at: int) -> None:
        done = 0
        while done < len(row):
            piece = bisect_right(ends, at + done)
            first = at + done - (ends[piece] - pieces[piece].count)
            n_here = min(len(row) - done, ends[piece] - (at + done), most)
            row[done : done + n_here] = readers[piece](first, first + n_here, 0, 1)[:, 0]
            done += n_here

    return fill


def _reader(fill: Callable[[Native, int], None], start: int, columns: int, width: int) -> Read:
    """Return a reader of a matrix whose first number is number `start` of all."""
    step = max(1, BLOCK_BYTES // (columns * width))

    def rows(first: int, end: int) -> Native:
        block = np.empty((end - first, columns), f"<u{width}")
        fill(block.reshape(-1), start + first * columns)
        return block

    def read(first: int, end: int, left: int, right: int) -> Native:
        if (left, right) == (0, columns):
            return rows(first, end)
        block = np.empty((end - first, right - left), f"<u{width}")
        for at in range(first, end, step):
            stop = min(at + step, end)
            block[at - first : stop - first] = rows(at, stop)[:, left:right]
        return block

    return read


def open_npy_shapes(path: Path) -> Checkpoint:
    """Open the shards whose shapes `path` lists; see `open_npy_shards`."""
    return open_npy_shards(path.parent)
