"""/v1/completions and /v1/chat/completions: one way to write texts, two forms of the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tiedgpt.infer import Completion, Engine, GenerationConfig
from tiedgpt.infer.options import Prompt
from tiedgpt.serve.errors import APIError, api_error
from tiedgpt.serve.logprobs import (
    Entry,
    Names,
    for_chat,
    for_completion,
    new_entries,
    prompt_entries,
)
from tiedgpt.serve.metrics import Metrics
from tiedgpt.serve.schemas import ChatRequest, CompletionRequest, listed
from tiedgpt.serve.texts import EventStream, Texts, Wanted, wanted

if TYPE_CHECKING:
    from tiedgpt.data.templates import Template

MAX_TOKENS = 16
"""Of a completion where the request does not say, as in OpenAI's API."""
error_log = logging.getLogger("uvicorn.error")
FINISH = {"stop": "stop", "length": "length", "context": "length", "timeout": "length"}


@dataclass(frozen=True)
class Service:
    """What the routes share."""

    engine: Engine
    name: str
    metrics: Metrics
    most_texts: int
    """Texts of one request; more could never be admitted."""
    fingerprint: str
    template: Template | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def require_model(self, name: str | None) -> None:
        """Raise `APIError` for another model's name."""
        if name not in (None, self.name):
            raise APIError(
                404, f"there is no model {name!r}: this server has {self.name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """What answers have in common: what was asked for, and for whom."""

    service: Service
    request: Request
    names: Names
    each: list[Wanted]
    config: GenerationConfig
    wants_logprobs: bool
    samples: int
    max_tokens: int

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of the prompt were asked for."""
        return self.config.prompt_logprobs is not False

    def reason(self, done: Completion) -> str:
        """Return why a text ended; with max_tokens=0, what was written is not shown."""
        return FINISH[done.finish_reason] if self.max_tokens else "length"


@dataclass(frozen=True)
class _Completions:
    """The form of /v1/completions."""

    body: CompletionRequest
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self, echoed: str) -> dict[str, Any]:
        return {"text": echoed} if self.body.echo else {}

    def logprobs(self, entries: Sequence[Entry], names: Names) -> dict[str, Any]:
        return for_completion(entries, names, self.body.logprobs or 0)


@dataclass(frozen=True)
class _Chats:
    """The form of /v1/chat/completions."""

    body: ChatRequest
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def opening(self, _: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, entries: Sequence[Entry], names: Names) -> dict[str, Any]:
        return for_chat(entries, names)


_Form = _Completions | _Chats


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    samples = body.n if body.best_of is None else body.best_of
    if samples < body.n:
        raise APIError(400, f"best_of must be at least n={body.n}, got {samples}", param="best_of")
    if body.stream and samples > body.n:
        raise APIError(400, "best_of above n cannot be streamed", param="best_of")
    wants = body.logprobs is not None
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    config = body.config(
        max_new_tokens=max(1, max_tokens), top_logprobs=body.logprobs or 0,
        prompt_logprobs=(body.logprobs or 0) if body.echo and wants else False,
    )  # fmt: skip
    prompts = listed(body.prompt)
    each = await _wanted(service, body, prompts, samples, max_tokens, echo=body.echo)
    names = Names(service.engine.tokenizer, body.return_tokens_as_token_ids)
    asked = _Asked(service, request, names, each, config, wants, samples, max_tokens)
    return await _answer(asked, _Completions(body))


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    template, tokenizer = service.template, service.engine.tokenizer
    if template is None or tokenizer is None:
        raise APIError(
            400, "the model has no chat template of ours: use /v1/completions", param="messages",
            code="no_chat_template",
        )  # fmt: skip
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    from tiedgpt.data.templates import encode_pieces

    messages = [{"role": each.role, "content": each.written} for each in body.messages]
    ids, _ = await asyncio.to_thread(lambda: encode_pieces(template.prompt(messages), tokenizer))
    room = service.engine.runner.config.n_positions - len(ids)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    config = body.config(
        max_new_tokens=max_tokens, top_logprobs=body.top_logprobs or 0,
        stop_ids=template.end_ids(tokenizer),
    )  # fmt: skip
    each = await _wanted(service, body, [ids], body.n, max_tokens)
    names = Names(tokenizer)
    asked = _Asked(service, request, names, each, config, body.logprobs, body.n, max_tokens)
    return await _answer(asked, _Chats(body))


