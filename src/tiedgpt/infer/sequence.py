"""One prompt and its text: how it is read, how tokens are chosen, when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer import filters
from tiedgpt.infer.filters import Array
from tiedgpt.infer.generation_config import NEUTRAL, UNIFORMS, GenerationConfig, Processor
from tiedgpt.infer.sampling import NextToken, SamplingInput, adjust_logits, check_ids
from tiedgpt.infer.slots import SCORED_AT_ONCE, Decoding, SlotPool, TokensToRun
from tiedgpt.text import Tokenizer

FinishReason = Literal["stop", "length", "context", "cancelled", "timeout", "error"]
Likeliest = list[tuple[int, float]]
"""(id, logprob) of the likeliest tokens, the likeliest first."""


@dataclass(frozen=True)
class Token:
    """A new token, emitted when its text is certain."""

    id: int
    text: str
    """Its part of the completion's text: the parts add up to the whole."""
    logprob: float
    """The model's own logprob, before penalties, temperature and filters."""
    top_logprobs: Likeliest
    """The likeliest tokens at this position, if `top_logprobs` asked for them."""
    offset: int
    """Start of its text in the completion's text, in characters."""
    finish_reason: FinishReason | None = None
    """Why the text ends; None before the last token."""
    prompt_logprobs: Sequence[float] = ()
    """On the first token: the logprob of each token of the prompt after its first, if asked for."""
    prompt_top_logprobs: Sequence[Likeliest] = ()
    """For each of these, the likeliest tokens."""
    stop_reason: str | int | None = None
    """On the last token: as in `Completion`."""


@dataclass(frozen=True)
class Completion:
    """The text after one prompt."""

    ids: list[int]
    """The new tokens."""
    text: str
    """Their text, without the stop string; empty without a tokenizer."""
    finish_reason: FinishReason
    """stop: the end-of-text token, a stop string or a stop id; length: `max_new_tokens`; context:
    the context is full; timeout; cancelled; error: see `error`."""
    logprobs: list[float]
    """The model's own logprob of each new token, before penalties, temperature and filters."""
    dropped: int = 0
    """How many tokens at the start the model no longer saw at the end, as its context slid."""
    top_logprobs: list[Likeliest] = field(default_factory=list)
    """For each new token, the likeliest tokens, if they were asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Logprob of each token of the prompt after the first, if it was asked for."""
    prompt_top_logprobs: list[Likeliest] = field(default_factory=list)
    """For each of these, the likeliest tokens."""
    error: Exception | None = None
    """Why the request failed, in a list of completions."""
    stop_reason: str | int | None = None
    """The stop string or the stop id that ended the text; None for any other end."""
    cached_tokens: int = field(default=0, compare=False)
    """Number of the prompt's tokens that a slot already held, so that they were not run."""

    @property
    def mean_logprob(self) -> float:
        """The mean of `logprobs`."""
        return sum(self.logprobs) / max(1, len(self.logprobs))


class Piece(NamedTuple):
    """The part of the text that belongs to a token."""

    at: int
    """The number of the token among the new ones, from 0."""
    text: str
    offset: int
    """Start of the part in the text, in characters."""


class Detokenizer:
    """The text of a sequence's new tokens.

    The text ends where the earliest match of any of the `stops` begins, however tokens divide it.
    With `include_stop` it ends where the match does. A match within `min_tokens` tokens is text.
    A character is certain once it is complete and no stop string can begin at it or before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        after: int,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop: str | None = None
        """The stop string that ends the text."""
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._decoder = None if tokenizer is None else tokenizer.stream(after=after)
        self._stops = tuple(stops)
        self._decoded = ""  # with text that a stop string cuts off, or may cut off
        self._n_certain = 0
        self._n_ignored = 0  # a stop string that is complete within so much of the text is text
        self._ends = list[int]()  # of each token, its end in the decoded text
        self._n_released = 0

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string ends the text."""
        return self.stop is not None

    @property
    def text(self) -> str:
        """The part of the text that is certain; all of it, once it is finished."""
        return self._decoded[: self._n_certain]

    def push(self, token: int | None) -> None:
        """Add a token; None is one without text, such as end-of-text."""
        if token is not None and self._decoder is not None:
            self._decoded += self._decoder.push(token)
        self._ends.append(len(self._decoded))
        if len(self._ends) <= self._min_tokens:
            self._n_ignored = len(self._decoded)
        n_open = max((self._open_length(stop) for stop in self._stops), default=0)
        self._settle(len(self._decoded) - n_open)

    def finish(self) -> None:
        """End the text: part of a character becomes U+FFFD, part of a stop string is text."""
        if self._decoder is not None and self._n_released < len(self._ends):
            self._decoded += self._decoder.finish()
            self._ends[-1] = len(self._decoded)
        self._settle(len(self._decoded))

    def release(self, *, is_last: bool = False) -> Iterator[Piece]:
        """Yield each token, once, whose text is certain; with `is_last` all that are left."""
        while self._n_released < len(self._ends):
            at = self._n_released
            begin, end = self._ends[at - 1] if at else 0, self._ends[at]
            is_unfinished = end == begin and at == len(self._ends) - 1 and self._decoder is not None
            if not is_last and (end > self._n_certain or is_unfinished):
                return
            self._n_released += 1
            piece = self._decoded[begin : min(end, self._n_certain)]
            yield Piece(at, piece, min(begin, self._n_certain))

    def _settle(self, certain: int) -> None:
        """Make the text certain up to `certain`, or to a complete stop string before that."""
        if self.has_stopped:
            return
        matches = list[tuple[int, int, str]]()
        for stop in self._stops:
            start = max(self._n_certain, self._n_ignored - len(stop) + 1)
            if (at := self._decoded.find(stop, start)) >= 0:
                matches.append((at, len(stop), stop))
        first, length, stop = min(matches, default=(certain + 1, 0, ""))
        if first <= certain:
            self.stop = stop
            certain = first + length if self._include_stop else first
        self._n_certain = certain

    def _open_length(self, stop: str) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        most = min(len(stop) - 1, len(self._decoded) - self._n_certain)
        lengths = range(most, 0, -1)
        return next((n for n in lengths if stop.startswith(self._decoded[-n:])), 0)


