"""Loss of texts: nats per token, perplexity and bits per byte, by windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import Interval, ratio_interval
from tiedgpt.infer import Engine
from tiedgpt.infer.prompts import start_id
from tiedgpt.signatures import checked
from tiedgpt.text import Tokenizer

MIN_DOCUMENTS = 3
"""Minimum number of documents for an interval: from two, it has 12.7 standard errors a side."""
STRETCHES = 5
"""Number of stretches of one text: few, so that they are nearly independent (batch means)."""
CONTEXTS_A_STRETCH, TOKENS_A_STRETCH = 12, 1024
"""Minimum length of a stretch, in contexts and in tokens."""


@dataclass(frozen=True)
class Windows:
    """Sliding windows over a text, as in transformers' guide to perplexity.

    Each window begins `stride` tokens after the previous one. A token is scored in the first window
    that contains it, with at least context - stride tokens before it after the first window. If the
    stride equals the context, the first token of each window is not scored.
    """

    context: int
    """Number of tokens in a window."""
    stride: int
    bos: bool
    """Whether a beginning-of-text token is read first, so that the first token is scored, too.

    It always is if the tokenizer begins texts with one (`begin_ids`)."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        context: int | None = None,
        stride: int | None = None,
        bos: bool = False,
    ) -> Windows:
        """Check the sizes; the default is the model's context, with half of it as the stride."""
        most = engine.runner.config.n_positions
        context = most if context is None else context
        stride = max(1, context // 2) if stride is None else stride
        if not 2 <= context <= most:
            raise UserError(
                f"must be from 2 to the model's {most}, got {context}", option="context"
            )
        if not 1 <= stride <= context:
            raise UserError(
                f"must be from 1 to the context's {context}, got {stride}", option="stride"
            )
        if engine.tokenizer is not None and engine.tokenizer.begin_ids:
            bos = True
        elif bos:
            start_id(engine.runner.config)
        return cls(context, stride, bos)

    def cut(self, ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (context, targets) of each window."""
        first = 1
        for begin in range(0, len(ids), self.stride):
            end = min(begin + self.context, len(ids))
            first = max(first, begin + 1)
            if first < end:
                yield ids[begin:first], ids[first:end]
            first = end
            if end == len(ids):
                return


@dataclass(frozen=True)
class WindowScore:
    """Loss of the tokens of one window."""

    nats: float
    tokens: int
    n_bytes: int
    """Number of UTF-8 bytes of the scored tokens."""
    document: int
    """Index of the text."""


class Groups(NamedTuple):
    """Independent parts of the scored text; empty if they are too few."""

    nats: Sequence[float]
    tokens: Sequence[float]
    basis: str
    """Description of the groups, or the reason for none."""


@dataclass(frozen=True)
class TextScore:
    """Loss of one text or several."""

    windows: Windows
    scores: Sequence[WindowScore]

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return sum(score.tokens for score in self.scores)

    @property
    def nats(self) -> float:
        """Mean cross-entropy per token."""
        return math.fsum(score.nats for score in self.scores) / self.tokens

    @cached_property
    def groups(self) -> Groups:
        """The documents, or stretches of one long text."""
        numbers = np.array([score.document for score in self.scores])
        n, tokens = len(np.unique(numbers)), np.array([score.tokens for score in self.scores])
        least = max(CONTEXTS_A_STRETCH * self.windows.context, TOKENS_A_STRETCH)
        if n > 1:
            basis = f"{n:,} documents"
            if n < MIN_DOCUMENTS:
                return Groups((), (), f"{basis}: an interval needs {MIN_DOCUMENTS}")
        elif self.tokens < STRETCHES * least:
            needed = f"an interval needs {STRETCHES * least:,}, or {MIN_DOCUMENTS} documents"
            return Groups((), (), f"one text of {self.tokens:,} tokens: {needed}")
        else:
            numbers = STRETCHES * (np.cumsum(tokens) - tokens) // self.tokens
            length = self.tokens // STRETCHES
            basis = f"{STRETCHES} stretches of one text, {length:,} tokens each"
        _, indices = np.unique(numbers, return_inverse=True)
        nats = np.bincount(indices, [score.nats for score in self.scores])
        return Groups(nats.tolist(), np.bincount(indices, tokens).tolist(), basis)

    @property
    def interval(self) -> Interval:
        """95 % interval of `nats` over `groups`; nan for too few groups."""
        low, high = ratio_interval(self.groups.nats, self.groups.tokens)
        return (low if math.isnan(low) else max(0.0, low)), high

    @property
    def perplexity(self) -> float:
        """The exponential of `nats`. It depends on the tokenizer; `bits_per_byte` does not."""
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of the text."""
        n_bytes = sum(score.n_bytes for score in self.scores)
        return self.nats * self.tokens / math.log(2) / max(1, n_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with null for a missing interval."""
        interval = None if math.isnan(self.interval[0]) else self.interval
        return {
            "nats": self.nats,
            "nats_interval": interval,
            "perplexity": self.perplexity,
            "perplexity_interval": interval and [math.exp(nats) for nats in interval],
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "interval_basis": self.groups.basis,
            "windows": len(self.scores),
            **asdict(self.windows),
        }


@checked
def score_text(
    engine: Engine,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    bos: bool = False,
) -> TextScore:
    """Score a text with an engine; see `Windows` for the options.

    Raises `UserError` for a text without a predicted token.
    """
    windows = Windows.of(engine, context, stride, bos)
    return TextScore(windows, list(score_windows(engine, [text], windows)))


def score_windows(engine: Engine, texts: Iterable[str], windows: Windows) -> Iterator[WindowScore]:
    """Yield the score of each window of each text."""
    tokenizer = require_tokenizer(engine)
    encode, byte_lengths = tokenizer.encode_document, tokenizer.byte_lengths()
    needs_start = windows.bos and not tokenizer.begin_ids
    beginning = [start_id(engine.runner.config)] if needs_start else []
    rows = (
        (number, *window)
        for number, text in enumerate(texts)
        for window in windows.cut([*beginning, *encode(text)])
    )
    is_empty = True
    while group := list(islice(rows, 2 * engine.n_slots)):
        numbers, contexts, targets = zip(*group, strict=True)
        scored = engine.score(targets, contexts)
        is_empty = False
        for number, ids, score in zip(numbers, targets, scored, strict=True):
            n_bytes = int(byte_lengths[ids].sum())
            yield WindowScore(-score.total, len(ids), n_bytes, number)
    if is_empty:
        raise UserError("the text is too short: it has no token that is predicted")


def require_tokenizer(engine: Engine) -> Tokenizer:
    """Return the engine's tokenizer; raise `UserError` if it is missing."""
    if engine.tokenizer is None:
        raise UserError("a text needs a tokenizer, and there is none with the model (--tokenizer)")
    return engine.tokenizer
