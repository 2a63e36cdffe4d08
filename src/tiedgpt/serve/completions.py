"""/v1/completions and /v1/chat/completions: one way to generate, two formats of the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion, Engine, GenerationConfig
from tiedgpt.infer.generation_config import Prompt
from tiedgpt.serve.errors import APIError, api_error
from tiedgpt.serve.logprobs import (
    Entry,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_entries,
    token_entry,
)
from tiedgpt.serve.metrics import Metrics
from tiedgpt.serve.schemas import ChatRequest, CompletionRequest, as_list
from tiedgpt.serve.streams import Choice, EventStream, RequestStream, encode_prompts

if TYPE_CHECKING:
    from tiedgpt.data.templates import Template

MAX_TOKENS = 16
"""The default of max_tokens for completions, as in OpenAI's API."""
MAX_CONTEXTS = 16
"""Maximum length of a text in contexts if the context slides, so that every request ends."""
FINISH = {"stop": "stop", "length": "length", "context": "length", "timeout": "length"}
error_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Service:
    """The engine and the state that all routes share."""

    engine: Engine
    name: str
    metrics: Metrics
    max_choices: int
    """The most texts of one request; the queue could never hold more."""
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
class Answer:
    """The answer to a valid request for texts, in the format of /v1/completions."""

    service: Service
    request: Request
    body: Any
    choices: list[Choice]
    """All texts to be generated: n for each prompt."""
    names: TokenNames
    config: GenerationConfig
    has_logprobs: bool
    object_type, chunk_type, id_prefix = "text_completion", "text_completion", "cmpl"

    def message(self, text: str) -> dict[str, Any]:
        """Return the content of a choice."""
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        """Return the content of a streamed choice."""
        return {"text": text}

    def first_delta(self, echo: str) -> dict[str, Any]:
        """Return the content of the first event of a choice; empty for no event."""
        return {"text": echo} if self.body.echo else {}

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the log-probabilities of a choice."""
        return completion_logprobs(entries, self.names, self.body.logprobs or 0)

    @property
    def has_text(self) -> bool:
        """False with max_tokens=0: one token is generated, and not shown."""
        return self.body.max_tokens != 0

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt were asked for."""
        return self.config.prompt_logprobs is not False

    def choice(
        self, index: int, content: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        """Return one entry of the answer's `choices`."""
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def finish_reason(self, done: Completion) -> str:
        """Return why a text ended."""
        return FINISH[done.finish_reason] if self.has_text else "length"

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one text as a choice."""
        done, entries = choice.result, list[Entry]()
        if self.has_prompt_logprobs:
            entries = prompt_entries(choice, done, self.names)
        if self.has_text and self.has_logprobs:
            entries += [token_entry(choice, token) for token in choice.tokens]
        logprobs = self.logprobs(entries) if self.has_logprobs else None
        text = self.names.text(done) if self.has_text else ""
        message = self.message(choice.echo + text)
        return self.choice(index, message, logprobs, self.finish_reason(done))

    def usage(self, n_new: int) -> dict[str, int]:
        """Count tokens, also for the log; each prompt once, however many texts it has."""
        n_prompt = sum(len(choice.prompt_ids) for choice in self.choices[:: self.body.n])
        n_new = n_new if self.has_text else 0
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
        self.request.state.log_fields |= usage
        return {**usage, "total_tokens": n_prompt + n_new}


class ChatAnswer(Answer):
    """The answer to a valid request for messages, in the format of /v1/chat/completions."""

    object_type, chunk_type, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def message(self, text: str) -> dict[str, Any]:
        """Return the message of a choice."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        """Return the content of a streamed choice."""
        return {"delta": {"content": text} if text else {}}

    def first_delta(self, _: str) -> dict[str, Any]:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the log-probabilities of a choice."""
        return chat_logprobs(entries, self.names)


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    has_logprobs = body.logprobs is not None
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    config = body.config(
        max_new_tokens=max(1, max_tokens), top_logprobs=body.logprobs or 0,
        prompt_logprobs=(body.logprobs or 0) if body.echo and has_logprobs else False,
    )  # fmt: skip
    names = TokenNames(service.engine.tokenizer, body.return_tokens_as_token_ids)
    options = {"echo": body.echo, "allow_special": body.allow_special}
    choices = await _encode(service, body, as_list(body.prompt), max_tokens, **options)
    return await _respond(Answer(service, request, body, choices, names, config, has_logprobs))


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    template, tokenizer = service.template, service.engine.tokenizer
    if template is None or tokenizer is None:
        raise APIError(
            400, "this model has no chat template: use /v1/completions", param="messages",
            code="no_chat_template",
        )  # fmt: skip
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    from tiedgpt.data.templates import encode_pieces

    roles = [*template.roles, *(["developer"] if "system" in template.roles else [])]
    for message in body.messages:
        if message.role not in roles:
            problem = f"there is no role {message.role!r}: use {', '.join(roles)}"
            raise APIError(400, f"messages: {problem}", param="messages")
    messages = [message.for_template() for message in body.messages]
    try:
        ids, _ = await asyncio.to_thread(
            lambda: encode_pieces(template.prompt(messages), tokenizer)
        )
    except UserError as error:
        raise APIError(400, f"messages: {error}", param="messages") from None
    room = service.engine.runner.config.n_positions - len(ids)
    max_tokens = body.max_completion_tokens or body.max_tokens or max(1, room)
    config = body.config(
        max_new_tokens=max_tokens, top_logprobs=body.top_logprobs or 0,
        stop_ids=template.end_ids(tokenizer),
    )  # fmt: skip
    choices = await _encode(service, body, [ids], max_tokens, param="messages")
    names = TokenNames(tokenizer)
    return await _respond(ChatAnswer(service, request, body, choices, names, config, body.logprobs))


async def _encode(
    service: Service,
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[Prompt],
    max_tokens: int,
    **options: Any,
) -> list[Choice]:
    """Check the fields of both APIs; return the texts to be generated, as `encode_prompts`."""
    service.require_model(body.model)
    if len(prompts) * body.n > service.max_choices:
        raise APIError(
            400, f"the number of prompts times n must be at most {service.max_choices}, got "
            f"{len(prompts)} x {body.n}", param="prompt",
        )  # fmt: skip
    slides = body.context_end == "slide"
    longest = MAX_CONTEXTS * service.engine.runner.config.n_positions
    if slides and max_tokens > longest:
        message = (
            f"max_tokens must be at most {longest:,} if the context slides, got {max_tokens:,}"
        )
        raise APIError(400, message, param="max_tokens")
    room = None if slides else max_tokens
    return await asyncio.to_thread(
        encode_prompts, service.engine, prompts, n=body.n, room=room, **options
    )


async def _respond(answer: Answer) -> Response:
    stream = RequestStream(answer.service.engine, answer.service.metrics, answer.choices)
    await stream.submit(answer.config)
    head = {
        "id": f"{answer.id_prefix}-{uuid.uuid4().hex}",
        "object": answer.chunk_type if answer.body.stream else answer.object_type,
        "created": int(time.time()),
        "model": answer.service.name,
        "system_fingerprint": answer.service.fingerprint,
    }
    if answer.body.stream:
        return EventStream(_events(answer, stream, head), stream)
    await stream.wait(answer.request)
    usage = answer.usage(sum(len(choice.result.ids) for choice in answer.choices))
    choices = await asyncio.to_thread(
        lambda: [answer.whole_choice(*choice) for choice in enumerate(answer.choices)]
    )
    return JSONResponse({**head, "choices": choices, "usage": usage})


async def _events(
    answer: Answer, stream: RequestStream, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Yield server-sent events: pieces of texts, perhaps the usage, and the end."""
    options = answer.body.stream_options
    has_usage = options is not None and options.include_usage
    counts = [0] * len(answer.choices)

    def event(*choices: dict[str, Any], usage: Any = None) -> bytes:
        return _event({**head, "choices": choices, **({"usage": usage} if has_usage else {})})

    try:
        first = [answer.first_delta(choice.echo) for choice in answer.choices]
        for index, delta in enumerate(first):
            if delta and not answer.has_prompt_logprobs:
                yield event(answer.choice(index, delta))
        async for index, token in stream:
            choice = answer.choices[index]
            if token is None:
                stream.require_finished(choice.result)
                reason = answer.finish_reason(choice.result)
                yield event(answer.choice(index, answer.delta(""), None, reason))
                continue
            if answer.has_prompt_logprobs and not counts[index]:
                entries = await asyncio.to_thread(prompt_entries, choice, token, answer.names)
                yield event(answer.choice(index, first[index], answer.logprobs(entries)))
            entry = token_entry(choice, token)
            logprobs = answer.logprobs([entry]) if answer.has_logprobs else None
            text = answer.names.piece(token, is_first=not counts[index])
            counts[index] += 1
            if (text or logprobs) and answer.has_text:
                yield event(answer.choice(index, answer.delta(text), logprobs))
    except Exception as error:
        if (refusal := api_error(error)).status == 500:
            error_log.exception("a stream failed")
        yield _event(refusal.content)
        return
    usage = answer.usage(sum(counts))
    if has_usage:
        yield event(usage=usage)
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"
