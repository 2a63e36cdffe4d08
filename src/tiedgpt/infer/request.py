"""What may be asked of a generation, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from tiedgpt.errors import UserError
from tiedgpt.infer.sampling import Sampling

ContextEnd = Literal["stop", "slide"]


class Options(TypedDict, total=False):
    """The keywords of `Engine.generate` and `Engine.stream`; `Request` says what they mean."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    context_end: ContextEnd


@dataclass(frozen=True, kw_only=True)
class Request(Sampling):
    """How a prompt is continued; impossible values raise `UserError`, naming the field."""

    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    seed: int | None = None
    """The same seed draws the same text; None draws anew each time."""
    stop: str | Sequence[str] = ()
    """The text ends before the first of these strings."""
    context_end: ContextEnd = "stop"
    """When the context is full: stop, or slide on from the later half of what was seen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("max_new_tokens", self.max_new_tokens)
        if self.context_end not in ("stop", "slide"):
            raise UserError(f"context_end={self.context_end!r} is neither 'stop' nor 'slide'")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise UserError(f"seed={self.seed!r} is not a whole number from 0 to 2^63 - 1")

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def require_positive(name: str, value: object) -> None:
    """Raise `UserError` unless the value is a positive whole number."""
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r} is not a positive whole number")
