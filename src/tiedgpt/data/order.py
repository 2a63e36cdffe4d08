"""The order of batches: a pure function of (seed, step), so that a run can resume anywhere.

A stream of N tokens has N - 1 targets, each the token after its input. They are cut into windows of
T. An epoch visits each window once, in an order drawn from (seed, epoch). The last window is
aligned to the end of the stream; targets that the window before it has, too, are set to -100.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data.shards import Shards
from tiedgpt.errors import UserError
from tiedgpt.files import format_count
from tiedgpt.signatures import checked, wrong_type

LARGEST_TABLE = 1_000_000
"""Maximum number of windows whose order is stored as a table; a longer order is computed."""
ROUNDS = 8
IGNORED = -100  # a target that is not counted, as in torch's cross_entropy

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]


class Batches:
    """Training batches by step number: the same (tokens, seed, step) give the same batch.

    Raises:
        UserError: there are fewer than n_positions + 1 tokens, or a size is not positive.
    """

    def __init__(self, tokens: Shards, *, batch_size: int, n_positions: int, seed: int) -> None:
        _check_sizes(tokens, batch_size, n_positions)
        if len(tokens) < n_positions + 1:
            raise UserError(
                f"the text has {format_count(len(tokens), 'token')}, and a context of "
                f"{n_positions:,} needs {n_positions + 1:,}",
                hint="use a shorter --context or more text",
            )
        self.tokens = tokens
        self.batch_size = batch_size
        self.n_positions = n_positions
        self.n_windows = n = _count_windows(len(tokens), n_positions)
        draw: Callable[..., Any] = permutation if n <= LARGEST_TABLE else LargePermutation
        self._order = lru_cache(2)(partial(draw, n, seed=seed))

    def batch(self, step: int) -> Batch:
        """Return inputs and targets of a step >= 0, both int64 (B, T)."""
        windows = []
        for row in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, index = divmod(row, self.n_windows)
            windows.append(int(self._order(epoch=epoch)[index]))
        return _read(self.tokens, windows, self.n_positions)


@checked
def permutation(n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order, (n,), in which an epoch visits n items. It never changes."""
    return np.argsort(_draw(n, seed, epoch), kind="stable")


def _draw(n: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return n words of 64 bits, the same in every NumPy; those of a `Generator` need not be."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(n)
    return words


class LargePermutation:
    """A pseudorandom permutation of n > 1 items, computed item by item, without a table.

    A Feistel network permutes the numbers with as many bits as n - 1, and is applied again to
    results of n or more (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", section 3). The permutation never changes.
    """

    def __init__(self, n: int, *, seed: int, epoch: int) -> None:
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._low = bits // 2
        self._masks = 2**self._low - 1, 2 ** (bits - self._low) - 1
        self._keys = _draw(ROUNDS, seed, epoch).tolist()

    def __getitem__(self, index: int) -> int:
        number = self._shuffle(index)
        while number >= self.n:
            number = self._shuffle(number)
        return number

    def _shuffle(self, number: int) -> int:
        halves = [number & self._masks[0], number >> self._low]
        for count, key in enumerate(self._keys):
            side = count % 2
            halves[side] ^= _mix(halves[1 - side] ^ key) & self._masks[side]
        return halves[1] << self._low | halves[0]


def _mix(word: int) -> int:
    """Return 64 bits that look random: the finalizer of SplitMix64 (Steele et al. 2014)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


def in_order(
    tokens: Shards, *, batch_size: int, n_positions: int, at_most: int | None = None
) -> Iterator[Batch]:
    """Yield every window once, in order, for evaluation: int64 (B, T), the last (<= B, T).

    `at_most` limits the number of windows, which are spread evenly over the text. A text shorter
    than the context is one short window.

    Raises:
        UserError: there are fewer than two tokens, so there is nothing to predict.
    """
    _check_sizes(tokens, batch_size, n_positions)
    if len(tokens) < 2:
        raise UserError(
            f"a text of {format_count(len(tokens), 'token')} has nothing to predict",
            hint="give more text",
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


def _check_sizes(tokens: Shards, batch_size: int, n_positions: int) -> None:
    if not hasattr(tokens, "read"):
        raise wrong_type("a batch", "tokens", "Shards", tokens)
    if min(batch_size, n_positions) < 1:
        raise UserError(f"{batch_size=} and {n_positions=} must be at least 1")
