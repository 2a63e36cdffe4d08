"""Two matrices compared where they lie, a block of rows at a time: equal, drifted, or fresh noise.

Nothing larger than a few blocks is in memory, whatever the matrices' size; no torch is needed.
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
HALF_STEPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative error of rounding to a type."""


@dataclass(frozen=True)
class Comparison:
    """How the rows that two matrices (V, D) have in common compare."""

    rows_compared: int
    differing_rows: int
    first_rows: tuple[int, ...]
    """The first rows that differ: token ids."""
    largest: float | None
    """The largest difference of two elements; None where only bytes could be compared."""
    cosine: float | None
    """Of the two matrices as vectors; None where one of them is zero or not finite."""
    not_finite_rows: int
    """Rows of which one matrix holds an infinity or no number at all."""
    within_rounding: bool
    """Whether all differences are what rounding to the coarser of two types gives."""

    @property
    def equal(self) -> bool:
        """Whether no row differs."""
        return self.differing_rows == 0


@dataclass(frozen=True)
class Spread:
    """What a matrix's elements look like, measured on rows spread over it."""

    mean: float
    std: float
    kurtosis: float
    """3 for a normal distribution, 1.8 for a uniform one; trained matrices have heavier tails."""
    row_norm_spread: float
    """Standard deviation of the rows' lengths over their mean."""
    n_elements: int
    width: int

    @property
    def fresh(self) -> str | None:
        """The initialisation that it looks like, in words, or None."""
        if not math.isfinite(self.std) or self.std == 0:
            return None
        if abs(self.mean) > 5 * self.std / math.sqrt(self.n_elements) + 0.01 * self.std:
            return None
        if self.row_norm_spread > 2.5 / math.sqrt(2 * self.width):
            return None
        slack = 0.1 + 15 / math.sqrt(self.n_elements)
        if abs(self.kurtosis - 3) < slack:
            for std in (0.02, 0.01, 1.0, 1 / math.sqrt(self.width)):
                if abs(self.std / std - 1) < 0.05 + 3 / math.sqrt(self.n_elements):
                    return f"N(0, {std:.2g})"
        bound = 1 / math.sqrt(self.width)
        if abs(self.kurtosis - 1.8) < slack and abs(self.std * math.sqrt(3) / bound - 1) < 0.05:
            return f"uniform in +-{bound:.2g}, torch's Linear"
        return None


def compare(a: StoredTensor, b: StoredTensor, *, transposed: bool = False) -> Comparison | None:
    """Compare a (V, D) with b (V', D), or (D, V') `transposed`, over the rows both have.

    Returns None where the two cannot be compared: types that are not decoded here, or no data.
    """
    if a.is_decodable and b.is_decodable:
        return _compare_numbers(a, b, transposed=transposed)
    if a.dtype == b.dtype and a.read and b.read and not transposed and a.shape[1] == b.shape[1]:
        return _compare_bytes(a, b)
    return None


