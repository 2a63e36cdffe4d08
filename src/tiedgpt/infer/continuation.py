"""One prompt on its way to its completion: the tokens so far, their text, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import TiedGPTError, UserError
from tiedgpt.infer import filters
from tiedgpt.infer.filters import Array
from tiedgpt.infer.request import Request
from tiedgpt.infer.speculation import Drafter
from tiedgpt.infer.stopping import StopWatch
from tiedgpt.text import Tokenizer

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


@dataclass(frozen=True)
class Completion:
    """What came after one prompt."""

    ids: list[int]
    """The new tokens."""
    text: str
    """Their text, without a stop string; empty where there is no tokenizer."""
    finish_reason: FinishReason
    """stop: the end of the text, a stop string or a stop id; length: `max_new_tokens`; context: it
    is full; cancelled, error: as a scheduler was told, or found."""
    logprobs: list[float]
    """log P of each new token under the model itself (before temperature and filters)."""
    dropped: int = 0
    """Tokens at the start that the model no longer saw at the end, its context having slid."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token, the likeliest ones (id, log P), where they were asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """log P of each token of the prompt after the first, where it was asked for."""
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each of these, the likeliest ones."""


class Continuation:
    """A prompt that a scheduler continues; `ids` and `text` grow with each step.

    `copies` tells apart the draws for prompts that are the same, under the same seed.
    """

    def __init__(
        self,
        prompt: list[int],
        request: Request,
        *,
        config: GPTConfig,
        tokenizer: Tokenizer | None = None,
        copies: int = 0,
    ) -> None:
        if request.stops and tokenizer is None:
            raise UserError("stop strings need a tokenizer")
        n_tokens = config.vocab_size if tokenizer is None else len(tokenizer)
        if beyond := [token for token in request.stop_ids if token >= config.vocab_size]:
            raise UserError(
                f"stop_ids names {beyond[0]}, no id of a vocabulary of {config.vocab_size} tokens"
            )
        self.request = request.for_vocabulary(config.vocab_size, tokenizer)
        self.ids = list(prompt)
        self.n_prompt = len(prompt)
        self.start = 0
        """The first token that the model sees."""
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TiedGPTError | None = None
        self.drafter = Drafter(request.draft_tokens) if request.speculate else None
        self._ends = {config.eos_token_id, *request.stop_ids}
        self._n_tokens = n_tokens  # rows beyond stand for no token and are never drawn
        self._watch = StopWatch(request.stops)
        self._decoder = tokenizer.stream(after=prompt[-1]) if tokenizer else None
        seeds = None if request.seed is None else [request.seed, copies]
        self._generator = np.random.Generator(np.random.PCG64(seeds))
        self._text: list[str] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._of_prompt: list[float] = []
        self._top_of_prompt: list[list[tuple[int, float]]] = []

    @property
    def new_ids(self) -> list[int]:
        """What was generated."""
        return self.ids[self.n_prompt :]

    @property
    def n_left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_new_tokens - (len(self.ids) - self.n_prompt)

    def completion(self) -> Completion:
        """Return what has come so far; all of it, once `finish_reason` is not None."""
        return Completion(
            self.new_ids,
            "".join(self._text),
            self.finish_reason or "length",
            list(self._logprobs),
            self.start,
            list(self._top),
            list(self._of_prompt),
            list(self._top_of_prompt),
        )

    def take(self, logits: Array) -> str:
        """Choose the next token by its scores (V,) and note it; return the text it completes."""
        logits = logits[: self._n_tokens]
        token = self.request.choose(logits, self.ids, self._generator, self.n_prompt)
        self._logprobs.append(float(logits[token]) - filters.log_normalizer(logits))
        if self.request.top_logprobs:
            self._top.append(filters.likeliest(logits, self.request.top_logprobs))
        self.ids.append(token)
        if token in self._ends:
            return self.finish("stop")
        piece = self._watch.push(self._decoder.push(token)) if self._decoder else ""
        self._text.append(piece)
        if self._watch.stopped:
            self.finish_reason = "stop"
        elif self.n_left <= 0:
            return piece + self.finish("length")
        return piece

    def note_prompt(self, at: int, logits: Array) -> None:
        """Score tokens of the prompt: logits (n, V) are those after its ids from `at` on."""
        for token, row in zip(self.ids[at + 1 : self.n_prompt], logits, strict=False):
            row = row[: max(self._n_tokens, token + 1)]
            self._of_prompt.append(float(row[token]) - filters.log_normalizer(row))
            if self.request.prompt_top:
                self._top_of_prompt.append(filters.likeliest(row, self.request.prompt_top))

    def finish(self, reason: FinishReason) -> str:
        """End; return the text that was held back, nothing more being to come."""
        self.finish_reason = reason
        if self._decoder is None:
            return ""
        rest = self._watch.push(self._decoder.finish()) + self._watch.finish()
        self._text.append(rest)
        return rest