class SequenceState:
    """A prompt's ids and text as they grow.

    `copies` distinguishes equal prompts under the same seed: each draws its own text. `emit` is
    called with each new token when its text is certain.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        *,
        model: GPTConfig,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] = (),
        processors: Sequence[Processor] = (),
        copies: int = 0,
        emit: Callable[[Token], None] | None = None,
    ) -> None:
        if config.stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer")
        check_ids(config, model.vocab_size)
        self.config = config
        self.ids = list(prompt)
        self.n_prompt = len(prompt)
        self.start = 0
        """The first token that the model sees."""
        self.n_tokens = model.vocab_size if tokenizer is None else len(tokenizer)
        self.finish_reason: FinishReason | None = None
        self.emit = emit
        self.logprobs: list[float] = []
        self.top_logprobs: list[Likeliest] = []
        self.prompt_logprobs: list[float] = []
        self.prompt_top_logprobs: list[Likeliest] = []
        self.cached_tokens = 0
        """Number of the prompt's tokens that its slot held."""
        model_ends = {model.eos_token_id, *end_ids}
        self.ends = {*(() if config.ignore_eos else model_ends), *config.stop_ids}
        visible = set(config.stop_ids if config.include_stop else ())
        self._hidden = (self.ends - visible) | model_ends
        if config.skip_special_tokens and tokenizer is not None:
            self._hidden |= tokenizer.special_ids
        self._stop_ids = self.ends if config.ignore_eos else self.ends - model_ends
        suppress = (self._suppress_ends,) if config.min_new_tokens else ()
        self._processors = (*config.processors, *processors, *suppress)
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt[-1],
            config.stop,
            include_stop=config.include_stop,
            min_tokens=config.min_new_tokens,
        )
        ends = {*model_ends, *self.ends} - {None}
        self._spared = {*ends, *_line_break(tokenizer)} if config.xtc_probability else set()
        seeds = None if config.seed is None else [config.seed, copies]
        self._generator = np.random.Generator(np.random.PCG64(seeds))

    @property
    def new_ids(self) -> list[int]:
        """The generated tokens."""
        return self.ids[self.n_prompt :]

    def adjust(self, ids: Sequence[int], logits: Array) -> Array:
        """Return the logits (V,) after `ids` with processors, biases and penalties applied."""
        return adjust_logits(self.config, self._process(ids, logits), ids, self.n_prompt)

    def sampling_input(self, logits: Array) -> SamplingInput:
        """Return everything that sampling the next token from logits (V,) depends on."""
        processed, config = self._process(self.ids, logits), self.config
        return SamplingInput(
            config,
            processed,
            self.ids,
            self.n_prompt,
            self.n_tokens,
            uniform=0.0 if config.greedy else self._generator.random(),
            uniforms={
                name: self._generator.random()
                for option, name in UNIFORMS.items()
                if config.numbers[option] != NEUTRAL[option]
            },
            spared=self._spared,
            model_logits=logits if self._processors else None,
        )

    def _process(self, ids: Sequence[int], logits: Array) -> Array:
        """Return logits (V,) after the processors, which may change their argument."""
        processed = logits.copy() if self.config.processors else logits
        for process in self._processors:
            processed = np.asarray(process(ids, self.n_prompt, processed), np.float32)
        if processed.shape != logits.shape:
            raise UserError(f"a processor must return logits {logits.shape}, got {processed.shape}")
        return processed

    def _suppress_ends(self, ids: Sequence[int], n_prompt: int, logits: Array) -> Array:
        """Return logits (V,) that exclude the ends of the text until it is long enough."""
        if len(ids) - n_prompt >= self.config.min_new_tokens:
            return logits
        logits = logits.copy()
        logits[[end for end in self.ends if end is not None and end < len(logits)]] = -np.inf
        return logits

    def append(
        self, next: NextToken, logits: Array | None = None, *, is_full: bool = False
    ) -> None:
        """Append a token that was sampled from logits (V,), the context's last if `is_full`."""
        token, logprob = next
        if (n := self.config.top_logprobs) and logits is not None:
            self.top_logprobs.append(filters.likeliest(logits, n, self.n_tokens))
        self.ids.append(token)
        self.logprobs.append(logprob)
        self._detokenizer.push(None if token in self._hidden else token)
        if token in self.ends or self._detokenizer.has_stopped:
            self.finish("stop")
        elif len(self.ids) - self.n_prompt >= self.config.max_new_tokens:
            self.finish("length")
        elif is_full:
            self.finish("context")
        elif self.emit is not None:
            self._emit()

    def _emit(self) -> None:
        """Emit the tokens whose text is certain."""
        if self.emit is None:
            return
        n_new = len(self.ids) - self.n_prompt
        for at, text, offset in self._detokenizer.release(is_last=self.finish_reason is not None):
            top = self.top_logprobs[at] if self.config.top_logprobs else []
            reason = self.finish_reason if at == n_new - 1 else None
            token, logprob = self.ids[self.n_prompt + at], self.logprobs[at]
            scores, tops = ([], []) if at else (self.prompt_logprobs, self.prompt_top_logprobs)
            stop_reason = None if reason is None else self.stop_reason
            self.emit(Token(token, text, logprob, top, offset, reason, scores, tops, stop_reason))

    def add_prompt_logprobs(self, at: int, logits: Array) -> None:
        """Add the logprobs of the prompt's tokens by logits (n, V) after its ids from `at` on."""
        for token, row in zip(self.ids[at + 1 : self.n_prompt], logits, strict=False):
            self.prompt_logprobs.append(float(row[token]) - filters.log_normalizer(row))
            if not isinstance(self.config.prompt_logprobs, bool) and self.config.prompt_logprobs:
                top = filters.likeliest(row, self.config.prompt_logprobs, self.n_tokens)
                self.prompt_top_logprobs.append(top)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop id that ended the text; None for any other end."""
        if self.finish_reason != "stop" or self._detokenizer.stop is not None:
            return self._detokenizer.stop
        return self.ids[-1] if self.ids[-1] in self._stop_ids else None

    def slide(self, capacity: int) -> None:
        """Drop the older half of the context."""
        self.start = len(self.ids) - max(1, capacity // 2)

    def finish(self, reason: FinishReason) -> None:
        """End the text; characters that were not certain are part of it, unless it has stopped."""
        if self.finish_reason is not None:
            return
        self._detokenizer.finish()
        has_ended = self._detokenizer.has_stopped and reason in ("length", "context")
        self.finish_reason = "stop" if has_ended else reason
        self._emit()

    def completion(self, error: Exception | None = None) -> Completion:
        """Return the text so far; it is complete when `finish_reason` is not None."""
        return Completion(
            self.new_ids, self._detokenizer.text, self.finish_reason or "length",
            self.logprobs, self.start, self.top_logprobs, self.prompt_logprobs,
            self.prompt_top_logprobs, error, self.stop_reason, self.cached_tokens,
        )  # fmt: skip


def _line_break(tokenizer: Tokenizer | None) -> list[int]:
    """Return the id of a line break, if a vocabulary has one."""
    with suppress(UserError):  # a character vocabulary may lack it
        if tokenizer is not None and "\n" in tokenizer.decode(ids := tokenizer.encode("\n")[-1:]):
            return ids
    return []


def decode(
    pool: SlotPool, slot_ids: Sequence[int], sequence: SequenceState
) -> Decoding[Completion]:
    """Run the prompt, then one sampled token after another, until the text ends.

    Position embeddings are absolute: a window that slides is run again from its first token.
    """
    config, session, (slot_id,) = sequence.config, pool.session, slot_ids
    capacity = session.capacity
    sequence.cached_tokens = session.lengths[slot_id]
    while sequence.finish_reason is None:
        if len(sequence.ids) - sequence.start > capacity:
            sequence.slide(capacity)
            pool.truncate(slot_id, 0)
        at = sequence.start + session.lengths[slot_id]
        ids = sequence.ids[at:]
        is_scored = config.prompt_logprobs is not False and not sequence.start
        if is_scored := is_scored and at < sequence.n_prompt:
            ids = ids[:SCORED_AT_ONCE]
        is_last = at + len(ids) == len(sequence.ids)
        (result,) = yield [TokensToRun(slot_id, ids, all_logits=is_scored, sample=is_last)]
        if is_scored:
            sequence.add_prompt_logprobs(at, result.logits)
        if result.next_token is not None:
            is_full = len(sequence.ids) - sequence.start == capacity
            is_full = is_full and config.context_end == "stop"
            sequence.append(result.next_token, result.logits[-1], is_full=is_full)
    return sequence.completion()
