"""The order of batches: a pure function of (seed, step), so that a run can resume anywhere.

A stream of N tokens has N - 1 targets, each the token after its input. They are cut into windows of
T. An epoch visits each window once, in an order drawn from (seed, epoch). The last window is
aligned to the end of the stream; targets that the window before it has, too, are set to -100.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data.shards import Shards
from tiedgpt.errors import UserError

IGNORED = -100  # a target that is not counted, as in torch's cross_entropy

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]


class Batches:
    """Training batches by step number: the same (tokens, seed, step) give the same batch.

    Raises:
        UserError: there are fewer than n_positions + 1 tokens, or a size is not positive.
    """

    def __init__(self, tokens: Shards, *, batch_size: int, n_positions: int, seed: int) -> None:
        _check_sizes(batch_size, n_positions)
        if len(tokens) < n_positions + 1:
            raise UserError(
                f"the text has {len(tokens):,} tokens, and a context of {n_positions:,} needs "
                f"{n_positions + 1:,}",
                hint="use a shorter --context or more text",
            )
        self.tokens = tokens
        self.batch_size = batch_size
        self.n_positions = n_positions
        self.n_windows = n = _count_windows(len(tokens), n_positions)
        self._order = lru_cache(2)(lambda epoch: permutation(n, seed=seed, epoch=epoch))

    def batch(self, step: int) -> Batch:
        """Return inputs and targets of a step >= 0, both int64 (B, T)."""
        return self.rows(step * self.batch_size, self.batch_size)

    def rows(self, first: int, count: int) -> Batch:
        """Return `count` rows of the endless sequence of epochs, from row `first`: (count, T)."""
        windows = []
        for row in range(first, first + count):
            epoch, index = divmod(row, self.n_windows)
            windows.append(int(self._order(epoch)[index]))
        return _read(self.tokens, windows, self.n_positions)


def permutation(n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order, (n,), in which an epoch visits n items. It never changes."""
    # Philox's raw stream is the same in every NumPy; Generator.permutation need not be.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")


def in_order(
    tokens: Shards, *, batch_size: int, n_positions: int, at_most: int | None = None
) -> Iterator[Batch]:
    """Yield every window once, from the first, for evaluation: int64 (B, T), the last (<= B, T).

    With `at_most`, yield so many windows, spread evenly over the text: always the same ones. A text
    shorter than the context makes one window of its own length.

    Raises:
        UserError: there are fewer than two tokens, so there is nothing to predict.
    """
    _check_sizes(batch_size, n_positions)
    if len(tokens) < 2:
        raise UserError(
            f"a text of {len(tokens)} tokens has nothing to predict", hint="give more text"
        )
    n_positions = min(n_positions, len(tokens) - 1)
    n_windows = _count_windows(len(tokens), n_positions)
    count = n_windows if at_most is None else min(at_most, n_windows)
    chosen = [index * n_windows // count for index in range(count)]
    for first in range(0, count, batch_size):
        yield _read(tokens, chosen[first : first + batch_size], n_positions)


def _read(tokens: Shards, windows: Sequence[int], n_positions: int) -> Batch:
    """Return inputs and targets of windows, given by number, both (len(windows), T)."""
    ids, targets = np.empty((2, len(windows), n_positions), np.int64)
    for row, window in enumerate(windows):
        start = min(window * n_positions, len(tokens) - 1 - n_positions)
        read = tokens.read(start, start + n_positions + 1)
        ids[row], targets[row] = read[:-1], read[1:]
        targets[row, : window * n_positions - start] = IGNORED  # the window before has these, too
    return ids, targets


def _count_windows(n_tokens: int, n_positions: int) -> int:
    return -(-(n_tokens - 1) // n_positions)


def _check_sizes(batch_size: int, n_positions: int) -> None:
    if min(batch_size, n_positions) < 1:
        raise UserError(f"{batch_size=} and {n_positions=} must be at least 1")
