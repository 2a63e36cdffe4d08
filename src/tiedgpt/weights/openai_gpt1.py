"""OpenAI's GPT-1 release: all numbers in one row, cut into .npy files of equal length.

    params_shapes.json          [[512, 768], [40478, 768], [1, 768, 2304], ...]
    params_0.npy ... _9.npy     the numbers of all tensors in that order
    parameters_names.json       the tensors' names (added by others; the order never differs)

(openai/finetune-transformer-lm, `model/` and train.py.) A tensor is read from the files over which
it lies; pickles are never opened.

The program runs with tokens, special tokens and positions in one matrix, `model/we`. The release
stores positions and tokens apart; fine-tuned models store them together. OpenAI's training predicts
every row of that matrix, positions too; here, and in transformers, only tokens are predicted.
"""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json
from tiedgpt.weights.checkpoint import EMBEDDING, Checkpoint, GPTCheckpoint
from tiedgpt.weights.openai_gpt2 import (
    CLASSIFIER,
    FUNCTIONS,
    ONE_MATRIX,
    POSITIONS,
    TOKENS,
    by_our_names,
    config_of,
    hparams_in,
    without_training,
)
from tiedgpt.weights.tensors import FLOATS, Native, Read, Storage, StoredTensor, plain_reader

SHAPES, NAMES, ENCODER = "params_shapes.json", "parameters_names.json", "encoder_bpe_40000.json"
PIECE = re.compile(r"params_(0|[1-9]\d{0,3})\.npy")
BLOCK = (
    "attn/c_attn/w", "attn/c_attn/b", "attn/c_proj/w", "attn/c_proj/b", "ln_1/g", "ln_1/b",
    "mlp/c_fc/w", "mlp/c_fc/b", "mlp/c_proj/w", "mlp/c_proj/b", "ln_2/g", "ln_2/b",
)  # fmt: skip
"""A block's tensors in the order in which the program creates them."""
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
MAX_HEADER = 1000
"""Bytes; numpy writes 128. Parsing much longer ones could exhaust the interpreter's stack."""
MAX_JSON = 1 << 20
MAX_TENSORS = 1 << 14
RELEASED_WIDTH, RELEASED_LAYERS, RELEASED_HEADS, RELEASED_POSITIONS = 768, 12, 12, 512
RELEASED_SPECIALS = (0, 3)
"""Special tokens of the release, and of a fine-tuned model: start, delimiter, classify."""


@dataclass(frozen=True)
class _Piece:
    """A .npy file with `count` numbers, which it reads as one row."""

    path: Path
    dtype: str
    count: int
    read: Read


def detect(path: Path, head: bytes) -> bool:
    """Whether a file is the list of shapes of a release."""
    return path.name == SHAPES


def read(path: Path) -> Checkpoint:
    """Read the shapes at `path` and the headers of the .npy files beside it.

    The checkpoint's config has hparams.json, if there is one, and `encoder_size`, the number of
    tokens in the encoder beside, if one matrix holds tokens and positions.

    Raises `CorruptInputError` for damaged or missing files, or where the shapes need another number
    of numbers; `UserError` for pickled objects.
    """
    directory = path.parent
    shapes = _shapes(path)
    names = _names(directory, shapes)
    pieces = _pieces(directory)
    dtype, width = pieces[0].dtype, FLOATS[pieces[0].dtype]
    bounds = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    n_stored = sum(piece.count for piece in pieces)
    if n_stored != bounds[-1]:
        cut = [name for name, end in zip(names, bounds[1:], strict=True) if end > n_stored]
        why = f"{cut[0]!r} is cut off" if cut else "some of them belong to no tensor"
        raise CorruptInputError(
            f"{directory}: the shapes need {bounds[-1]:,} numbers, the .npy files have "
            f"{n_stored:,}: {why}"
        )
    place = str(directory / "params_*.npy")
    tensors = {}
    for name, shape, (start, stop) in zip(names, shapes, pairwise(bounds), strict=True):
        storage = Storage(place, start * width, stop * width)
        reader = _reader(pieces, start, shape[-1])
        tensors[name] = StoredTensor(name, shape, dtype, (stop - start) * width, storage, reader)
    config = hparams_in(directory)
    if ONE_MATRIX in tensors and (directory / ENCODER).is_file():
        config["encoder_size"] = len(read_json(directory / ENCODER))
    return Checkpoint(
        directory, "numpy", tensors, config, files=(path, *(piece.path for piece in pieces)),
        claim_source="a .npy file does not say whether the head is tied",
    )  # fmt: skip


