"""Two matrices compared where they are stored, a block of rows at a time, without torch.

    comparison = compare(a, b)      equal, or how many rows differ, by how much, at which cosine
    statistics(a).initialization    "N(0, 0.02)" where the numbers look random, else None

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
SAMPLE = 4_000_000
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
    """The largest difference of two elements; None where only bytes could be compared."""
    cosine: float | None
    """Of the two matrices as vectors; None where one of them is zero or not finite."""
    not_finite_rows: int
    """Rows in which one of the matrices holds an infinity or NaN."""
    within_rounding: bool
    """Whether rounding to the coarser of the two types explains every difference."""

    @property
    def equal(self) -> bool:
        """Whether no row differs."""
        return self.differing_rows == 0

    def __str__(self) -> str:
        """Say how far apart they are: `differ in 3 of 97 rows (largest difference 1, ...)`."""
        if self.equal:
            return f"are equal in all {self.rows_compared:,} rows"
        largest = "" if self.largest is None else f"largest difference {self.largest:.3g}"
        cosine = "" if self.cosine is None else f"cosine {self.cosine:.4f}"
        numbers = ", ".join(filter(None, (largest, cosine)))
        text = f"differ in {self.differing_rows:,} of {self.rows_compared:,} rows"
        return f"{text} ({numbers})" if numbers else text


@dataclass(frozen=True)
class Statistics:
    """The distribution of a matrix's elements, measured on rows spread over it."""

    mean: float
    std: float
    initialization: str | None
    """The initialization that the numbers look like, in words."""


def compare(a: StoredTensor, b: StoredTensor, *, transposed: bool = False) -> Comparison | None:
    """Compare a (V, D) with b (V', D), or with b (D, V') if `transposed`, over the common rows.

    Types that are not decoded are compared by their bytes. Returns None if the two cannot be
    compared: types that differ and are not decoded, or no data (meta).
    """
    b = b.turned() if transposed else b
    if a.is_decodable and b.is_decodable:
        return _compare_numbers(a, b)
    if a.dtype != b.dtype or not a.read or not b.read or a.shape[1] != b.shape[1]:
        return None
    n_rows = min(a.shape[0], b.shape[0])
    differing, first_rows = 0, list[int]()
    for start, stop in _bounds(0, n_rows, a.shape[1]):
        apart = a.native(start, stop) != b.native(start, stop)
        rows = np.flatnonzero(apart.any(axis=1))
        differing += rows.size
        first_rows += (start + rows[: N_FIRST_ROWS - len(first_rows)]).tolist()
    largest, cosine = (None, None) if differing else (0.0, 1.0)
    return Comparison(n_rows, differing, tuple(first_rows), largest, cosine, 0, False)


def _compare_numbers(a: StoredTensor, b: StoredTensor) -> Comparison:
    n_rows = min(a.shape[0], b.shape[0])
    differing, first_rows = 0, list[int]()
    not_finite = 0
    largest = dot = norm_a = norm_b = 0.0
    errors = [ROUNDING_ERROR[t.dtype] for t in (a, b) if t.dtype in ROUNDING_ERROR]
    rounding = a.dtype != b.dtype and bool(errors)
    for start, stop in _bounds(0, n_rows, a.shape[1]):
        x = a.rows(start, stop)  # in two statements: each frees the block before it
        y = b.rows(start, stop)
        with np.errstate(all="ignore"):
            apart = x != y
            if not apart.any():  # so neither holds a NaN
                square = _dot(x, x)
                dot, norm_a, norm_b = dot + square, norm_a + square, norm_b + square
                not_finite += 0 if math.isfinite(square) else _not_finite_rows(x, x)
                continue
            apart &= ~(np.isnan(x) & np.isnan(y))
            rows = np.flatnonzero(apart.any(axis=1))
            differing += rows.size
            first_rows += (start + rows[: N_FIRST_ROWS - len(first_rows)]).tolist()
            dot, norm_a, norm_b = dot + _dot(x, y), norm_a + _dot(x, x), norm_b + _dot(y, y)
            if not math.isfinite(norm_a + norm_b):
                not_finite += _not_finite_rows(x, y)
            gap = np.abs(x.astype(np.float64) - y)
            largest = max(largest, float(gap.max(where=np.isfinite(gap), initial=0)))
            if rounding:
                size = np.maximum(np.abs(x), np.abs(y))
                rounding = bool((gap <= size * max(errors) + 1e-7).all())
    length = math.sqrt(norm_a) * math.sqrt(norm_b)
    has_cosine = math.isfinite(dot) and math.isfinite(length) and length > 0
    return Comparison(
        rows_compared=n_rows,
        differing_rows=differing,
        first_rows=tuple(first_rows),
        largest=largest,
        cosine=max(-1.0, min(1.0, dot / length)) if has_cosine else None,
        not_finite_rows=not_finite,
        within_rounding=rounding and differing > 0,
    )


