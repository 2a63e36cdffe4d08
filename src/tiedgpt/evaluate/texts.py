"""How well a model predicts texts: nats a token, perplexity and bits per byte, by windows."""

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
from tiedgpt.text import Tokenizer

LEAST_DOCUMENTS = 3
"""From two, Student's t would say nothing: 12.7 standard errors to either side."""
STRETCHES = 5
"""Few and long, as neighbours must hardly depend on each other (the method of batch means)."""
CONTEXTS_A_STRETCH, TOKENS_A_STRETCH = 12, 1024
"""The least length of one, in contexts and in tokens."""


@dataclass(frozen=True)
class Windows:
    """How texts longer than the context are cut, as in transformers' guide to perplexity.

    Each window begins `stride` tokens after the one before, and a token is scored in the first
    window that holds it: past the first window, with at least context - stride tokens before it.
    Where stride is the context, the first token of each window is not scored.
    """

    context: int
    """Tokens in a window."""
    stride: int
    bos: bool
    """Whether a text begins with the model's beginning-of-text token, so that its first token is
    predicted, too; else it is only read."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        context: int | None = None,
        stride: int | None = None,
        bos: bool = False,
    ) -> Windows:
        """Check what is asked for; by default the whole context, and half of it as the stride."""
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
        if bos:
            start_id(engine.runner.config)
        return cls(context, stride, bos)

    def cut(self, ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the ids that each window reads and those that it scores."""
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
    """UTF-8 bytes of the text that the scored tokens stand for."""
    document: int
    """The number of the text, from 0."""


class Groups(NamedTuple):
    """Parts of what was scored that are taken as independent samples; none if they are too few."""

    nats: Sequence[float]
    tokens: Sequence[float]
    basis: str
    """What the groups are, or why there are none."""


@dataclass(frozen=True)
class TextScore:
    """Loss of one text or several."""

    windows: Windows
    scores: Sequence[WindowScore]

    @property
    def tokens(self) -> int:
        """Tokens that were scored."""
        return sum(score.tokens for score in self.scores)

    @property
    def nats(self) -> float:
        """Mean cross-entropy a token."""
        return math.fsum(score.nats for score in self.scores) / self.tokens

    @cached_property
    def groups(self) -> Groups:
        """The documents; of one long text, stretches that hardly depend on each other."""
        numbers = np.array([score.document for score in self.scores])
        n, tokens = len(np.unique(numbers)), np.array([score.tokens for score in self.scores])
        least = max(CONTEXTS_A_STRETCH * self.windows.context, TOKENS_A_STRETCH)
        if n > 1:
            basis = f"{n:,} documents"
            if n < LEAST_DOCUMENTS:
                return Groups((), (), f"{basis}: an interval needs {LEAST_DOCUMENTS}")
        elif self.tokens < STRETCHES * least:
            needed = f"an interval needs {STRETCHES * least:,}, or {LEAST_DOCUMENTS} documents"
            return Groups((), (), f"one text of {self.tokens:,} tokens: {needed}")
        else:
            numbers = STRETCHES * (np.cumsum(tokens) - tokens) // self.tokens
            each = self.tokens // STRETCHES
            basis = f"{STRETCHES} stretches of one text, {each:,} tokens each"
        _, places = np.unique(numbers, return_inverse=True)
        nats = np.bincount(places, [score.nats for score in self.scores])
        return Groups(nats.tolist(), np.bincount(places, tokens).tolist(), basis)

    @property
    def interval(self) -> Interval:
        """95 % interval of `nats` over `groups`; nan where there are too few of them."""
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
        """Return all of it as plain data; what is not known is null."""
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


def score_text(
    engine: Engine,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    bos: bool = False,
) -> TextScore:
    """Score a text with an engine; see `Windows` for the options.

    Raises `UserError` for a text of which no token is predicted.
    """
    windows = Windows.of(engine, context, stride, bos)
    return TextScore(windows, list(score_windows(engine, [text], windows)))


def score_windows(engine: Engine, texts: Iterable[str], windows: Windows) -> Iterator[WindowScore]:
    """Yield the score of each window of each text."""
    tokenizer = require_tokenizer(engine)
    encode, byte_lengths = tokenizer.encode, tokenizer.byte_lengths()
    beginning = [start_id(engine.runner.config)] if windows.bos else []
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
    """Return the engine's tokenizer; raise `UserError` where it has none."""
    if engine.tokenizer is None:
        raise UserError("a text needs a tokenizer, and there is none with the model (--tokenizer)")
    return engine.tokenizer
