"""Compare two matrices block by block in their files, without torch.

    compare(a, b)               equal, or how many rows differ, by how much, at which cosine
    detect_initialization(a)    its mean, deviation and "N(0, 0.02)" if it looks untrained

Memory: a few blocks, whatever the size of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.weights.tensors import StoredTensor

Block = NDArray[np.floating[Any]]
N_FIRST_ROWS = 10
SAMPLE, PIECES = 1 << 20, 8
"""Elements by which an initialization is judged, in runs of rows spread over the matrix."""
BLOCK_ITEMS = 2 << 20
ROUNDING_ERROR = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a type."""


@dataclass(frozen=True)
class Comparison:
    """The rows that two matrices (V, D) have in common, compared."""

    rows_compared: int
    differing_rows: int
    first_rows: tuple[int, ...]
    """The first rows that differ: token ids."""
    largest: float | None
    """Largest finite difference of two elements; 0 if none is finite, None if only bytes could be
    compared."""
    cosine: float | None
    """Cosine of the two matrices as vectors; None if one is zero or not finite."""
    not_finite_rows: int
    """Rows in which one of the matrices holds an infinity or NaN."""
    within_rounding: bool
    """Whether rounding to the coarser of the two types explains every difference."""

    @property
    def equal(self) -> bool:
        """Whether no row differs."""
        return self.differing_rows == 0

    def __str__(self) -> str:
        """Return the difference in words: `differ in 3 of 97 rows (largest difference 1, ...)`."""
        if self.equal:
            return f"are equal in all {self.rows_compared:,} rows"
        largest = f"largest difference {self.largest:.3g}" if self.largest else ""
        cosine = "" if self.cosine is None else f"cosine {self.cosine:.4f}"
        not_finite = f"not finite in {self.not_finite_rows:,}" if self.not_finite_rows else ""
        numbers = ", ".join(filter(None, (largest, cosine, not_finite)))
        text = f"differ in {self.differing_rows:,} of {self.rows_compared:,} rows"
        return f"{text} ({numbers})" if numbers else text


def compare(a: StoredTensor, b: StoredTensor) -> Comparison | None:
    """Compare a (V, D) with b (V', D) over the rows that both have.

    Types that are not decoded are compared by their bytes. Returns None if the two cannot be
    compared: types that differ and are not decoded, or no data (meta).
    """
    are_numbers = a.is_decodable and b.is_decodable
    if not are_numbers and (a.dtype != b.dtype or not a.read or not b.read):
        return None
    n_rows = min(a.shape[0], b.shape[0])
    differing, not_finite, first_rows = 0, 0, list[int]()
    largest = dot = norm_a = norm_b = 0.0
    errors = [ROUNDING_ERROR[t.dtype] for t in (a, b) if t.dtype in ROUNDING_ERROR]
    rounding = a.dtype != b.dtype and bool(errors)
    for start, stop in _bounds(0, n_rows, a.shape[1]):
        x = a.rows(start, stop) if are_numbers else a.native(start, stop)
        y = b.rows(start, stop) if are_numbers else b.native(start, stop)
        with np.errstate(all="ignore"):
            apart = x != y
            same = not apart.any()  # then neither holds a NaN
            if are_numbers:
                square = _dot(x, x)
                norm_a, norm_b = norm_a + square, norm_b + (square if same else _dot(y, y))
                dot += square if same else _dot(x, y)
                if not math.isfinite(norm_a + norm_b):
                    not_finite += int((~(np.isfinite(x) & np.isfinite(y))).any(axis=1).sum())
                if not same:
                    apart &= ~(np.isnan(x) & np.isnan(y))
                    gap = np.abs(x.astype(np.float64) - y)
                    largest = max(largest, float(gap.max(where=np.isfinite(gap), initial=0)))
                    if rounding:
                        size = np.maximum(np.abs(x), np.abs(y))
                        rounding = bool((gap <= size * max(errors) + 1e-7).all())
            rows = np.flatnonzero(apart.any(axis=1))
        differing += rows.size
        first_rows += (start + rows[: N_FIRST_ROWS - len(first_rows)]).tolist()
    length = math.sqrt(norm_a) * math.sqrt(norm_b)
    has_cosine = math.isfinite(dot) and math.isfinite(length) and length > 0
    return Comparison(
        rows_compared=n_rows,
        differing_rows=differing,
        first_rows=tuple(first_rows),
        largest=largest if are_numbers or not differing else None,
        cosine=max(-1.0, min(1.0, dot / length)) if has_cosine else None,
        not_finite_rows=not_finite,
        within_rounding=rounding and differing > 0,
    )


def detect_initialization(tensor: StoredTensor) -> tuple[float, float, str] | None:
    """Return the mean, the deviation and the likely initialization of a matrix.

    A sample of about a million elements decides; None if it looks trained or cannot be decoded.
    Kurtosis is 3 for a normal distribution, 1.8 for a uniform one; trained matrices have heavier
    tails, and rows whose norms differ more.
    """
    if not tensor.is_decodable:
        return None
    n_rows, width = tensor.shape
    taken = max(1, min(n_rows, SAMPLE // width) // PIECES)
    starts = np.linspace(0, n_rows - taken, min(PIECES, n_rows)).astype(int).tolist()
    x = np.concatenate([tensor.rows(at, at + taken) for at in starts]).astype(np.float64)
    if not np.isfinite(x).all():
        return None
    mean, std, lengths = float(x.mean()), float(x.std()), np.linalg.norm(x, axis=1)
    if std == 0 or abs(mean) > 5 * std / math.sqrt(x.size) + 0.01 * std:
        return None
    if lengths.std() > 2.5 / math.sqrt(2 * width) * lengths.mean():
        return None
    kurtosis = float((((x - mean) / std) ** 4).mean())
    slack = 0.1 + 15 / math.sqrt(x.size)
    bound = 1 / math.sqrt(width)
    if abs(kurtosis - 3) < slack:
        for usual_std in (0.02, 0.01, 1.0, bound):
            if abs(std / usual_std - 1) < 0.05 + 3 / math.sqrt(x.size):
                return mean, std, f"N(0, {usual_std:.2g})"
    if abs(kurtosis - 1.8) < slack and abs(std * math.sqrt(3) / bound - 1) < 0.05:
        return mean, std, f"uniform in +-{bound:.2g}, torch's Linear"
    return None


def count_nonzero_rows(tensor: StoredTensor, start: int) -> int:
    """Count the rows from `start` on that hold anything but zeros."""
    blocks = (tensor.rows(*bounds) for bounds in _bounds(start, *tensor.shape))
    return sum(int((block != 0).any(axis=1).sum()) for block in blocks)


def _bounds(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_ITEMS // max(1, width))
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


def _dot(x: Block, y: Block) -> float:
    """Return the sum of x * y: in float32 within a row, in float64 across rows.

    Where float32 overflows, all of it is done in float64.
    """
    if x.dtype == np.float32 and y.dtype == np.float32:
        total = float(np.einsum("ij,ij->i", x, y).sum(dtype=np.float64))
        if math.isfinite(total):
            return total
    return float(np.einsum("ij,ij->", x.astype(np.float64), y.astype(np.float64)))
