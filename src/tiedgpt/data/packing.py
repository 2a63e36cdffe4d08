"""Several examples in a row of a batch, each as if it were alone there.

`document_starts` (B, T) holds the index where each token's example begins; the model sees no
further back, and counts positions from there (`GPT.states`). Rows are a pure function of (seed,
epoch): the examples in a drawn order, the oldest of `BUFFER` waiting ones first, then the longest
that fit. The rest of a row is a padding example that is not counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data.examples import EncodedExamples
from tiedgpt.data.order import IGNORED, permutation
from tiedgpt.errors import UserError
from tiedgpt.signatures import checked

BUFFER = 1_000
"""Examples among which the next of a row is chosen."""

PackedBatch = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the indices of the items in each row; their lengths add up to at most `room`.

    A row takes the first remaining item, then repeatedly the longest one that fits among the first
    `BUFFER` remaining items, and the first of equal ones. No length is above `room`.
    """
    rows: list[list[int]] = []
    waiting: list[tuple[int, int]] = []  # (length, -number), sorted
    used, upcoming = bytearray(len(lengths)), 0
    for oldest in range(len(lengths)):
        if used[oldest]:
            continue
        while upcoming < len(lengths) and len(waiting) < BUFFER:
            insort(waiting, (lengths[upcoming], -upcoming))
            upcoming += 1
        row, free = [], room
        at = bisect_left(waiting, (lengths[oldest], -oldest))
        while at >= 0:
            length, number = waiting.pop(at)
            used[-number] = True
            row.append(-number)
            free -= length
            at = bisect_right(waiting, (free, 0)) - 1
        rows.append(row)
    return rows


class PackedBatches:
    """Batches of packed examples by step number; the same (examples, seed, step) give the same.

    Without `packing` a row has one example. Raises `UserError` where an example is longer than
    `n_positions`.
    """

    @checked
    def __init__(
        self,
        examples: EncodedExamples,
        *,
        batch_size: int,
        n_positions: int,
        seed: int,
        packing: bool = True,
    ) -> None:
        self.lengths = np.diff(examples.ends, prepend=0)
        if batch_size < 1 or not len(examples) or self.lengths.max() > n_positions:
            raise UserError(
                f"{len(examples):,} examples of up to {self.lengths.max(initial=0):,} tokens "
                f"cannot be packed into {batch_size} rows of {n_positions:,}: read them with that "
                "context"
            )
        self.examples, self.batch_size, self.n_positions = examples, batch_size, n_positions
        self.seed, self.packing = seed, packing
        self._rows = lru_cache(2)(self._pack)
        self._ends: list[int] = []  # of epochs, in rows

    def n_rows(self, epoch: int = 0) -> int:
        """Return the rows of an epoch; it differs a little from epoch to epoch."""
        return len(self._rows(epoch))

    def batch(self, step: int) -> PackedBatch:
        """Return ids, targets and `document_starts` of a step >= 0, all int64 (B, T)."""
        return self.rows(step * self.batch_size, self.batch_size)

    def rows(self, start: int, count: int) -> PackedBatch:
        """Return `count` rows of the endless sequence of epochs, from row `start`: (count, T)."""
        shape = count, self.n_positions
        ids, document_starts = np.zeros((2, *shape), np.int64)
        targets = np.full(shape, IGNORED, np.int64)
        for row, examples in enumerate(map(self._row, range(start, start + count))):
            at = 0
            for number in examples:
                its, counted = self.examples.example(number)
                end = at + len(its)
                ids[row, at:end] = its
                targets[row, at : end - 1][counted[1:]] = its[1:][counted[1:]]
                document_starts[row, at:end] = at
                at = end
            document_starts[row, at:] = at
        return ids, targets, document_starts

    def _row(self, row: int) -> list[int]:
        while not self._ends or self._ends[-1] <= row:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + self.n_rows(len(self._ends)))
        epoch = bisect_right(self._ends, row)
        return self._rows(epoch)[row - (self._ends[epoch - 1] if epoch else 0)]

    def _pack(self, epoch: int) -> list[list[int]]:
        order = permutation(len(self.examples), seed=self.seed, epoch=epoch)
        numbers = order.tolist()
        if not self.packing:
            return [[number] for number in numbers]
        rows = best_fit(self.lengths[order].tolist(), self.n_positions)
        return [[numbers[item] for item in row] for row in rows]