def as_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; the classifier is left out, and a note says so.

    Raises `UserError` where one matrix holds tokens and positions and nothing says how many.
    """
    variables, notes = without_training(checkpoint.tensors)
    fields, foreign, more = config_of(checkpoint)
    notes += more
    if ONE_MATRIX in variables:
        matrix = variables.pop(ONE_MATRIX)
        if TOKENS in variables or POSITIONS in variables or len(matrix.shape) != 2:
            raise CorruptInputError(
                f"{checkpoint.source}: {ONE_MATRIX} of shape {matrix.shape} is not one matrix of "
                "tokens and positions"
            )
        n_tokens, note = _n_tokens(checkpoint, matrix.shape[0], fields.get("n_positions"))
        variables[TOKENS] = matrix.row_range(0, n_tokens)
        variables[POSITIONS] = matrix.row_range(n_tokens, matrix.shape[0])
        notes.append(note)
    tensors = by_our_names(checkpoint, variables)
    assumed: dict[str, Any] = dict(FUNCTIONS)
    n_layer = sum(name.endswith(".ln_2.weight") for name in tensors)
    width = tensors[EMBEDDING].shape[1:] if EMBEDDING in tensors else ()
    if (n_layer, width) == (RELEASED_LAYERS, (RELEASED_WIDTH,)):
        assumed["n_head"] = RELEASED_HEADS
    return GPTCheckpoint(
        "OpenAI GPT-1", {**fields, "norm": "post"}, tensors, assumed, foreign, tuple(notes)
    )


def _n_tokens(checkpoint: Checkpoint, n_rows: int, n_positions: Any) -> tuple[int, str]:
    """Return how many rows of the one matrix are tokens, special tokens included, and a note.

    The positions are the last rows. Their number is `n_positions` if a file says it, else the
    release's 512 if they and the encoder's tokens leave as many special tokens as the program adds.
    """
    encoder = checkpoint.config.get("encoder_size")
    encoder = encoder if type(encoder) is int else None
    why = "as the files say"
    if n_positions is None and encoder is not None:
        if n_rows - RELEASED_POSITIONS - encoder in RELEASED_SPECIALS:
            n_positions, why = RELEASED_POSITIONS, "as in the release"
    if n_positions is None:
        raise UserError(
            f"{checkpoint.source}: the {n_rows:,} rows of {ONE_MATRIX} are tokens, special tokens "
            'and positions, and nothing says how many: write {"n_ctx": ...} into '
            "hparams.json beside it"
        )
    if type(n_positions) is not int or not 0 < n_positions <= n_rows - (encoder or 1):
        raise CorruptInputError(
            f"{checkpoint.source}: {n_positions!r} positions do not fit into the {n_rows:,} rows "
            f"of {ONE_MATRIX}" + (f" beside the encoder's {encoder:,} tokens" if encoder else "")
        )
    n_tokens = n_rows - n_positions
    special = f"{n_tokens - encoder:,} of them special, " if encoder else ""
    return n_tokens, (
        f"{ONE_MATRIX} is one matrix: {n_tokens:,} tokens, {special}then {n_positions:,} "
        f"positions, {why}"
    )


def _json_list(path: Path) -> list[Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptInputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TENSORS:
        raise CorruptInputError(f"{path} must be a list of 1 to {MAX_TENSORS:,} entries")
    return value


def _shapes(path: Path) -> list[tuple[int, ...]]:
    shapes = []
    for at, shape in enumerate(_json_list(path)):
        is_shape = isinstance(shape, list) and 1 <= len(shape) <= 8
        if not is_shape or not all(type(size) is int and 0 < size < 1 << 40 for size in shape):
            raise CorruptInputError(f"{path}: entry {at} is not a shape: {str(shape)[:80]}")
        shapes.append(tuple(shape))
    return shapes


def _names(directory: Path, shapes: list[tuple[int, ...]]) -> list[str]:
    """Return a name for each shape: those of the file beside, or those in the program's order.

    The program has one matrix where the release has positions and tokens: its first name stands
    for both. A list of names may go on with a classifier that is not there.
    """
    two = len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][1]
    path = directory / NAMES
    if path.is_file():
        names = _json_list(path)
        if not all(isinstance(name, str) and 0 < len(name) <= 200 for name in names):
            raise CorruptInputError(f"{path} has a name that is not a short text")
        names = [name.removesuffix(":0") for name in names]
    else:
        n_layer, n_others = divmod(len(shapes) - 1 - two, len(BLOCK))
        if n_others not in (0, len(CLASSIFIER)):
            raise CorruptInputError(
                f"{directory / SHAPES}: {len(shapes)} tensors are not those of whole layers, "
                f"{len(BLOCK)} each: give the names in {NAMES}"
            )
        blocks = (f"model/h{layer}/{name}" for layer in range(n_layer) for name in BLOCK)
        names = [ONE_MATRIX, *blocks, *CLASSIFIER]
    if two and names[0] == ONE_MATRIX:
        names[:1] = [POSITIONS, TOKENS]
    if len(names) < len(shapes):
        raise CorruptInputError(f"{path} has {len(names)} names for {len(shapes)} tensors")
    names = names[: len(shapes)]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise CorruptInputError(f"{path} repeats the name {repeated!r}")
    return names


def _pieces(directory: Path) -> list[_Piece]:
    """Return the .npy files in order, all of one dtype; none may be missing between two."""
    numbers = {int(match[1]) for f in directory.iterdir() if (match := PIECE.fullmatch(f.name))}
    pieces: list[_Piece] = []
    for number in count():
        if number not in numbers:
            break
        pieces.append(_piece(beside(directory, f"params_{number}.npy")))
        if pieces[-1].dtype != pieces[0].dtype:
            raise CorruptInputError(
                f"{pieces[-1].path} has {pieces[-1].dtype}, params_0.npy has {pieces[0].dtype}"
            )
    if len(pieces) < max(len(numbers), 1):
        raise CorruptInputError(f"{directory} lacks params_{len(pieces)}.npy")
    return pieces


def _piece(path: Path) -> _Piece:
    """Read the header of a .npy file and compare it with the size of the file."""
    try:
        with path.open("rb") as file:
            head = io.BytesIO(file.read(MAX_HEADER))  # numpy reads as much as a header claims
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2
            version = np.lib.format.read_magic(head)
            if version not in HEADERS:
                raise ValueError(f"version {version[0]} of the format is not supported")
            shape, _, dtype = HEADERS[version](head, max_header_size=MAX_HEADER)
    except Exception as error:  # whatever ast and tokenize raise on damaged headers
        why = " ".join(str(error).split())[:100]
        raise CorruptInputError(f"{path} is not a .npy file, or is damaged: {why}") from None
    if dtype.hasobject:
        raise UserError(f"{path} holds Python objects (a pickle), which are never opened here")
    if dtype.str[0] == ">" or dtype.name not in FLOATS or len(shape) != 1:
        raise CorruptInputError(
            f"{path} must hold one row of little-endian floats, got {dtype.str!r} of shape {shape}"
        )
    start = head.tell()
    if start + shape[0] * dtype.itemsize != size:
        raise CorruptInputError(
            f"{path} is cut off or too long: it claims {shape[0]:,} numbers of {dtype} from byte "
            f"{start:,} on, and has {size:,} bytes"
        )
    return _Piece(path, dtype.name, shape[0], plain_reader(path, start, shape[0], dtype.itemsize))


def _reader(pieces: list[_Piece], start: int, columns: int) -> Read:
    """Return a reader of the matrix that begins with number `start` of all pieces."""

    def read(first: int, end: int, left: int, right: int) -> Native:
        parts, begin = [], 0
        for piece in pieces:
            low = max(start + first * columns - begin, 0)
            high = min(start + end * columns - begin, piece.count)
            if low < high:
                parts.append(piece.read(0, 1, low, high)[0])
            begin += piece.count
        rows = np.concatenate(parts).reshape(-1, columns)
        return np.ascontiguousarray(rows[:, left:right])

    return read
