"""What may be asked of a generation, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from tiedgpt.errors import UserError
from tiedgpt.infer.sampling import Processor, Sampling
from tiedgpt.infer.stopping import StopWatch

ContextEnd = Literal["stop", "slide"]
MAX_DRAFT = 64


class Options(TypedDict, total=False):
    """The keywords of `Engine.generate` and `Engine.stream`; `Request` says what they mean."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str | Sequence[int]]
    processors: Sequence[Processor]
    seed: int | None
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    context_end: ContextEnd
    top_logprobs: int
    prompt_logprobs: bool | int
    speculate: Literal["ngram"] | None
    draft_tokens: int


@dataclass(frozen=True, kw_only=True)
class Request(Sampling):
    """How a prompt is continued; impossible values raise `UserError`, naming the field."""

    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    seed: int | None = None
    """The same seed draws the same text; None draws anew each time."""
    stop: str | Sequence[str] = ()
    """The text ends before the first of these strings."""
    stop_ids: Sequence[int] = ()
    """The text ends with the first of these ids, as with the end-of-text token."""
    context_end: ContextEnd = "stop"
    """When the context is full: stop, or slide on from the later half of what was seen."""
    top_logprobs: int = 0
    """For each new token, tell that many of the likeliest, with their log P."""
    prompt_logprobs: bool | int = False
    """Tell log P of each token of the prompt after the first; a number: the likeliest as well."""
    speculate: Literal["ngram"] | None = None
    """Draft what followed the same tokens before, and check it in one step: the same text, sooner
    where text repeats itself or its prompt."""
    draft_tokens: int = 10
    """Tokens that are drafted at the most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("max_new_tokens", self.max_new_tokens)
        if self.context_end not in ("stop", "slide"):
            raise UserError(f"context_end={self.context_end!r} is neither 'stop' nor 'slide'")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise UserError(f"seed={self.seed!r} is not a whole number from 0 to 2^63 - 1")
        StopWatch(self.stops)
        if isinstance(self.stop_ids, int) or not all(
            type(token) is int and token >= 0 for token in self.stop_ids
        ):
            raise UserError(f"stop_ids={self.stop_ids!r} is no list of ids")
        if type(self.top_logprobs) is not int or self.top_logprobs < 0:
            raise UserError(f"top_logprobs={self.top_logprobs!r} is not a whole number from 0")
        if type(self.prompt_logprobs) not in (bool, int) or self.prompt_logprobs < 0:
            raise UserError(f"prompt_logprobs={self.prompt_logprobs!r} is neither a bool nor k")
        if self.speculate not in (None, "ngram"):
            raise UserError(f"speculate={self.speculate!r} is neither None nor 'ngram'")
        require_positive("draft_tokens", self.draft_tokens)
        if self.draft_tokens > MAX_DRAFT:
            raise UserError(f"draft_tokens={self.draft_tokens!r} is above {MAX_DRAFT}")

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether the prompt's own tokens are scored."""
        return self.prompt_logprobs is not False

    @property
    def prompt_top(self) -> int:
        """How many of the likeliest tokens are told at each token of the prompt."""
        return 0 if isinstance(self.prompt_logprobs, bool) else self.prompt_logprobs


def require_positive(name: str, value: object) -> None:
    """Raise `UserError` unless the value is a positive whole number."""
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r} is not a positive whole number")
