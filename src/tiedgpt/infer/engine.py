"""Prompts in, completions out.

Each prompt is prefilled alone into its own part of a key/value cache; then all are decoded
together, one token a step, only the last position's logits computed. A sequence that ends leaves
the batch.
"""

from __future__ import annotations

import copy
import functools
import operator
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from tiedgpt.core.cache import KVCache
from tiedgpt.core.model import GPT
from tiedgpt.errors import CorruptInputError, UserError
from tiedgpt.infer.request import Options, Request, require_positive
from tiedgpt.infer.stopping import StopWatch
from tiedgpt.text import StreamDecoder, Tokenizer
from tiedgpt.weights.load import load

PRECISIONS = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_PADDING = 1024
"""Rows that a vocabulary is padded by, at the most, to a round number."""
FinishReason = Literal["stop", "length", "context"]
Prompt = str | Sequence[int]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Completion:
    """What came after one prompt."""

    ids: list[int]
    """The new tokens."""
    text: str
    """Their text, without a stop string; empty where there is no tokenizer."""
    finish_reason: FinishReason
    """stop: the end of the text or a stop string; length: `max_new_tokens`; context: it is full."""
    logprobs: list[float]
    """log P of each new token under the model itself (before temperature and filters)."""
    dropped: int = 0
    """Tokens at the start that the model no longer saw at the end, its context having slid."""


@dataclass
class _Sequence:
    """One prompt's progress."""

    ids: list[int]
    n_prompt: int
    generator: torch.Generator
    watch: StopWatch
    decoder: StreamDecoder | None
    start: int = 0  # the first token that the model sees
    text: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.n_prompt :]

    def completion(self) -> Completion:
        reason = self.finish_reason or "length"
        return Completion(self.new_ids, "".join(self.text), reason, self.logprobs, self.start)


