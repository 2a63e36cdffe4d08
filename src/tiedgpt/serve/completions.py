"""/v1/completions and /v1/chat/completions: one way to write texts, two shapes of the answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tiedgpt.infer import Engine, GenerationConfig, Token
from tiedgpt.infer.options import Prompt
from tiedgpt.serve.errors import APIError, api_error
from tiedgpt.serve.logprobs import Entry, Names, for_chat, for_completion
from tiedgpt.serve.metrics import Metrics
from tiedgpt.serve.schemas import ChatRequest, CompletionRequest, Generating
from tiedgpt.serve.texts import EventStream, Texts, Wanted, require_whole, wanted

MAX_TOKENS = 16
"""Of a completion where the request does not say, as in OpenAI's API."""
FINISH = {"stop": "stop", "length": "length", "context": "length", "timeout": "length"}
Chat = Callable[[Sequence[dict[str, str]]], tuple[list[int], list[int]]]
"""Messages of {"role", "content"} -> the ids of the prompt, and the ids that end a reply."""


@dataclass(frozen=True)
class Service:
    """What the routes share."""

    engine: Engine
    name: str
    metrics: Metrics
    most_texts: int
    """Texts of one request; more could never be admitted."""
    fingerprint: str
    chat: Chat | None = None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Completions:
    """The answers of /v1/completions."""

    body: CompletionRequest
    names: Names
    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def choice(self, index: int, text: Wanted) -> dict[str, Any]:
        """Return one text as a whole."""
        done, body = text.result, self.body
        shown, entries = "", list[Entry]()
        if body.echo:
            shown = self._echo(text)
            if body.logprobs is not None:
                entries = prompt_entries(text, self.names)
        if body.logprobs is not None and body.max_tokens != 0:
            entries += new_entries(text, self.names, start=len(shown))
        logprobs = None
        if body.logprobs is not None:
            logprobs = for_completion(entries, self.names, body.logprobs)
        shown += "" if body.max_tokens == 0 else done.text
        reason = "length" if body.max_tokens == 0 else FINISH.get(done.finish_reason)
        return _choice(index, logprobs, reason, text=shown)

    def opening(self, index: int, text: Wanted) -> dict[str, Any] | None:
        """Return what a stream begins a text with."""
        return _choice(index, None, None, text=self._echo(text)) if self.body.echo else None

    def piece(self, index: int, text: Wanted, token: Token | None, entry: Entry | None) -> Any:
        """Return a token of a stream; None: the text has ended."""
        start = len(self._echo(text)) if self.body.echo else 0
        logprobs = None
        if self.body.logprobs is not None and entry is not None:
            entry = replace(entry, offset=start + entry.offset)
            logprobs = for_completion([entry], self.names, self.body.logprobs)
        reason = FINISH.get(text.result.finish_reason) if token is None else None
        return _choice(index, logprobs, reason, text="" if token is None else token.text)

    def _echo(self, text: Wanted) -> str:
        if isinstance(text.prompt, str) or self.names.tokenizer is None:
            return text.prompt if isinstance(text.prompt, str) else ""
        return self.names.tokenizer.decode(text.ids)


@dataclass(frozen=True)
class Chats:
    """The answers of /v1/chat/completions."""

    body: ChatRequest
    names: Names
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, index: int, text: Wanted) -> dict[str, Any]:
        """Return one reply as a whole."""
        done = text.result
        message = {"role": "assistant", "content": done.text, "refusal": None}
        entries = new_entries(text, self.names)
        logprobs = for_chat(entries, self.names) if self.body.logprobs else None
        return _choice(index, logprobs, FINISH.get(done.finish_reason), message=message)

    def opening(self, index: int, text: Wanted) -> dict[str, Any]:
        """Return what a stream begins a reply with."""
        return _choice(index, None, None, delta={"role": "assistant", "content": ""})

    def piece(self, index: int, text: Wanted, token: Token | None, entry: Entry | None) -> Any:
        """Return a token of a stream; None: the reply has ended."""
        logprobs = None
        if self.body.logprobs and entry is not None:
            logprobs = for_chat([entry], self.names)
        if token is None:
            return _choice(index, None, FINISH.get(text.result.finish_reason), delta={})
        return _choice(index, logprobs, None, delta={"content": token.text})


