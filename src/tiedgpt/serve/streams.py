"""The texts of one HTTP request: submitted to the engine, awaited, streamed, cancelled.

The engine computes in its own thread. Its tokens come to the event loop by `call_soon_threadsafe`;
encoding and submitting, which may take a while for long prompts, happen in other threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion, Engine, Generation, GenerationConfig, Token
from tiedgpt.infer.generation_config import Prompt
from tiedgpt.infer.prompts import prompt_ids
from tiedgpt.serve.errors import APIError
from tiedgpt.serve.metrics import Metrics, TextTimer
from tiedgpt.text import Tokenizer

CLIENT_LEFT = 499
"""The status in the log of a request whose client disconnected."""


@dataclass
class Choice:
    """One text of an answer: its prompt, and later its generation."""

    prompt_ids: list[int]
    echo: str = ""
    """The prompt's text, if the answer repeats it."""
    n_added: int = 0
    """Number of ids at the beginning of the prompt that are not of its text."""
    draw: int = 0
    """The number of this text among those for the same prompt."""
    tokens: list[Token] = field(default_factory=list, repr=False)
    generation: Generation | None = field(default=None, repr=False)

    @property
    def result(self) -> Completion:
        """The completion, once the text has ended."""
        assert self.generation is not None
        completion: Completion = self.generation.result()
        return completion


def encode_prompt(
    engine: Engine,
    prompt: Prompt,
    param: str,
    *,
    room: int | None = 0,
    max_tokens: int | None = None,
    allow_special: bool = False,
    add_special_tokens: bool | None = None,
    length_field: str = "max_tokens",
) -> list[int]:
    """Return a prompt's ids; `APIError` naming `param` if it cannot be read, or is too long.

    At most `room` tokens are to follow, by the request's `length_field`; None if the context
    slides, so that any length is read. `max_tokens` may be read, if that is less than the context.
    """
    config = engine.runner.config
    if isinstance(prompt, str) and prompt and engine.tokenizer is None:
        raise APIError(400, f"{param} must be token ids: the model has no tokenizer", param=param)
    try:
        ids = prompt_ids(
            prompt or [],
            config,
            engine.tokenizer,
            allow_special=allow_special,
            continues=add_special_tokens is False,
        )
    except UserError as error:
        raise APIError(400, f"{param}: {error}", param=param) from None
    context = min(max_tokens or config.n_positions, config.n_positions)
    if room is None:
        return ids
    if len(ids) + room > context:
        fits = len(ids) < context if room else len(ids) <= context
        message = f"{param} has {len(ids):,} tokens and the context {context:,}: shorten it"
        if fits:
            message = (
                f"{length_field} must be at most {context - len(ids):,}, got {room:,}: the prompt "
                f"has {len(ids):,} tokens and the context {context:,}"
            )
        raise APIError(
            400, message, param=length_field if fits else param, code="context_length_exceeded"
        )
    return ids


def encode_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    n: int,
    room: int | None,
    param: str = "prompt",
    echo: bool = False,
    **options: Any,
) -> list[Choice]:
    """Encode prompts; return n choices for each, with `room` and options of `encode_prompt`."""
    choices, draws = list[Choice](), Counter[tuple[int, ...]]()
    for prompt in prompts:
        ids = encode_prompt(engine, prompt, param, room=room, **options)
        text, n_added = "", 0
        if echo and isinstance(prompt, str):
            text, n_added = prompt, _count_added(engine.tokenizer, prompt, ids)
        elif echo and engine.tokenizer is not None:
            text = engine.tokenizer.decode(ids)
        elif echo:
            text = "".join(f"{id} " for id in ids)
        for _ in range(n):
            choices.append(Choice(ids, text, n_added, draws[tuple(ids)]))
            draws[tuple(ids)] += 1
    return choices


def _count_added(tokenizer: Tokenizer | None, text: str, ids: list[int]) -> int:
    """Return how many ids precede those of a text itself."""
    begin = [] if tokenizer is None else tokenizer.begin_ids
    if tokenizer is None or not begin or ids[: len(begin)] != begin:
        return 0
    return 0 if text.startswith(tokenizer.decode(begin)) else len(begin)


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client of a request disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RequestStream:
    """The choices of one request while they are generated: iterate over their tokens, or wait."""

    def __init__(self, engine: Engine, metrics: Metrics, choices: list[Choice]) -> None:
        self.engine, self.metrics, self.choices = engine, metrics, choices
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()

    async def submit(self, config: GenerationConfig) -> None:
        """Submit all; if one cannot be, those before it are cancelled and the error is raised."""
        try:
            await asyncio.to_thread(self._submit, config)
        except BaseException:
            self.cancel()
            raise

    def _submit(self, config: GenerationConfig) -> None:
        for index, choice in enumerate(self.choices):
            n_prompt = len(choice.prompt_ids)
            timer = TextTimer(self.metrics, n_prompt, partial(self._put, index))
            choice.generation = self.engine.submit(
                choice.prompt_ids, config, draw=choice.draw, on_token=timer.token
            )
            ended = partial(timer.end, choice.generation.times)
            choice.generation.future.add_done_callback(ended)
            if self._is_cancelled:  # while this thread submitted
                choice.generation.cancel()

    def _put(self, index: int, token: Token | None) -> None:
        """Hand a token, or the end of a text, from the engine's thread to the event loop."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, token))

    def cancel(self) -> None:
        """End what has not ended; slots are free after the step that is being computed."""
        self._is_cancelled = True
        for choice in self.choices:
            if choice.generation is not None:
                choice.generation.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Token | None]]:
        """Yield (index of the choice, token) as tokens come, and None at the end of each text."""
        n_left = len(self.choices)
        while n_left:
            index, token = await self._events.get()
            n_left -= token is None
            yield index, token

    async def wait(self, request: Request) -> None:
        """Wait for all; cancel them if one fails or the client disconnects."""
        watch = asyncio.create_task(self._cancel_on_disconnect(request))
        try:
            async for index, token in self:
                if token is None:
                    self.require_finished(self.choices[index].result)
                else:
                    self.choices[index].tokens.append(token)
        finally:
            watch.cancel()
            self.cancel()

    async def _cancel_on_disconnect(self, request: Request) -> None:
        await wait_for_disconnect(request)
        self.cancel()

    def require_finished(self, completion: Completion) -> None:
        """Raise `APIError` for a text that was cancelled."""
        if completion.finish_reason == "cancelled" and self._is_cancelled:
            raise APIError(CLIENT_LEFT, "the client disconnected", code="cancelled")
        if completion.finish_reason == "cancelled":
            raise APIError(503, "the server is ending", code="shutting_down")


class EventStream(StreamingResponse):
    """Server-sent events; the end of the response cancels the texts that still run."""

    def __init__(self, events: AsyncIterator[bytes], stream: RequestStream) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.stream = stream

    async def __call__(self, *scope_receive_send: Any) -> None:
        """Send the events."""
        try:
            await super().__call__(*scope_receive_send)
        finally:
            self.stream.cancel()