def _computing(compute: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Compute without gradients and dropout, and leave every module in the mode it was in.

    Nothing is yielded inside: between the pieces of a stream the model is as its owner left it.
    """

    @functools.wraps(compute)
    def wrapped(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        training = [module for module in engine.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                return compute(engine, *args, **kwargs)
        finally:
            for module in training:
                module.training = True

    return wrapped


class Engine:
    """Generates with a model and, for text, its tokenizer.

    `precision`: "auto" is the model's own; "fp32", "bf16" and "fp16" convert (a model that was
    given is copied, not changed). A source is put on the GPU where there is one; `resolve` and
    `config` (such as n_head) say what its file does not, as in `GPT.from_pretrained`.
    """

    def __init__(
        self,
        model_or_source: GPT | str | os.PathLike[str],
        precision: str = "auto",
        *,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        resolve: str | None = None,
        **config: Any,
    ) -> None:
        if precision not in PRECISIONS:
            raise UserError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
        dtype = PRECISIONS[precision]
        if isinstance(tokenizer, (str, os.PathLike)):
            tokenizer = Tokenizer.from_pretrained(os.fspath(tokenizer))
        self.notes: tuple[str, ...] = ()  # what loading has to tell: two equal matrices, tied
        if isinstance(model_or_source, GPT):
            if resolve is not None or config:
                raise UserError("resolve and config are for a source that is loaded")
            model = model_or_source
            if dtype not in (None, model.wte.weight.dtype):
                model = copy.deepcopy(model).to(dtype)
        else:
            loaded = load(model_or_source, dtype=dtype, resolve=resolve, **config)
            model, self.notes = loaded.model, loaded.notes
            model.to("cuda" if torch.cuda.is_available() else "cpu")
            tokenizer = tokenizer or _tokenizer_of(os.fspath(model_or_source))
        if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}"
                ": they do not belong together"
            )
        if tokenizer is not None and len(tokenizer) < model.config.vocab_size - MAX_PADDING:
            self.notes += (
                f"the tokenizer has {len(tokenizer):,} tokens and the model rows for "
                f"{model.config.vocab_size:,}: the others are never drawn",
            )
        self.model = model
        self.tokenizer = tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, *, batch_size: int = 8, **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[int], *, batch_size: int = 8, **options: Unpack[Options]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        batch_size: int = 8,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, batch_size: int = 8, **options: Unpack[Options]
    ) -> Completion | list[Completion]:
        """Complete one prompt (text or ids), or a list of them.

        Options, as in `Request`: max_new_tokens=128, temperature=1.0 (0: greedy), top_k, top_p,
        min_p, repetition_penalty=1.0, seed, stop, context_end="stop" or "slide".

        With a seed the draw for a prompt does not depend on the prompts beside it; the same prompt
        given again draws anew. An empty prompt starts from the beginning-of-text token. At the end
        of the context generation stops, or slides on; the completion says which. At most
        `batch_size` prompts are decoded at a time.
        """
        request = Request(**options)
        require_positive("batch_size", batch_size)
        if isinstance(prompts, str) or (len(prompts) and _is_id(prompts[0])):
            each, many = [cast(Prompt, prompts)], False
        else:
            each, many = list(cast(Sequence[Prompt], prompts)), True
        sequences = self._sequences(each, request)
        for first in range(0, len(sequences), batch_size):
            for _ in self._run(sequences[first : first + batch_size], request):
                pass
        completions = [sequence.completion() for sequence in sequences]
        return completions if many else completions[0]

    def stream(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> Generator[str, None, Completion]:
        """Yield the completion's text in pieces as it grows; return the whole `Completion`.

        Options as in `generate`. Pieces never split a character and never show the start of a
        stop string.
        """
        request = Request(**options)
        sequences = self._sequences([prompt], request)
        return self._stream(sequences, request)

    def _stream(
        self, sequences: list[_Sequence], request: Request
    ) -> Generator[str, None, Completion]:
        for _, piece in self._run(sequences, request):
            if piece:
                yield piece
        return sequences[0].completion()

    def _sequences(self, prompts: Sequence[Prompt], request: Request) -> list[_Sequence]:
        """Check all prompts before anything is computed."""
        if request.stops and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer")
        times_seen: dict[tuple[int, ...], int] = {}
        sequences = []
        for prompt in prompts:
            ids = self._ids(prompt)
            n_positions = self.model.config.n_positions
            if len(ids) > n_positions and request.context_end == "stop":
                raise UserError(
                    f"the prompt has {len(ids)} tokens and the model's context {n_positions}: "
                    "shorten it, or let the context slide"
                )
            copies = times_seen[tuple(ids)] = times_seen.get(tuple(ids), -1) + 1
            generator = torch.Generator(device=self.model.wte.weight.device)
            if request.seed is None:
                generator.seed()
            else:
                generator.manual_seed((request.seed + copies * 0x9E3779B97F4A7C15) % 2**63)
            decoder = self.tokenizer.stream(after=ids[-1]) if self.tokenizer else None
            sequences.append(_Sequence(ids, len(ids), generator, StopWatch(request.stops), decoder))
        return sequences

    def _ids(self, prompt: Prompt) -> list[int]:
        """Return the prompt's ids, checked against the vocabulary."""
        config = self.model.config
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError(
                    "a prompt of text needs a tokenizer, and there is none with the model: name "
                    "one (--tokenizer, or Engine(..., tokenizer=)), or give ids"
                )
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [operator.index(token) if _is_id(token) else token for token in prompt]
        if not ids:
            start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
            if start is None:
                raise UserError(
                    "the prompt is empty, and the model has no token to start from: give a text "
                    "(--prompt)"
                )
            ids = [start]
        for token in ids:
            if type(token) is not int or not 0 <= token < config.vocab_size:
                raise UserError(f"{token!r} is no id of a vocabulary of {config.vocab_size} tokens")
        return ids

    def _run(self, sequences: list[_Sequence], request: Request) -> Iterator[tuple[_Sequence, str]]:
        """Prefill each sequence, then decode all until each has ended; yield text as it comes."""
        n_positions = self.model.config.n_positions
        longest = max(len(sequence.ids) for sequence in sequences)
        capacity = min(n_positions, longest + request.max_new_tokens)
        filled = [self._prefill(sequence, capacity) for sequence in sequences]
        cache = KVCache.join([cache for cache, _ in filled])
        logits = torch.cat([last for _, last in filled])
        while sequences:
            for sequence, row in zip(sequences, logits, strict=True):
                yield sequence, self._take(sequence, row, request)
                full = len(sequence.ids) - sequence.start > n_positions
                if full and sequence.finish_reason is None and request.context_end == "stop":
                    sequence.finish_reason = "context"
                    yield sequence, self._finish(sequence)
            going = [i for i, s in enumerate(sequences) if s.finish_reason is None]
            if len(going) < len(sequences):
                sequences = [sequences[i] for i in going]
                cache = cache.rows(going)
            if not sequences:
                return
            cache, logits = self._decode(sequences, cache)

    @_computing
    def _prefill(self, sequence: _Sequence, capacity: int) -> tuple[KVCache, Tensor]:
        """Read what the model may see of a sequence; return its cache and last logits (1, V)."""
        n_positions = self.model.config.n_positions
        if len(sequence.ids) - sequence.start > n_positions:
            sequence.start = len(sequence.ids) - max(1, n_positions // 2)
        weight = self.model.wte.weight
        cache = KVCache.allocate(
            self.model.config,
            batch_size=1,
            capacity=capacity,
            dtype=weight.dtype,
            device=weight.device,
        )
        ids = torch.tensor([sequence.ids[sequence.start :]], device=weight.device)
        h = self.model.body(ids, cache)
        return cache, self.model.logits(h[:, -1])

    @_computing
    def _decode(self, sequences: list[_Sequence], cache: KVCache) -> tuple[KVCache, Tensor]:
        """Read each sequence's newest token; return the cache and the next logits (B, V)."""
        full = [row for row, length in enumerate(cache.lengths) if length >= cache.capacity]
        if full:  # positions are learned, so a window that slides is read anew
            parts = [cache.rows([row]) for row in range(len(sequences))]
            rows = []
            for row, sequence in enumerate(sequences):
                if row in full:
                    parts[row], last = self._prefill(sequence, cache.capacity)
                else:
                    last = self._step([sequence], parts[row])
                rows.append(last)
            return KVCache.join(parts), torch.cat(rows)
        return cache, self._step(sequences, cache)

    def _step(self, sequences: list[_Sequence], cache: KVCache) -> Tensor:
        newest = [[sequence.ids[-1]] for sequence in sequences]
        h = self.model.body(torch.tensor(newest, device=cache.keys.device), cache)
        return self.model.logits(h[:, -1])

    def _take(self, sequence: _Sequence, logits: Tensor, request: Request) -> str:
        """Choose the next token, note it, and return the text that it completes."""
        if self.tokenizer is not None:  # rows that stand for no token are never drawn
            logits = logits[: len(self.tokenizer)]
        token = request.choose(logits, sequence.ids, sequence.generator)
        sequence.logprobs.append(float(logits.float().log_softmax(0)[token]))
        sequence.ids.append(token)
        if token == self.model.config.eos_token_id:
            sequence.finish_reason = "stop"
            return self._finish(sequence)
        piece = sequence.watch.push(sequence.decoder.push(token)) if sequence.decoder else ""
        sequence.text.append(piece)
        if sequence.watch.stopped:
            sequence.finish_reason = "stop"
        elif len(sequence.new_ids) >= request.max_new_tokens:
            sequence.finish_reason = "length"
            return piece + self._finish(sequence)
        return piece

    def _finish(self, sequence: _Sequence) -> str:
        """Return the text that was held back, nothing more being to come."""
        if sequence.decoder is None:
            return ""
        rest = sequence.watch.push(sequence.decoder.finish()) + sequence.watch.finish()
        sequence.text.append(rest)
        return rest


def _tokenizer_of(source: str) -> Tokenizer | None:
    """Return the tokenizer beside a model; without one only ids can be continued."""
    try:
        return Tokenizer.from_pretrained(source)
    except CorruptInputError:
        raise
    except UserError:
        return None


def _is_id(value: object) -> bool:
    """Whether it is a whole number of any library's, and no bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)
