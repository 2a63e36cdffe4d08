"""How well a model predicts texts: nats a token, perplexity and bits per byte, by windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from tiedgpt.errors import UserError
from tiedgpt.evaluate.intervals import Interval, ratio_interval
from tiedgpt.infer import Engine
from tiedgpt.text import Tokenizer


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
            beginning_of(engine)
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
    """What the predictions of one window's tokens cost."""

    nats: float
    tokens: int
    n_bytes: int
    """UTF-8 bytes of the text that the scored tokens stand for."""


@dataclass(frozen=True)
class TextScore:
    """What the predictions of a text or several cost."""

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

    @property
    def interval(self) -> Interval:
        """95 % interval of `nats`, with windows as independent samples; nan of a single one."""
        return ratio_interval([s.nats for s in self.scores], [s.tokens for s in self.scores])

    @property
    def perplexity(self) -> float:
        """The exponential of `nats`. It depends on the tokenizer; `bits_per_byte` does not."""
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        """The cost in bits over the length in bytes."""
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


def score_windows(
    engine: Engine, texts: Iterable[str], windows: Windows, *, skip: int = 0
) -> Iterator[WindowScore]:
    """Yield the score of each window of each text, but for the first `skip`."""
    tokenizer = require_tokenizer(engine)
    encode, byte_lengths = tokenizer.encode, tokenizer.byte_lengths()
    beginning = [beginning_of(engine)] if windows.bos else []
    every = (window for text in texts for window in windows.cut([*beginning, *encode(text)]))
    some, found = islice(every, skip, None), skip > 0
    while group := list(islice(some, 2 * engine.slots)):
        contexts, targets = zip(*group, strict=True)
        for scored, ids in zip(engine.score(targets, contexts), targets, strict=True):
            found = True
            yield WindowScore(-scored.total, len(ids), int(byte_lengths[ids].sum()))
    if not found:
        raise UserError("the text is too short: it has no token that is predicted")


def require_tokenizer(engine: Engine) -> Tokenizer:
    """Return the engine's tokenizer; raise `UserError` where it has none."""
    if engine.tokenizer is None:
        raise UserError("a text needs a tokenizer, and there is none with the model (--tokenizer)")
    return engine.tokenizer


def beginning_of(engine: Engine) -> int:
    """Return the id that texts begin with; raise `UserError` where the model has none."""
    config = engine.runner.config
    beginning = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if beginning is None:
        raise UserError("the model has no token that texts begin with")
    return beginning
