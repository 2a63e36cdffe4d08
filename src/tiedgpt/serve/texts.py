"""The texts that the engine writes for one HTTP request: submitted, awaited, streamed, cancelled.

The engine computes in its own thread. Its tokens come to the event loop by `call_soon_threadsafe`;
encoding and submitting, which may take a while for long prompts, happen in other threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion, Engine, Generation, GenerationConfig, Token
from tiedgpt.infer.filters import log_normalizer
from tiedgpt.infer.options import Logits, Prompt
from tiedgpt.infer.prompts import prompt_ids
from tiedgpt.serve.errors import APIError
from tiedgpt.serve.metrics import Metrics

GONE = 499
"""The status in the log of a request whose client went away."""


class Recorder:
    """A processor that changes nothing, and notes the logprobs of some ids at each new token."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.rows = list(ids), list[list[float]]()

    def __call__(self, ids: Sequence[int], n_prompt: int, logits: Logits) -> Logits:
        """Note the logprobs; return the same logits."""
        total = log_normalizer(logits)
        self.rows.append([float(logits[id]) - total for id in self.ids])
        return logits


@dataclass
class Wanted:
    """One text: how it is begun, and later what came of it."""

    ids: list[int]
    """The prompt's."""
    echoed: str = ""
    """The prompt's text, if it is to be repeated."""
    draw: int = 0
    """Of several texts for the same ids, which it is."""
    recorder: Recorder | None = None
    generation: Generation | None = field(default=None, repr=False)

    @property
    def result(self) -> Completion:
        """What was written, once it has ended."""
        assert self.generation is not None
        completion: Completion = self.generation.result()
        return completion


def encode(
    engine: Engine, prompt: Prompt, param: str, *, room: int = 0, most: int = 0
) -> list[int]:
    """Return a prompt's ids; `APIError` naming `param` if it cannot be read, or is too long.

    `room`: how many tokens are to follow at the most. `most`: how many may be read, if fewer than
    the context.
    """
    config = engine.runner.config
    try:
        ids = prompt_ids(prompt, config, engine.tokenizer)
    except UserError as error:
        raise APIError(400, f"{param}: {error}", param=param) from None
    context = min(most or config.n_positions, config.n_positions)
    if len(ids) + room > context:
        parts = f" ({len(ids):,} in the prompt, {room:,} to follow)" if room else ""
        raise APIError(
            400, f"at most {context:,} tokens are read, and you ask for {len(ids) + room:,}"
            f"{parts}: shorten it",
            param=param if len(ids) > context else "max_tokens", code="context_length_exceeded",
        )  # fmt: skip
    return ids


def wanted(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    n: int,
    room: int,
    recorded: Sequence[int] = (),
    echo: bool = False,
) -> list[Wanted]:
    """Encode prompts; return n texts to be written for each, of at most `room` tokens."""
    found, copies = list[Wanted](), Counter[tuple[int, ...]]()
    for prompt in prompts:
        ids = encode(engine, prompt, "prompt", room=room)
        echoed = prompt if echo and isinstance(prompt, str) else ""
        if echo and not isinstance(prompt, str) and engine.tokenizer is not None:
            echoed = engine.tokenizer.decode(ids)
        for _ in range(n):
            recorder = Recorder(recorded) if recorded else None
            found.append(Wanted(ids, echoed, copies[tuple(ids)], recorder))
            copies[tuple(ids)] += 1
    return found


class Texts:
    """Texts on their way. Cancel them when nobody waits for them any more."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.each: list[Wanted] = []
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()

    async def submit(self, each: list[Wanted], config: GenerationConfig) -> None:
        """Submit all; if one cannot be, those before it are cancelled and the error is raised."""
        self.each = each
        try:
            await asyncio.to_thread(self._submit, config)
        except BaseException:
            self.cancel()
            raise

    def _submit(self, config: GenerationConfig) -> None:
        for index, one in enumerate(self.each):
            processors = () if one.recorder is None else (one.recorder,)
            watch = self.metrics.watch(self._teller(index))
            one.generation = self.engine.submit(
                one.ids, config, draw=one.draw, on_token=watch.token, processors=processors
            )
            one.generation.future.add_done_callback(watch.end)
            if self._cancelled:  # while this thread submitted
                one.generation.cancel()

    def _teller(self, index: int) -> Callable[[Token | None], None]:
        def tell(token: Token | None) -> None:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, token))

        return tell

    def cancel(self) -> None:
        """End what has not ended; slots are free after the step that is being computed."""
        self._cancelled = True
        for one in self.each:
            if one.generation is not None:
                one.generation.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Token | None]]:
        """Yield (number of the text, token) as they come, and None for the end of each text."""
        n_left = len(self.each)
        while n_left:
            index, token = await self._events.get()
            n_left -= token is None
            yield index, token

    async def wait(self, request: Request) -> None:
        """Wait for all; cancel them if one fails or the client goes away."""
        gone = asyncio.create_task(self._cancel_when_gone(request))
        try:
            async for index, token in self:
                if token is None:
                    self.require_whole(self.each[index].result)
        finally:
            gone.cancel()
            self.cancel()

    async def _cancel_when_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    def require_whole(self, completion: Completion) -> None:
        """Raise `APIError` for a text that was cancelled."""
        if completion.finish_reason == "cancelled" and self._cancelled:
            raise APIError(GONE, "the client went away", code="cancelled")
        if completion.finish_reason == "cancelled":
            raise APIError(503, "the server is ending", code="shutting_down")


class EventStream(StreamingResponse):
    """Server-sent events about texts, which are cancelled when the response ends, however."""

    def __init__(self, events: AsyncIterator[bytes], texts: Texts) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.texts = texts

    async def __call__(self, *scope_receive_send: Any) -> None:
        """Send the events."""
        try:
            await super().__call__(*scope_receive_send)
        finally:
            self.texts.cancel()
