"""/v1/completions and /v1/chat/completions: one way to generate, two formats of the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import override

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion, Engine, GenerationConfig, Token
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
from tiedgpt.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    Message,
    StreamOptions,
    TemplateOptions,
    as_list,
)
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
            problem = f"there is no model {name!r}: this server has {self.name!r}"
            raise APIError(404, problem, param="model", code="model_not_found")


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
    has_one_prompt = False
    """Whether the ids of the prompt are a field of the answer, not of each choice."""

    def message(self, text: str) -> dict[str, Any]:
        """Return the content of a choice."""
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        """Return the content of a streamed choice."""
        return {"text": text}

    def first_delta(self, choice: Choice) -> dict[str, Any]:
        """Return the content of the first event of a choice; empty for no event."""
        return {"text": choice.echo} if self.body.echo or self.body.return_token_ids else {}

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
        self,
        index: int,
        content: dict[str, Any],
        logprobs: Any = None,
        *,
        end: Completion | Token | None = None,
        prompt_ids: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Return one entry of the answer's `choices`; `end` is given once the text has ended."""
        reason = None if end is None else FINISH[end.finish_reason or "length"]
        choice = {"index": index, **content, "logprobs": logprobs}
        if self.body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if prompt_ids is not None and not self.has_one_prompt:
                choice["prompt_token_ids"] = prompt_ids
        choice["finish_reason"] = reason if self.has_text or end is None else "length"
        choice["stop_reason"] = None if end is None else self.stop_reason(end)
        return choice

    def stop_reason(self, end: Completion | Token) -> str | int | None:
        """Return the stop string or the requested stop id that ended a text."""
        is_other_id = isinstance(end.stop_reason, int) and (
            end.stop_reason not in (self.body.stop_token_ids or ())
        )
        return None if is_other_id or not self.has_text else end.stop_reason

    def fields_of_prompt(self) -> dict[str, Any]:
        """Return the fields of the whole answer that describe its one prompt."""
        has_ids = self.body.return_token_ids and self.has_one_prompt
        return {"prompt_token_ids": self.choices[0].prompt_ids} if has_ids else {}

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return one text as a choice."""
        done, entries = choice.result, list[Entry]()
        if self.has_prompt_logprobs:
            entries = prompt_entries(choice, done, self.names)
        if self.has_text and self.has_logprobs:
            entries += [token_entry(choice, token) for token in choice.tokens]
        logprobs = self.logprobs(entries) if self.has_logprobs else None
        text = self.names.text(done) if self.has_text else ""
        return self.choice(
            index,
            self.message(choice.echo + text),
            logprobs,
            end=done,
            prompt_ids=choice.prompt_ids,
            token_ids=done.ids if self.has_text else (),
        )

    def usage(self, n_new: int) -> dict[str, Any]:
        """Count tokens so far; each prompt once, however many texts it has."""
        n_prompt = sum(len(choice.prompt_ids) for choice in self.choices[:: self.body.n])
        n_new = n_new if self.has_text else 0
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
        return {**usage, "total_tokens": n_prompt + n_new}

    def final_usage(self) -> dict[str, Any]:
        """Count tokens when all texts have ended, also for the log."""
        usage = self.usage(sum(len(choice.result.ids) for choice in self.choices))
        n_cached = sum(choice.result.cached_tokens for choice in self.choices[:: self.body.n])
        fields = ("prompt_tokens", "completion_tokens")
        self.request.state.log_fields |= {name: usage[name] for name in fields}
        return usage | {"prompt_tokens_details": {"cached_tokens": n_cached}}


class ChatAnswer(Answer):
    """The answer to a valid request for messages, in the format of /v1/chat/completions."""

    object_type, chunk_type, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    has_one_prompt = True

    @override
    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    @override
    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    @override
    def first_delta(self, _: Choice) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    @override
    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return chat_logprobs(entries, self.names)


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer /v1/completions."""
    has_logprobs = body.logprobs is not None
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    config = body.config(
        max_new_tokens=max(1, max_tokens),
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=(body.logprobs or 0) if body.echo and has_logprobs else False,
    )
    names = TokenNames(service.engine.tokenizer, body.return_tokens_as_token_ids)
    options = {"echo": body.echo, "allow_special": body.allow_special}
    options["add_special_tokens"] = body.add_special_tokens
    choices = await _encode(service, body, as_list(body.prompt), max_tokens, **options)
    return await _respond(Answer(service, request, body, choices, names, config, has_logprobs))


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer /v1/chat/completions."""
    if body.top_logprobs and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    choices, config = await prepare_reply(service, body, body.messages, body)
    names = TokenNames(service.engine.tokenizer, body.return_tokens_as_token_ids)
    return await _respond(ChatAnswer(service, request, body, choices, names, config, body.logprobs))


async def prepare_reply(
    service: Service,
    body: GenerationBody,
    messages: Sequence[Message],
    options: TemplateOptions | None = None,
    *,
    param: str = "messages",
) -> tuple[list[Choice], GenerationConfig]:
    """Return the replies to be generated to a conversation, and the engine's options."""
    ids = await encode_messages(
        service,
        messages,
        options or TemplateOptions(),
        param=param,
        add_special_tokens=body.add_special_tokens,
    )
    assert service.template is not None and service.engine.tokenizer is not None
    room = max(1, service.engine.runner.config.n_positions - len(ids))
    max_tokens = getattr(body, body.length_field) or room
    config = body.config(
        service.template.end_ids(service.engine.tokenizer),
        max_new_tokens=max_tokens,
        top_logprobs=body.top_logprobs or 0,
    )
    return await _encode(service, body, [ids], max_tokens, param=param), config


