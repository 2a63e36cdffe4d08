"""OpenAI's GPT-1 release: all numbers in one row, cut into .npy files of equal length.

    params_shapes.json          [[512, 768], [40478, 768], [1, 768, 2304], ...]
    params_0.npy ... _9.npy     the numbers of all tensors in that order

(openai/finetune-transformer-lm, `model/` and train.py.) A tensor is read from the files over which
it lies; pickles are never opened.

The program runs with tokens, special tokens and positions in one matrix, `model/we`. The release
stores positions and tokens apart; fine-tuned models store them together. OpenAI's training predicts
every row of that matrix, positions too; here, and in transformers, only tokens are predicted.
"""

from __future__ import annotations

import json
import math
import operator
import warnings
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.files import beside, read_json, reading
from tiedgpt.weights.checkpoint import EMBEDDING, Checkpoint, Claim, GPTCheckpoint
from tiedgpt.weights.formats.openai_gpt2 import (
    FUNCTIONS,
    ONE_MATRIX,
    POSITIONS,
    TOKENS,
    drop_training_state,
    read_hparams,
    rename_variables,
)
from tiedgpt.weights.formats.transformers import config_fields
from tiedgpt.weights.registry import Format
from tiedgpt.weights.tensors import FLOATS, Native, Read, Storage, StoredTensor, file_reader

SHAPES, ENCODER = "params_shapes.json", "encoder_bpe_40000.json"
BLOCK = (
    "attn/c_attn/w", "attn/c_attn/b", "attn/c_proj/w", "attn/c_proj/b", "ln_1/g", "ln_1/b",
    "mlp/c_fc/w", "mlp/c_fc/b", "mlp/c_proj/w", "mlp/c_proj/b", "ln_2/g", "ln_2/b",
)  # fmt: skip
"""A block's tensors in the order in which the program creates them."""
CLASSIFIER = ("model/clf/w", "model/clf/b")
NPY_1 = b"\x93NUMPY\1\0"
"""How a .npy file begins whose header is shorter than 64 KB."""
MAX_HEADER = 1000
"""Bytes; numpy writes 128. Parsing much longer ones could exhaust the interpreter's stack."""
MAX_JSON = 1 << 20
RELEASED_SHAPE, RELEASED_HEADS, RELEASED_POSITIONS = (12, (768,)), 12, 512
"""The shape: layers and width."""
RELEASED_SPECIALS = (0, 3)
"""Special tokens of the release, and of a fine-tuned model: start, delimiter, classify."""


def detect(path: Path, head: bytes) -> bool:
    """Whether a file is the list of shapes of a release."""
    return path.name == SHAPES


def open_shards(path: Path) -> Checkpoint:
    """Read the shapes at `path` and the headers of the .npy files beside it.

    Raises `CorruptInputError` for damaged or missing files, or where the shapes need another number
    of numbers.
    """
    directory = path.parent
    shapes = _shapes(path)
    names = _names(path, shapes)
    files = [beside(directory, "params_0.npy")]
    while (directory / f"params_{len(files)}.npy").is_file():
        files.append(beside(directory, f"params_{len(files)}.npy"))
    rows = [_header(file) for file in files]
    dtype = rows[0].dtype
    ends = list(accumulate((len(row) for row in rows), initial=0))
    bounds = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    if ends[-1] != bounds[-1] or any(row.dtype != dtype for row in rows):
        raise CorruptInputError(
            f"{directory}: params_0.npy to {files[-1].name} must hold {bounds[-1]:,} numbers of "
            f"one type, got {ends[-1]:,}: a file is missing, cut off or of another model"
        )
    readers = [
        file_reader(file, row.offset, len(row), dtype.itemsize)
        for file, row in zip(files, rows, strict=True)
    ]
    place, width = str(directory / "params_*.npy"), dtype.itemsize
    tensors = {}
    for name, shape, (start, stop) in zip(names, shapes, pairwise(bounds), strict=False):
        storage = Storage(place, start * width, stop * width)
        reader = _reader(readers, ends, start, shape[-1])
        tensors[name] = StoredTensor(
            name, shape, dtype.name, (stop - start) * width, storage, reader
        )
    return Checkpoint(
        directory, "numpy", tensors, read_hparams(directory), files=(path, *files),
        claim=Claim(source="a .npy file does not say whether the head is tied"),
    )  # fmt: skip