def spread(tensor: StoredTensor, *, transposed: bool = False) -> Spread | None:
    """Measure a matrix on up to some millions of its elements, or None if it has no numbers."""
    if not tensor.is_decodable:
        return None
    rows, width = tensor.shape[::-1] if transposed else tensor.shape
    take = tensor.columns if transposed else tensor.rows
    n_rows = max(1, min(rows, SAMPLE // width))
    pieces = min(8, n_rows)
    starts = [(rows - n_rows // pieces) * i // max(1, pieces - 1) for i in range(pieces)]
    sums, norms, n = np.zeros(4), [], 0
    for start in starts:
        x = take(start, start + n_rows // pieces).astype(np.float64)
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
    return Spread(
        mean=m1,
        std=math.sqrt(variance),
        kurtosis=fourth / variance**2 if variance else 0.0,
        row_norm_spread=float(lengths.std() / lengths.mean()) if lengths.any() else 0.0,
        n_elements=n,
        width=width,
    )


def nonzero_rows(tensor: StoredTensor, start: int, stop: int, *, transposed: bool) -> int:
    """Count rows in [start, stop) that hold anything but zeros."""
    found = 0
    for first, end in _bounds(start, stop, tensor.shape[0] if transposed else tensor.shape[1]):
        block = (tensor.columns if transposed else tensor.rows)(first, end)
        found += int((block != 0).any(axis=1).sum())
    return found


def _bounds(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_ITEMS // max(1, width))
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


def _compare_numbers(a: StoredTensor, b: StoredTensor, *, transposed: bool) -> Comparison:
    n_rows = min(a.shape[0], b.shape[1] if transposed else b.shape[0])
    first_rows: list[int] = []
    differing = not_finite = 0
    largest = dot = norm_a = norm_b = 0.0
    coarse = [HALF_STEPS[t.dtype] for t in (a, b) if t.dtype in HALF_STEPS]
    rounding = a.dtype != b.dtype and bool(coarse)
    for start, stop in _bounds(0, n_rows, a.shape[1]):
        x: Block = a.rows(start, stop)
        y: Block = (b.columns if transposed else b.rows)(start, stop)
        with np.errstate(all="ignore"):
            apart = x != y
            if not apart.any():  # only finite numbers are equal to themselves and have no NaN
                square = _dot(x, x)
                dot, norm_a, norm_b = dot + square, norm_a + square, norm_b + square
                not_finite += 0 if math.isfinite(square) else _odd_rows(x)
                continue
            apart &= ~(np.isnan(x) & np.isnan(y))
            rows = apart.any(axis=1)
            differing += int(rows.sum())
            room = N_FIRST_ROWS - len(first_rows)
            first_rows += [start + int(row) for row in np.flatnonzero(rows)[:room]]
            dot, norm_a, norm_b = dot + _dot(x, y), norm_a + _dot(x, x), norm_b + _dot(y, y)
            if not (math.isfinite(norm_a) and math.isfinite(norm_b)):
                not_finite += int((~(np.isfinite(x) & np.isfinite(y))).any(axis=1).sum())
            gap = np.abs(x.astype(np.float64) - y)
            finite = gap[np.isfinite(gap)]
            largest = max(largest, float(finite.max()) if finite.size else 0.0)
            if rounding:
                size = np.maximum(np.abs(x), np.abs(y))
                rounding = bool((gap <= size * max(coarse) + 1e-7).all())
    length = math.sqrt(norm_a) * math.sqrt(norm_b) if norm_a >= 0 and norm_b >= 0 else math.nan
    sound = math.isfinite(dot) and math.isfinite(length) and length > 0
    return Comparison(
        rows_compared=n_rows,
        differing_rows=differing,
        first_rows=tuple(first_rows),
        largest=largest,
        cosine=max(-1.0, min(1.0, dot / length)) if sound else None,
        not_finite_rows=not_finite,
        within_rounding=rounding and differing > 0,
    )


def _odd_rows(x: Block) -> int:
    return int((~np.isfinite(x)).any(axis=1).sum())


def _dot(x: Block, y: Block) -> float:
    """Return the sum of products: in float32 by blocks of a row, which are then added in float64.

    Where float32 overflows, float64 decides.
    """
    if x.dtype == np.float32 and y.dtype == np.float32:
        total = float(np.einsum("ij,ij->i", x, y).sum(dtype=np.float64))
        if math.isfinite(total):
            return total
    return float(np.einsum("ij,ij->", x.astype(np.float64), y.astype(np.float64)))


def _compare_bytes(a: StoredTensor, b: StoredTensor) -> Comparison:
    n_rows = min(a.shape[0], b.shape[0])
    first_rows: list[int] = []
    differing = 0
    for start, stop in _bounds(0, n_rows, a.shape[1]):
        rows = (a.native(start, stop) != b.native(start, stop)).any(axis=1)
        differing += int(rows.sum())
        room = N_FIRST_ROWS - len(first_rows)
        first_rows += [start + int(row) for row in np.flatnonzero(rows)[:room]]
    largest = 0.0 if differing == 0 else None
    cosine = 1.0 if differing == 0 else None
    return Comparison(n_rows, differing, tuple(first_rows), largest, cosine, 0, False)