async def encode_messages(
    service: Service,
    messages: Sequence[Message],
    options: TemplateOptions,
    *,
    param: str,
    add_special_tokens: bool | None,
) -> list[int]:
    """Return the ids of a conversation as the model's template writes it.

    With `add_special_tokens` they begin with the tokenizer's `begin_ids`, as other texts do.
    """
    from tiedgpt.data.templates import encode_pieces

    template, tokenizer = service.template, service.engine.tokenizer
    if template is None or tokenizer is None:
        problem = "this model has no chat template: use /v1/completions"
        raise APIError(400, problem, param=param, code="no_chat_template")
    if options.continue_final_message and options.add_generation_prompt:
        both = ("continue_final_message", "add_generation_prompt")
        raise UserError("exclude each other", option=both)
    roles = [*template.roles, *(["developer"] if "system" in template.roles else [])]
    for message in messages:
        if message.role not in roles:
            problem = f"there is no role {message.role!r}: use {', '.join(roles)}"
            raise APIError(400, f"{param}: {problem}", param=param)
    write = template.prompt if options.add_generation_prompt is not False else template.pieces
    write = template.continuation if options.continue_final_message else write
    conversation = [message.for_template() for message in messages]
    try:
        ids, _ = await asyncio.to_thread(lambda: encode_pieces(write(conversation), tokenizer))
    except UserError as error:
        raise APIError(400, f"{param}: {error}", param=param) from None
    begin = tokenizer.begin_ids if add_special_tokens else []
    return ids if ids[: len(begin)] == begin else [*begin, *ids]


async def _encode(
    service: Service,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    max_tokens: int,
    **options: Any,
) -> list[Choice]:
    """Check the fields of both APIs; return the texts to be generated, as `encode_prompts`."""
    service.require_model(body.model)
    if len(prompts) * body.n > service.max_choices:
        problem = f"must be at most {service.max_choices}, got {len(prompts)} x {body.n}"
        raise APIError(400, f"the number of prompts times n {problem}", param="prompt")
    slides = body.context_end == "slide"
    longest = MAX_CONTEXTS * service.engine.runner.config.n_positions
    if slides and max_tokens > longest:
        message = f"must be at most {longest:,} if the context slides, got {max_tokens:,}"
        raise APIError(400, f"{body.length_field} {message}", param=body.length_field)
    room = None if slides else max_tokens
    encode = partial(encode_prompts, n=body.n, room=room, length_field=body.length_field)
    return await asyncio.to_thread(encode, service.engine, prompts, **options)


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
    usage = answer.final_usage()
    choices = await asyncio.to_thread(
        lambda: [answer.whole_choice(*choice) for choice in enumerate(answer.choices)]
    )
    return JSONResponse({**head, "choices": choices, "usage": usage, **answer.fields_of_prompt()})


async def _events(
    answer: Answer, stream: RequestStream, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Yield server-sent events: pieces of texts, perhaps the usage, and the end.

    A text's first event comes with its first token, its last event with its last token.
    """
    options = answer.body.stream_options or StreamOptions()
    counts = [0] * len(answer.choices)
    opened, ended = set[int](), set[int]()

    def event(*choices: dict[str, Any], **more: Any) -> bytes:
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            usage = {"usage": answer.usage(sum(counts))}
        return encode_event({**head, "choices": choices, **usage, **more})

    try:
        async for index, token in stream:
            choice = answer.choices[index]
            if index not in opened:
                opened.add(index)
                if delta := answer.first_delta(choice):
                    logprobs = None
                    if answer.has_prompt_logprobs and token is not None:
                        entries = await asyncio.to_thread(
                            prompt_entries, choice, token, answer.names
                        )
                        logprobs = answer.logprobs(entries)
                    content = answer.choice(index, delta, logprobs, prompt_ids=choice.prompt_ids)
                    yield event(content, **answer.fields_of_prompt())
            if token is None:
                if index not in ended:
                    stream.require_finished(choice.result)
                    yield event(answer.choice(index, answer.delta(""), end=choice.result))
                continue
            is_first, counts[index] = not counts[index], counts[index] + 1
            if not answer.has_text:
                continue
            logprobs = None
            if answer.has_logprobs:
                logprobs = answer.logprobs([token_entry(choice, token)])
            text = answer.names.piece(token, is_first=is_first)
            end = token if token.finish_reason in FINISH else None
            if end is not None:
                ended.add(index)
            if text or logprobs or end is not None or answer.body.return_token_ids:
                delta = answer.delta(text)
                yield event(answer.choice(index, delta, logprobs, end=end, token_ids=[token.id]))
        usage = answer.final_usage()
    except Exception as error:
        yield encode_event(stream_error(error).content)
        return
    if options.include_usage:
        yield event(usage=usage)
    yield b"data: [DONE]\n\n"


def stream_error(error: Exception) -> APIError:
    """Return the error that ends a stream; a bug is logged."""
    if (refusal := api_error(error)).status == 500:
        error_log.error("a stream failed", exc_info=error)
    return refusal


def encode_event(content: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + text.encode() + b"\n\n"
