"""Prompts in, completions out.

An engine is a model that is ready to compute, a tokenizer, and a worker thread that runs a
`Scheduler`. `generate`, `stream` and `score` submit requests to it and wait; so may any number of
threads at a time. The worker sleeps while there is nothing to do. No torch is imported here.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from tiedgpt.core.config import GPTConfig
from tiedgpt.errors import UserError
from tiedgpt.infer.beam import search
from tiedgpt.infer.constraints import Matcher, matcher_for
from tiedgpt.infer.generation_config import (
    MAX_THREADS,
    GenerationConfig,
    Prompt,
    require_positive,
    with_options,
)
from tiedgpt.infer.prompts import one_or_many, prompt_ids, split_context
from tiedgpt.infer.runners import (
    BackendOptions,
    compare_vocabularies,
    make_runner,
    open_runner,
    require_engine_options,
)
from tiedgpt.infer.scheduler import Request
from tiedgpt.infer.scoring import score_text
from tiedgpt.infer.sequence import SequenceState, Token, decode
from tiedgpt.infer.worker import QUEUE_SIZE, Generation, Worker
from tiedgpt.text import Tokenizer
from tiedgpt.weights.source import Source, tokenizer_for

if TYPE_CHECKING:
    from tiedgpt.core.model import GPT
    from tiedgpt.data.templates import Template


class Engine:
    """An inference engine: a model, its tokenizer and a worker thread; any thread may call it.

    `precision`: "auto" is the model's own; "fp32", "bf16", "fp16", "int8" and "int4" convert a
    copy. `resolve` and `config` (such as n_head) add facts that a source's file lacks, as in
    `GPT.from_pretrained`.

    `backend`: "torch", or "kernels" for CPUs, which also compute int8 and int4, and take some ten
    seconds to be compiled the first time. "auto" takes kernels for packed directories, for int8 and
    int4, and on a CPU for a source of 5 million parameters or more; otherwise torch.

    `device`: "cpu", "cuda", "cuda:1", "mps", or a torch.device. "auto" takes the GPU, if there is
    one, for a source of 20 million parameters or more, except for int8 and int4; otherwise the CPU.
    A model in memory keeps its device unless another is given, which gets a copy.

    `slots`: how many sequences are decoded together. Each has room for the whole context, which
    takes memory when it is filled. At most `queue_size` requests wait for a slot. Slots keep
    their tokens: if a prompt begins like an earlier one, only the rest is read. (A model in
    memory may be trained in between: its slots are cleared when no request runs.)

    `template`: the chat template of `chat`; by default the one beside the tokenizer.

    `threads`: by default, kernels compute on the cores that this process may use, at most 16, and
    torch on its own number. That number is the process's: it is set while the engine reads, and
    restored.
    """

    def __init__(
        self,
        model_or_source: GPT | str | os.PathLike[str],
        precision: str = "auto",
        *,
        slots: int = 8,
        backend: str = "auto",
        device: object = "auto",
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        template: Template | None = None,
        resolve: str | None = None,
        threads: int | None = None,
        queue_size: int = QUEUE_SIZE,
        **config: Any,
    ) -> None:
        require_engine_options(config)
        self.n_slots = require_positive("slots", slots)
        if threads is not None:
            threads = require_positive("threads", threads, MAX_THREADS)
        options = BackendOptions(precision, backend, threads, device)
        self.notes: tuple[str, ...] = ()
        self.end_ids: tuple[int, ...] = ()  # beside the config's end-of-text token
        source = told_by = None
        if isinstance(model_or_source, (str, os.PathLike)):
            source = told_by = Source.of(model_or_source)
        if isinstance(tokenizer, (str, os.PathLike)):
            tokenizer = told_by = Source.of(tokenizer, weights=False)
        elif tokenizer is not None:
            told_by = None
        self.tokenizer = tokenizer_for(source, tokenizer)
        self._template = template
        self._template_place = None if told_by is None else (told_by.path, told_by.read)
        if source is not None:
            self.end_ids = source.end_ids
            self.runner, self.notes = open_runner(source, options, resolve=resolve, **config)
            is_fixed = True
        elif resolve is not None or config:
            raise UserError("resolve and config are for a source that is loaded")
        else:
            self.runner, self.notes = make_runner(cast("GPT", model_or_source), options)
            is_fixed = self.backend == "kernels"
        self.notes += compare_vocabularies(self.tokenizer, self.runner.config.vocab_size)
        queue_size = require_positive("queue_size", queue_size)
        self._worker = Worker(self.runner, self.n_slots, queue_size, is_fixed)
        weakref.finalize(self, self._worker.close)

    def __repr__(self) -> str:
        model, threads = self.runner.config, getattr(self.runner, "threads", None)
        packed = getattr(self.runner, "packed", None)
        backend = f"{packed.precision} kernels" if packed is not None else "torch"
        if packed is None and self.model.wte.weight.device.type != "cpu":
            backend = f"torch on {self.model.wte.weight.device}"
        return (
            f"Engine({model.parameter_count():,} parameters, {backend}, {self.n_slots} slots of "
            f"{model.n_positions:,} positions{f', {threads} threads' if threads else ''})"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests and end the worker. A closed engine cannot be opened again."""
        self._worker.close()

    @property
    def model(self) -> GPT:
        """The model; `UserError` if torch does not compute it."""
        model = getattr(self.runner, "model", None)
        if model is None:
            raise UserError(f"{type(self.runner).__name__} has no torch model")
        return cast("GPT", model)

    @property
    def backend(self) -> str:
        """The backend: "torch" or "kernels"."""
        return "torch" if hasattr(self.runner, "model") else "kernels"

    @cached_property
    def template(self) -> Template | None:
        """The chat template; None without one. `UserError` for one of another program."""
        if self._template is not None or self._template_place is None:
            return self._template
        from tiedgpt.data.templates import read_template

        return read_template(*self._template_place)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Any:
        """Complete one prompt (text or ids), or a list of them; options as in `GenerationConfig`.

        Returns a `Completion` for a prompt, a list of them for a list of prompts; with n above 1,
        a list of n completions in the place of each. In a list, a request that fails has the
        finish_reason "error" and its error; the error of a single prompt is raised.

        With a seed, the text of a prompt does not depend on the other prompts; a prompt that occurs
        twice gets two texts. An empty prompt starts from the beginning-of-text token.
        """
        config = with_options(config, options)
        prompt_list, is_list = one_or_many(prompts)
        requests, copies = list[Request](), dict[tuple[int, ...], int]()
        matcher = self._matcher(config)
        for ids in [self._ids(prompt) for prompt in prompt_list]:
            for _ in range(config.n):
                n = copies[tuple(ids)] = copies.get(tuple(ids), -1) + 1
                requests.append(self._request(ids, config, matcher, copies=n))
        completions = self._wait_for(requests, collect=is_list)
        if config.n > 1:
            starts = range(0, len(completions), config.n)
            completions = [completions[start : start + config.n] for start in starts]
        return completions if is_list else completions[0]

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any
    ) -> Generation:
        """Yield each new `Token`; `.result()` is the whole `Completion`.

        Options as in `GenerationConfig`, without n and num_beams. The tokens' texts add up
        to the completion's: they never split a character or show the start of a stop string.
        """
        config = with_options(config, options)
        for name in ("num_beams", "n"):
            if getattr(config, name) > 1:
                raise UserError(
                    f"must be 1 to stream, got {getattr(config, name)}",
                    option=name,
                    hint="use generate",
                )
        return self._submit(prompt, config, wait=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Any:
        """Return the reply to a conversation, as `generate` does, by the model's chat template.

        `messages` are {"role": "user", "content": "Hello"}; roles are the template's. Its default
        system message begins a conversation without one. The reply ends where the template says, or
        when the context is full; `max_new_tokens` shortens it.

        Raises `UserError` for a model without a template or a tokenizer, and for other messages.
        """
        return self.generate(*self._conversation(messages, config, options))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Generation:
        """Yield each new `Token` of the reply to a conversation, as `stream` and `chat` do."""
        return self.stream(*self._conversation(messages, config, options))

    def submit(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        draw: int = 0,
        on_token: Callable[[Token], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Begin to complete a prompt and return at once; options as in `GenerationConfig`.

        `draw` numbers the texts for one prompt and seed, as `generate` with n does. `on_token` is
        called with each token by the engine's thread, in place of iterating; it must not block.

        Raises `QueueFullError` if too many requests wait, `ClosedError` for a closed engine.
        """
        config = with_options(config, options)
        if config.n > 1:
            raise UserError("submit makes one text: submit n times, or use generate")
        return self._submit(prompt, config, wait=False, draw=draw, on_token=on_token)

    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        contexts: Prompt | Sequence[Prompt] | None = None,
    ) -> Any:
        """Return the logprob and rank of each token of a text (or ids) as `Scored`.

        A list gives a list. With `contexts`, one for each text, the tokens after the context are
        scored; without, all after the first. A text longer than the context is read in windows of
        the whole context, each begun half a window after the last.
        """
        text_list, is_list = one_or_many(texts)
        context_list: Sequence[Prompt | None] = [None] * len(text_list)
        if contexts is not None:
            context_list, _ = one_or_many(contexts)
        if len(context_list) != len(text_list):
            n = f"{len(context_list)} of {len(text_list)}"
            raise UserError(f"must be one for each text, got {n}", option="contexts")
        requests = []
        n_tokens = self.runner.config.vocab_size if self.tokenizer is None else len(self.tokenizer)
        for text, context in zip(text_list, context_list, strict=True):
            ids, n_context = split_context(text, context, self.runner.config, self.tokenizer)
            decoding = partial(score_text, ids=ids, n_context=n_context, n_tokens=n_tokens)
            shared = ids[:n_context] if n_context < self.runner.config.n_positions else []
            length = min(len(ids), self.runner.config.n_positions)
            requests.append(Request(decoding, length=length, prompt=shared))
        scored = self._wait_for(requests, collect=False)
        return scored if is_list else scored[0]

    def stats(self) -> dict[str, float]:
        """Return counts since the engine was opened.

        requests, running, waiting; cache_usage, the share of all slots' positions that running
        requests fill, from 0 to 1; prompt_tokens, and reused_tokens, those of them that a slot
        held; generated_tokens; seconds of computing.
        """
        return self._worker.stats()

    def _ids(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self.runner.config, self.tokenizer)

    def _conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        config: GenerationConfig | None,
        options: dict[str, Any],
    ) -> tuple[list[int], GenerationConfig]:
        """Return the ids of a conversation, and the options of its reply."""
        from tiedgpt.data.templates import encode_pieces

        if self.template is None or self.tokenizer is None:
            lacks = "tokenizer" if self.tokenizer is None else "chat template"
            raise UserError(
                f"this model has no {lacks}",
                hint="tune it on lines of messages (`tiedgpt tune`), or open Engine(..., "
                "tokenizer=, template=) with one of tiedgpt.data.TEMPLATES",
            )
        is_list = isinstance(messages, Iterable) and not isinstance(messages, Mapping)
        items: list[Any] = list(messages) if is_list else []
        for message in items or [messages]:
            fields = message if isinstance(message, Mapping) and items else {}
            if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
                example = '{"role": "user", "content": "a text"}'
                raise UserError(f"must be a list of {example}, got {message!r}", option="messages")
        ids, _ = encode_pieces(self.template.prompt(items), self.tokenizer)
        if config is None:
            room = max(1, self.runner.config.n_positions - len(ids))
            options = {"max_new_tokens": room} | options
        config = with_options(config, options)
        ends = () if config.ignore_eos else self.template.end_ids(self.tokenizer)
        return ids, with_options(config, {"stop_ids": (*config.stop_ids, *ends)})

    def _matcher(self, config: GenerationConfig) -> Matcher | None:
        if not config.constraint:
            return None
        if self.tokenizer is None:
            raise UserError("regex, json_schema and grammar need a tokenizer")
        return matcher_for(config.constraint, self.tokenizer, self.runner.config)

    def _submit(
        self,
        prompt: Prompt,
        config: GenerationConfig,
        *,
        wait: bool,
        draw: int = 0,
        on_token: Callable[[Token], None] | None = None,
    ) -> Generation:
        tokens = SimpleQueue[Token | None]()
        request = self._request(
            self._ids(prompt),
            config,
            self._matcher(config),
            copies=draw,
            emit=on_token or tokens.put,
        )
        return self._worker.submit(request, wait=wait, tokens=tokens, owner=self)

    def _request(
        self,
        ids: list[int],
        config: GenerationConfig,
        matcher: Matcher | None,
        *,
        copies: int = 0,
        emit: Callable[[Token], None] | None = None,
    ) -> Request:
        """Return the request for a prompt's completion; `UserError` if it is impossible."""
        model = self.runner.config
        if config.num_beams > self.n_slots:
            raise UserError(
                f"this takes {config.num_beams} slots and the engine has {self.n_slots}",
                hint=f"open Engine(..., slots={config.num_beams}), or use fewer beams",
            )
        _require_context(len(ids), config, model)
        processors = () if matcher is None else (matcher.copy(),)
        sequence = SequenceState(
            ids, config, model=model, tokenizer=self.tokenizer, end_ids=self.end_ids,
            processors=processors, copies=copies, emit=emit if config.num_beams == 1 else None,
        )  # fmt: skip
        decoding: Callable[..., Any] = partial(decode, sequence=sequence)
        if config.num_beams > 1:
            decoding = partial(search, sequence=sequence)
        shares_prefix = config.prompt_logprobs is False and len(ids) <= model.n_positions
        timeout = math.inf if config.timeout is None else config.timeout
        return Request(
            decoding,
            n_slots=config.num_beams,
            prompt=ids if shares_prefix else (),
            length=min(len(ids) + config.max_new_tokens, model.n_positions),
            sequence=sequence,
            deadline=time.monotonic() + timeout,
        )

    def _wait_for(self, requests: list[Request], *, collect: bool) -> list[Any]:
        """Run requests; return their results, with those of failed ones if `collect`."""
        generations = list[Generation]()
        try:
            for request in requests:
                generations.append(self._worker.submit(request, wait=True))
            results = []
            for generation, request in zip(generations, requests, strict=True):
                try:
                    results.append(generation.result())
                except Exception:
                    if not collect or request.result is None:
                        raise
                    results.append(request.result)
            return results
        except BaseException:  # Ctrl-C as well
            for generation in generations:
                generation.cancel()
            raise


def _require_context(n_ids: int, config: GenerationConfig, model: GPTConfig) -> None:
    """Raise `UserError` for a prompt that does not fit into the context."""
    room = model.n_positions
    if n_ids > room and config.context_end == "stop":
        slide = (
            ""
            if config.num_beams > 1
            else (", or let the context slide: context_end='slide' (--context-end slide)")
        )
        raise UserError(
            f"the prompt has {n_ids} tokens and the model's context {room}",
            hint=f"shorten it{slide}",
        )
    if n_ids > room and config.prompt_logprobs is not False:
        raise UserError(
            f"prompt_logprobs of {n_ids} tokens in a context of {room}: the first would not be "
            "read; Engine.score reads longer texts"
        )