def _choice(index: int, logprobs: Any, reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def prompt_entries(text: Wanted, names: Names) -> list[Entry]:
    """Return the prompt's tokens; the first has no logprob, as nothing predicts it."""
    done = text.result
    tops = done.prompt_top_logprobs or [[]] * len(done.prompt_logprobs)
    offsets = names.offsets(text.ids)
    rows = zip(text.ids[1:], offsets[1:], done.prompt_logprobs, tops, strict=True)
    return [Entry(text.ids[0], 0, None), *(Entry(*row) for row in rows)]


def new_entries(text: Wanted, names: Names, start: int = 0) -> list[Entry]:
    """Return the new tokens, of which the last may have ended the text and be none of it."""
    done = text.result
    offsets = names.offsets(done.ids, start=start, after=text.ids[-1])
    offsets = [min(offset, start + len(done.text)) for offset in offsets]
    tops = done.top_logprobs or [[]] * len(done.ids)
    recorded = text.recorder.rows if text.recorder is not None else [None] * len(done.ids)
    rows = zip(done.ids, offsets, done.logprobs, tops, recorded, strict=False)
    return [Entry(*row) for row in rows]


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    samples = body.n if body.best_of is None else body.best_of
    if samples < body.n:
        raise APIError(400, f"best_of must be at least n={body.n}, got {samples}", param="best_of")
    if body.stream and samples > body.n:
        raise APIError(400, "best_of above n cannot be streamed", param="best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise APIError(400, "echo with logprobs cannot be streamed", param="stream")
    scored = body.logprobs if body.echo and body.logprobs is not None else False
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    config = body.config(
        max_new_tokens=max(1, max_tokens), top_logprobs=body.logprobs or 0, prompt_logprobs=scored
    )
    each = await _wanted(service, body, body.prompt, samples, max_tokens)
    names = Names(service.engine.tokenizer, body.return_tokens_as_token_ids)
    return await _answer(service, request, Completions(body, names), each, config)


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    if service.chat is None:
        raise APIError(
            400, "the model has no chat template of ours: use /v1/completions", param="messages",
            code="no_chat_template",
        )  # fmt: skip
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    messages = [{"role": each.role, "content": each.text} for each in body.messages]
    ids, end_ids = await asyncio.to_thread(service.chat, messages)
    asked = body.max_completion_tokens or body.max_tokens
    room = service.engine.runner.config.n_positions - len(ids)
    max_tokens = max(1, room) if asked is None else asked
    config = body.config(
        max_new_tokens=max_tokens, top_logprobs=body.top_logprobs or 0, stop_ids=end_ids
    )
    each = await _wanted(service, body, [ids], body.n, max_tokens)
    names = Names(service.engine.tokenizer)
    return await _answer(service, request, Chats(body, names), each, config)


async def _wanted(
    service: Service, body: Generating, prompts: Sequence[Prompt], samples: int, max_tokens: int
) -> list[Wanted]:
    """Check what both APIs share; return the texts to be written."""
    require_model(service, body.model)
    if len(prompts) * samples > service.most_texts:
        raise APIError(
            400, f"prompts times samples must be at most {service.most_texts}, got "
            f"{len(prompts)} x {samples}", param="prompt",
        )  # fmt: skip
    size = service.engine.runner.config.vocab_size
    if any(id >= size for id in body.logprob_token_ids):
        raise APIError(400, f"must be ids below {size}", param="logprob_token_ids")
    return await asyncio.to_thread(
        wanted, service.engine, prompts, n=samples, room=max_tokens, recorded=body.logprob_token_ids
    )


def require_model(service: Service, name: str | None) -> None:
    """Raise `APIError` for another model's name."""
    if name not in (None, service.name):
        raise APIError(
            404, f"there is no model {name!r}: this server has {service.name!r}", param="model",
            code="model_not_found",
        )  # fmt: skip


async def _answer(
    service: Service,
    request: Request,
    shape: Completions | Chats,
    each: list[Wanted],
    config: GenerationConfig,
) -> Response:
    texts = Texts(service.engine, service.metrics)
    await texts.submit(each, config)
    head = {
        "id": f"{shape.prefix}-{uuid.uuid4().hex}",
        "object": shape.chunk_object if shape.body.stream else shape.object,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.fingerprint,
    }
    if shape.body.stream:
        return EventStream(_events(request, texts, shape, head), texts)
    completions = await texts.results(request)
    n_new = sum(len(completion.ids) for completion in completions)
    usage = _usage(each, n_new if shape.body.max_tokens != 0 else 0)
    request.state.noted |= usage
    chosen = await asyncio.to_thread(
        lambda: [shape.choice(index, one) for index, one in enumerate(_best(each, shape.body))]
    )
    return JSONResponse({**head, "choices": chosen, "usage": usage})


def _best(each: list[Wanted], body: Generating) -> list[Wanted]:
    """Return n texts for each prompt: those with the highest mean logprob, if more were drawn."""
    samples, found = getattr(body, "best_of", None) or body.n, list[Wanted]()
    for first in range(0, len(each), samples):
        group = each[first : first + samples]
        if samples > body.n:
            group = sorted(group, key=_mean_logprob, reverse=True)[: body.n]
        found += group
    return found


def _mean_logprob(text: Wanted) -> float:
    logprobs = text.result.logprobs
    return sum(logprobs) / max(1, len(logprobs))


def _usage(each: list[Wanted], n_new: int) -> dict[str, int]:
    """Count tokens; each prompt once, however many texts it has."""
    n_prompt = sum(len(one.ids) for one in {id(one.ids): one for one in each}.values())
    return {
        "prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new,
    }  # fmt: skip


async def _events(
    request: Request, texts: Texts, shape: Completions | Chats, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Yield server-sent events: pieces of texts, perhaps the usage, and the end."""
    options, body = shape.body.stream_options, shape.body
    told = options is not None and options.include_usage
    counts = [0] * len(texts.each)

    def event(*choices: Any, usage: Any = None) -> bytes:
        return _event({**head, "choices": choices, **({"usage": usage} if told else {})})

    try:
        for index, text in enumerate(texts.each):
            if (opening := shape.opening(index, text)) is not None:
                yield event(opening)
        async for index, token in texts:
            text = texts.each[index]
            if token is None:
                require_whole(text.result)
                yield event(shape.piece(index, text, None, None))
                continue
            row = text.recorder.rows[counts[index]] if text.recorder is not None else None
            entry = Entry(token.id, token.offset, token.logprob, token.top_logprobs, row)
            counts[index] += 1
            if (token.text or body.wants_logprobs) and body.max_tokens != 0:
                yield event(shape.piece(index, text, token, entry))
    except Exception as error:
        yield _event(api_error(error).content)
        return
    usage = _usage(texts.each, sum(counts) if body.max_tokens != 0 else 0)
    request.state.noted |= usage
    if told:
        yield event(usage=usage)
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"
