"""The data of a run: sources read once, encoded once, and cut into rows of a context.

sources = task.read()                              # documents or examples, and their digest
rows = sources.rows(tokenizer, directory)          # encoded
data = rows.at(context)                            # batches, and facts for the plan
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiedgpt.data import permutation
from tiedgpt.text import Tokenizer
from tiedgpt.train.plan.values import Facts
from tiedgpt.train.step.loss import Arrays

E = TypeVar("E")


@dataclass(frozen=True, kw_only=True)
class Data(Facts):
    """The rows to train on and to validate on, with the numbers that a plan depends on."""

    batches: Callable[[int, int], Callable[[int], Arrays]]
    """Function of (batch size, seed) that returns the batch of each step, from 0.

    It must be pure, otherwise a run cannot resume.
    """
    held_out: Callable[[int, int | None], Iterable[Arrays]]
    """Function of (batch size, number of batches) that returns held-out batches; None: all."""
    tokenizer: Tokenizer | None = None
    counts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Tables of run.toml with the sizes of the data."""
    description: dict[str, str] = field(default_factory=dict)
    """Sentences about the data by a short name."""
    new_ids: tuple[int, ...] = ()
    """Tokens that the model to start from does not have."""
    notes: Sequence[str] = ()
    """Facts about the data that the user should know."""

    @functools.cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Number of UTF-8 bytes of each token, (V,)."""
        assert self.tokenizer is not None
        return self.tokenizer.byte_lengths()


class Rows(ABC):
    """Encoded data, which are cut when the context is known."""

    def facts(self, context: int) -> Facts:
        """Return the facts about the rows of a context, which may be longer than the text."""
        return self.at(context)

    @abstractmethod
    def at(self, context: int) -> Data:
        """Return the rows of a context; raise `UserError` for too little data."""


class Sources(ABC):
    """The data of a run before they are encoded."""

    tokenizer: Tokenizer | None = None
    """The tokenizer that the data require, if any."""
    adds_tokens: bool = False
    """Whether the model gets rows for tokens that only this tokenizer has."""
    n_characters: int | None = None
    """Approximate length of texts, which decides the size of their vocabulary."""
    memorizes: bool = False
    """Whether the examples are so few that they are memorized, because none is held out."""

    @abstractmethod
    def digest(self) -> str:
        """Return a sha256 of all data, which detects changed data."""

    def texts(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the training texts, and all texts, to train a tokenizer on."""
        return (), ()

    def encode(self, tokenizer: Tokenizer, directory: Path) -> Iterator[tuple[int, int]]:
        """Write the texts as tokens, if they are not in memory; yield (characters, their total)."""
        yield from ()

    @abstractmethod
    def rows(self, tokenizer: Tokenizer, directory: Path) -> Rows:
        """Return the encoded data; `directory` is that of `encode`."""


def example_data(
    train: Sequence[E],
    held_out: Sequence[E],
    collate: Callable[[Sequence[E]], Arrays],
    **facts: Any,
) -> Data:
    """Return examples as data: an epoch visits each training example once, in a new order.

    `collate` makes a batch of some examples. `facts` are other fields of `Data`.
    """
    n = len(train)

    def batches(batch_size: int, seed: int) -> Callable[[int], Arrays]:
        order = functools.lru_cache(2)(lambda epoch: permutation(n, seed=seed, epoch=epoch))

        def batch(step: int) -> Arrays:
            first = step * batch_size
            places = (divmod(row, n) for row in range(first, first + batch_size))
            return collate([train[order(epoch)[i]] for epoch, i in places])

        return batch

    def read_held_out(batch_size: int, n_batches: int | None) -> Iterable[Arrays]:
        n_rows = len(held_out) if n_batches is None else n_batches * batch_size
        chosen = held_out[:n_rows]
        for at in range(0, len(chosen), batch_size):
            yield collate(chosen[at : at + batch_size])

    return Data(
        batches=batches,
        held_out=read_held_out,
        epoch_rows=n,
        held_out_rows=float(len(held_out)),
        n_examples=n,
        n_held_out=len(held_out),
        **facts,
    )