def statistics(tensor: StoredTensor, *, transposed: bool = False) -> Statistics | None:
    """Measure a matrix on up to four million of its elements; None if they cannot be decoded."""
    tensor = tensor.turned() if transposed else tensor
    if not tensor.is_decodable:
        return None
    rows, width = tensor.shape
    n_rows = max(1, min(rows, SAMPLE // width))
    pieces = min(8, n_rows)
    sums, norms, n = np.zeros(4), [], 0
    for piece in range(pieces):
        start = (rows - n_rows // pieces) * piece // max(1, pieces - 1)
        x = tensor.rows(start, start + n_rows // pieces).astype(np.float64)
        with np.errstate(all="ignore"):
            sums += [float((x**power).sum()) for power in (1, 2, 3, 4)]
            norms.append(np.sqrt((x * x).sum(axis=1)))
        n += x.size
    m1, m2, m3, m4 = (float(value) / n for value in sums)
    if not all(map(math.isfinite, (m1, m2, m3, m4))):
        return None
    variance = max(0.0, m2 - m1 * m1)
    fourth = m4 - 4 * m1 * m3 + 6 * m1 * m1 * m2 - 3 * m1**4
    lengths = np.concatenate(norms)
    spread = float(lengths.std() / lengths.mean()) if lengths.any() else 0.0
    std, kurtosis = math.sqrt(variance), fourth / variance**2 if variance else 0.0
    return Statistics(m1, std, _initialization(m1, std, kurtosis, spread, n, width))


def _initialization(
    mean: float, std: float, kurtosis: float, row_norm_spread: float, n: int, width: int
) -> str | None:
    """Return the initialization that n elements in rows of `width` look like, in words.

    Kurtosis is 3 for a normal distribution, 1.8 for a uniform one; trained matrices have heavier
    tails, and rows whose norms differ more.
    """
    if std == 0 or abs(mean) > 5 * std / math.sqrt(n) + 0.01 * std:
        return None
    if row_norm_spread > 2.5 / math.sqrt(2 * width):
        return None
    slack = 0.1 + 15 / math.sqrt(n)
    bound = 1 / math.sqrt(width)
    if abs(kurtosis - 3) < slack:
        for known in (0.02, 0.01, 1.0, bound):
            if abs(std / known - 1) < 0.05 + 3 / math.sqrt(n):
                return f"N(0, {known:.2g})"
    if abs(kurtosis - 1.8) < slack and abs(std * math.sqrt(3) / bound - 1) < 0.05:
        return f"uniform in +-{bound:.2g}, torch's Linear"
    return None


def nonzero_rows(tensor: StoredTensor, start: int, stop: int, *, transposed: bool = False) -> int:
    """Count the rows in [start, stop) that hold anything but zeros."""
    tensor = tensor.turned() if transposed else tensor
    blocks = (tensor.rows(*bounds) for bounds in _bounds(start, stop, tensor.shape[1]))
    return sum(int((block != 0).any(axis=1).sum()) for block in blocks)


def _bounds(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_ITEMS // max(1, width))
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


def _not_finite_rows(x: Block, y: Block) -> int:
    return int((~(np.isfinite(x) & np.isfinite(y))).any(axis=1).sum())


def _dot(x: Block, y: Block) -> float:
    """Return the sum of x * y: in float32 within a row, in float64 across rows.

    Where float32 overflows, all of it is done in float64.
    """
    if x.dtype == np.float32 and y.dtype == np.float32:
        total = float(np.einsum("ij,ij->i", x, y).sum(dtype=np.float64))
        if math.isfinite(total):
            return total
    return float(np.einsum("ij,ij->", x.astype(np.float64), y.astype(np.float64)))