def to_gpt(checkpoint: Checkpoint) -> GPTCheckpoint:
    """Return the GPT; the classifier is left out, and a note says so.

    Raises `UserError` where one matrix holds tokens and positions and nothing says how many.
    """
    variables, notes = drop_training_state(checkpoint.tensors)
    fields, foreign = config_fields(checkpoint.config)
    fields["norm"] = "post"
    if ONE_MATRIX in variables:
        matrix = variables.pop(ONE_MATRIX)
        n_tokens, n_rows = _n_tokens(checkpoint, matrix, fields.get("n_positions")), matrix.shape[0]
        variables[TOKENS] = matrix.row_range(0, n_tokens)
        variables[POSITIONS] = matrix.row_range(n_tokens, n_rows)
        notes.append(
            f"{ONE_MATRIX} is one matrix: {n_tokens:,} tokens, then {n_rows - n_tokens:,} positions"
        )
    tensors = rename_variables(variables)
    assumed: dict[str, Any] = dict(FUNCTIONS)
    n_layer = sum(name.endswith(".ln_2.weight") for name in tensors)
    if EMBEDDING in tensors and (n_layer, tensors[EMBEDDING].shape[1:]) == RELEASED_SHAPE:
        assumed["n_head"] = RELEASED_HEADS
    return GPTCheckpoint("OpenAI GPT-1", fields, tensors, assumed, foreign, tuple(notes))


def _n_tokens(checkpoint: Checkpoint, matrix: StoredTensor, n_positions: Any) -> int:
    """Return how many rows of the one matrix are tokens, special tokens included.

    The positions are the last rows. Their number is `n_positions` if a file says it, else the
    release's 512 if they and the encoder's tokens leave as many special tokens as the program adds.
    """
    encoder = checkpoint.files[0].with_name(ENCODER)
    n_words = len(read_json(encoder)) if encoder.is_file() else 0
    n_rows = matrix.shape[0]
    if n_positions is None and n_words:
        if n_rows - RELEASED_POSITIONS - n_words in RELEASED_SPECIALS:
            n_positions = RELEASED_POSITIONS
    is_whole = type(n_positions) is int and len(matrix.shape) == 2
    if not is_whole or not 0 < n_positions <= n_rows - max(n_words, 1):
        raise UserError(
            f"{checkpoint.source}: the {n_rows:,} rows of {ONE_MATRIX} are tokens, special tokens "
            f"and positions, and n_ctx={n_positions!r} does not say how many",
            hint='write the right {"n_ctx": ...} into hparams.json beside it',
        )
    return n_rows - int(n_positions)


def _shapes(path: Path) -> list[tuple[int, ...]]:
    with reading(path, "list of shapes"), path.open("rb") as file:
        shapes = [tuple(map(operator.index, s)) for s in json.loads(file.read(MAX_JSON))]
        if not shapes or not all(
            1 <= len(shape) <= 8 and 0 < min(shape) and max(shape) < 1 << 40 for shape in shapes
        ):
            raise ValueError("a size is missing, not positive or too large")
    return shapes


def _names(path: Path, shapes: list[tuple[int, ...]]) -> list[str]:
    """Return the names in the program's order: embeddings, blocks and maybe the classifier.

    The program has one matrix where the release has positions and tokens.
    """
    two = len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][1]
    embeddings = [POSITIONS, TOKENS] if two else [ONE_MATRIX]
    n_layer, n_others = divmod(len(shapes) - len(embeddings), len(BLOCK))
    if n_others not in (0, len(CLASSIFIER)):
        raise CorruptInputError(
            f"{path}: {len(shapes)} tensors are not those of whole layers, {len(BLOCK)} each"
        )
    blocks = [f"model/h{layer}/{name}" for layer in range(n_layer) for name in BLOCK]
    return [*embeddings, *blocks, *CLASSIFIER]


def _header(path: Path) -> np.memmap[Any, Any]:
    """Return the row of floats in a .npy file, mapped so that numpy checks its size."""
    with reading(path, ".npy file"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers of Python 2
        with path.open("rb") as file:
            if file.read(len(NPY_1)) != NPY_1:
                raise ValueError("it begins with other bytes")
        row = np.lib.format.open_memmap(path, mode="r", max_header_size=MAX_HEADER)
        if row.dtype.str[0] == ">" or row.dtype.name not in FLOATS or row.ndim != 1:
            raise ValueError(
                f"it must hold one row of little-endian floats, not {row.dtype.str!r} of shape "
                f"{row.shape}"
            )
    return row


def _reader(readers: list[Read], ends: list[int], start: int, columns: int) -> Read:
    """Return a reader of the matrix that begins with number `start` of all files.

    `ends` are the numbers at which one file ends and the next begins.
    """

    def read(first: int, end: int, left: int, right: int) -> Native:
        begin, stop = start + first * columns, start + end * columns
        parts = [
            reader(0, 1, max(begin, low) - low, min(stop, high) - low)[0]
            for reader, (low, high) in zip(readers, pairwise(ends), strict=True)
            if max(begin, low) < min(stop, high)
        ]
        rows = np.concatenate(parts).reshape(-1, columns)
        return np.ascontiguousarray(rows[:, left:right])

    return read


FORMAT = Format(
    name="openai_gpt1",
    title="OpenAI's GPT-1",
    about="the numbered `.npy` files and `params_shapes.json`",
    about_tokenizer="GPT-1's lower-case BPE",
    detect=detect,
    open=open_shards,
    to_gpt=to_gpt,
    suffixes=(".npy",),
    is_model_file=detect,
    file_names=(SHAPES,),
)