async def _wanted(
    service: Service,
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[Prompt],
    samples: int,
    max_tokens: int,
    echo: bool = False,
) -> list[Wanted]:
    """Check what both APIs share; return the texts to be written."""
    service.require_model(body.model)
    if len(prompts) * samples > service.most_texts:
        raise APIError(
            400, f"prompts times samples must be at most {service.most_texts}, got "
            f"{len(prompts)} x {samples}", param="prompt",
        )  # fmt: skip
    recorded, size = body.logprob_token_ids, service.engine.runner.config.vocab_size
    if any(id >= size for id in recorded):
        raise APIError(400, f"must be ids below {size}", param="logprob_token_ids")
    return await asyncio.to_thread(
        wanted, service.engine, prompts, n=samples, room=max_tokens, recorded=recorded, echo=echo
    )


async def _answer(asked: _Asked, form: _Form) -> Response:
    texts = Texts(asked.service.engine, asked.service.metrics)
    await texts.submit(asked.each, asked.config)
    head = {
        "id": f"{form.prefix}-{uuid.uuid4().hex}",
        "object": form.chunk_kind if form.body.stream else form.kind,
        "created": int(time.time()),
        "model": asked.service.name,
        "system_fingerprint": asked.service.fingerprint,
    }
    if form.body.stream:
        return EventStream(_events(asked, form, texts, head), texts)
    await texts.wait(asked.request)
    usage = _usage(asked, sum(len(text.result.ids) for text in asked.each))
    best = _best(asked, form.body.n)
    choices = await asyncio.to_thread(
        lambda: [_whole(index, text, asked, form) for index, text in enumerate(best)]
    )
    return JSONResponse({**head, "choices": choices, "usage": usage})


def _whole(index: int, text: Wanted, asked: _Asked, form: _Form) -> dict[str, Any]:
    """Return one text as a choice."""
    done, entries = text.result, list[Entry]()
    if asked.is_scored:
        entries = prompt_entries(text, done, asked.names)
    if asked.max_tokens and asked.wants_logprobs:
        entries += new_entries(text, asked.names, start=len(text.echoed))
    logprobs = form.logprobs(entries, asked.names) if asked.wants_logprobs else None
    written = form.whole(text.echoed + done.text * bool(asked.max_tokens))
    return _choice(index, written, logprobs, asked.reason(done))


def _choice(
    index: int, content: dict[str, Any], logprobs: Any = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _best(asked: _Asked, n: int) -> list[Wanted]:
    """Return n texts for each prompt: those with the highest mean logprob, if more were drawn."""
    if n == asked.samples:
        return asked.each
    found = list[Wanted]()
    for first in range(0, len(asked.each), asked.samples):
        group = asked.each[first : first + asked.samples]
        found += sorted(group, key=attrgetter("result.mean_logprob"), reverse=True)[:n]
    return found


def _usage(asked: _Asked, n_new: int) -> dict[str, int]:
    """Count tokens, also for the log; each prompt once, however many texts it has."""
    n_prompt = sum(len(text.ids) for text in asked.each[:: asked.samples])
    n_new = n_new if asked.max_tokens else 0
    usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
    asked.request.state.noted |= usage
    return {**usage, "total_tokens": n_prompt + n_new}


async def _events(
    asked: _Asked, form: _Form, texts: Texts, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Yield server-sent events: pieces of texts, perhaps the usage, and the end."""
    options, names = form.body.stream_options, asked.names
    tells_usage = options is not None and options.include_usage
    counts = [0] * len(asked.each)

    def event(*choices: dict[str, Any], usage: Any = None) -> bytes:
        return _event({**head, "choices": choices, **({"usage": usage} if tells_usage else {})})

    try:
        openings = [form.opening(text.echoed) for text in asked.each]
        for index, opening in enumerate(openings):
            if opening and not asked.is_scored:
                yield event(_choice(index, opening))
        async for index, token in texts:
            text = asked.each[index]
            if token is None:
                texts.require_whole(text.result)
                yield event(_choice(index, form.piece(""), None, asked.reason(text.result)))
                continue
            if asked.is_scored and not counts[index]:
                entries = await asyncio.to_thread(prompt_entries, text, token, names)
                yield event(_choice(index, openings[index], form.logprobs(entries, names)))
            row = text.recorder.rows[counts[index]] if text.recorder is not None else None
            counts[index] += 1
            at = len(text.echoed) + token.offset
            entry = Entry(token.id, at, token.logprob, token.top_logprobs, row)
            logprobs = form.logprobs([entry], names) if asked.wants_logprobs else None
            if (token.text or logprobs) and asked.max_tokens:
                yield event(_choice(index, form.piece(token.text), logprobs))
    except Exception as error:
        if (told := api_error(error)).status == 500:
            error_log.exception("a stream failed")
        yield _event(told.content)
        return
    usage = _usage(asked, sum(counts))
    if tells_usage:
        yield event(usage=usage)
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"
