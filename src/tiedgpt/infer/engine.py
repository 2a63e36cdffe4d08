"""Prompts in, completions out.

An engine is a runner and a tokenizer. Prompts become sequences of a `Scheduler`, which decodes them
together, one token a step, only the last position's logits computed; a sequence that ends leaves
its slot to the next. Searches, such as that for the likeliest text, go side by side as well, each
in slots of its own. No torch is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from tiedgpt.errors import UserError
from tiedgpt.infer.continuation import Completion, Continuation
from tiedgpt.infer.joint import Search, streamed, together
from tiedgpt.infer.opening import How, runner_for
from tiedgpt.infer.prompts import Prompt, one_or_many, prompt_ids
from tiedgpt.infer.request import Request, require_positive
from tiedgpt.infer.scheduler import Scheduler
from tiedgpt.infer.scoring import Scored, score_ids
from tiedgpt.infer.searching import search_for
from tiedgpt.infer.strategy import SearchOptions, Strategy, split
from tiedgpt.infer.threads import check_threads
from tiedgpt.text import Tokenizer

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT


class Engine:
    """Generates with a model and, for text, its tokenizer.

    `precision`: "auto" is the model's own; "fp32", "bf16", "fp16", "int8" and "int4" convert (a
    model that was given is copied, not changed). A source is put on the GPU where there is one;
    `resolve` and `config` (such as n_head) say what its file does not, as in `GPT.from_pretrained`.

    `backend`: "torch", or "kernels", our own for CPUs, over weights packed for them; they compute
    int8 and int4, too, and take some ten seconds to be compiled the first time. "auto" takes them
    for packed directories, for int8 and int4, and on a CPU for a source of 5 million parameters or
    more; torch else.

    `threads` that compute: by default, kernels take the cores that this process may use, at most
    16, and torch what it is set to. torch's number is the process's: it is set while the engine
    reads, and put back.
    """

    def __init__(
        self,
        model_or_source: GPT | str | os.PathLike[str],
        precision: str = "auto",
        *,
        backend: str = "auto",
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        resolve: str | None = None,
        threads: int | None = None,
        **config: Any,
    ) -> None:
        how = How(precision, backend, None if threads is None else check_threads(threads))
        opened = runner_for(model_or_source, how, tokenizer, resolve, config)
        self.runner, self.tokenizer, self.notes = opened

    @property
    def model(self) -> GPT:
        """The model, where torch computes it."""
        model = getattr(self.runner, "model", None)
        if model is None:
            raise UserError(f"{type(self.runner).__name__} has no torch model")
        return cast("GPT", model)

    @property
    def backend(self) -> str:
        """What computes: "torch" or "kernels"."""
        return "torch" if hasattr(self.runner, "model") else "kernels"

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, *, batch_size: int = 8, **options: Unpack[SearchOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[int], *, batch_size: int = 8, **options: Unpack[SearchOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        batch_size: int = 8,
        **options: Unpack[SearchOptions],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        batch_size: int = 8,
        **options: Unpack[SearchOptions],
    ) -> Completion | list[Completion]:
        """Complete one prompt (text or ids), or a list of them.

        Options, as in `Request`: max_new_tokens=128, temperature=1.0 (0: greedy), top_k, top_p,
        min_p, typical_p, repetition_penalty=1.0, presence_penalty, frequency_penalty, logit_bias,
        bad_words, seed, stop, stop_ids, context_end="stop" or "slide", top_logprobs,
        prompt_logprobs, speculate="ngram"; and, as in `Strategy`, num_beams with length_penalty and
        early_stopping, best_of, guidance_scale with negative_prompt, and
        one of regex, json_schema and grammar.

        With a seed the draw for a prompt does not depend on the prompts beside it; the same prompt
        given again draws anew. An empty prompt starts from the beginning-of-text token. At the end
        of the context generation stops, or slides on; the completion says which. At most
        `batch_size` sequences are decoded at a time, of which a search takes several: its beams
        or samples, and as many again under guidance; at least one search runs.
        """
        strategy, request = self._asked(options)
        require_positive("batch_size", batch_size)
        each, many = one_or_many(prompts)
        if not each:
            return []
        if strategy.searches:
            searches = self._searches(each, strategy, request)
            completions = together(self.runner, searches, batch_size=batch_size)
        else:
            scheduler, sequences = self._scheduled(each, request, batch_size)
            for _ in _run(scheduler):
                pass
            completions = [sequence.completion() for sequence in sequences]
        return completions if many else completions[0]

    def stream(
        self, prompt: Prompt, **options: Unpack[SearchOptions]
    ) -> Generator[str, None, Completion]:
        """Yield the completion's text in pieces as it grows; return the whole `Completion`.

        Options as in `generate`, without num_beams and best_of. Pieces never split a character and
        never show the start of a stop string. Between pieces the model is as its owner left it.
        """
        strategy, request = self._asked(options)
        strategy.require_streamable()
        if strategy.searches:
            return streamed(self.runner, self._searches([prompt], strategy, request)[0])
        scheduler, (sequence,) = self._scheduled([prompt], request, 1)
        return _streamed(scheduler, sequence)

    @overload
    def score(self, texts: str | Sequence[int]) -> Scored: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, texts: Sequence[str] | Sequence[Sequence[int]]) -> list[Scored]: ...

    def score(self, texts: Prompt | Sequence[Prompt]) -> Scored | list[Scored]:
        """Return log P of each token of a text (or ids) after the first; a list gives a list.

        A text longer than the context is read in windows of the whole context, each begun half a
        window after the last, so that past the first window every token is predicted from at least
        half a context. To have the first token predicted, begin with the beginning-of-text id.
        """
        each, many = one_or_many(texts)
        known = [self._ids(text) for text in each]
        capacity = min(self.runner.config.n_positions, max(map(len, known), default=1))
        session = self.runner.session(slots=1, capacity=capacity)
        scored = [score_ids(session, ids) for ids in known]
        return scored if many else scored[0]

    def _asked(self, options: SearchOptions) -> tuple[Strategy, Request]:
        """Check the options; return the strategy, and the request with its constraint."""
        strategy, request = split(options)
        return strategy, strategy.constrained(request, self.tokenizer, self.runner.config)

    def _searches(
        self, prompts: Sequence[Prompt], strategy: Strategy, request: Request
    ) -> list[Search[Completion]]:
        """Check all prompts before anything is computed; return a search for each."""
        negative = strategy.negative_prompt
        return [
            search_for(
                ids,
                strategy,
                request,
                config=self.runner.config,
                tokenizer=self.tokenizer,
                negative=None if negative is None else self._ids(negative),
                copies=copies,
            )
            for ids, copies in self._known(prompts)
        ]

    def _ids(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self.runner.config, self.tokenizer)

    def _known(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], int]]:
        """Return the ids of each prompt, and how many equal ones were before it."""
        copies: dict[tuple[int, ...], int] = {}
        known = []
        for ids in map(self._ids, prompts):
            n = copies[tuple(ids)] = copies.get(tuple(ids), -1) + 1
            known.append((ids, n))
        return known

    def _scheduled(
        self, prompts: Sequence[Prompt], request: Request, slots: int
    ) -> tuple[Scheduler, list[Continuation]]:
        """Check all prompts before anything is computed; return their sequences, waiting."""
        config = self.runner.config
        known = self._known(prompts)
        needed = max(len(ids) for ids, _ in known) + request.max_new_tokens - 1
        session = self.runner.session(
            slots=min(slots, len(known)), capacity=min(config.n_positions, needed)
        )
        scheduler = Scheduler(session, tokenizer=self.tokenizer)
        return scheduler, [scheduler.add(ids, request, copies=n) for ids, n in known]


def _run(scheduler: Scheduler) -> Iterator[str]:
    """Step until all have ended; yield text as it comes. Raises what a sequence ended with."""
    while scheduler.busy:
        for sequence, piece in scheduler.step():
            if sequence.error is not None:
                raise sequence.error
            if piece:
                yield piece


def _streamed(scheduler: Scheduler, sequence: Continuation) -> Generator[str, None, Completion]:
    yield from _run(scheduler)
    return sequence.completion()
