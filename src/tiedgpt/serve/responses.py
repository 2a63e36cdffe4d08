"""/v1/responses: OpenAI's newer API, for text in and text out, streamed and not.

The conversation is the request's own: nothing is stored, so the earlier messages, with the output
items of earlier answers among them, come with each request.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BeforeValidator, Field

from tiedgpt.errors import UserError
from tiedgpt.infer import Completion
from tiedgpt.serve import foreign_fields
from tiedgpt.serve.completions import Service, encode_event, prepare_reply, stream_error
from tiedgpt.serve.logprobs import TokenNames, chat_logprobs, token_entry
from tiedgpt.serve.schemas import (
    MAX_MESSAGES,
    Body,
    Count,
    GenerationBody,
    JSONSchema,
    Message,
    Messages,
    Name,
    ResponseFormat,
    without_nulls,
)
from tiedgpt.serve.streams import Choice, EventStream, RequestStream

Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


def _as_messages(value: Any) -> Any:
    """Return the messages of an input, which may be the user's text."""
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_MESSAGES
    if not isinstance(value, str) and not (is_list and all(isinstance(x, dict) for x in value)):
        raise ValueError(f"must be a text or a list of 1 to {MAX_MESSAGES:,} messages")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _refuse_ids(value: bool) -> bool:
    if value:
        remedy = 'ask for "include": ["message.output_text.logprobs"], which has the ids'
        raise ValueError(f"must be false: {remedy}")
    return value


class TextFormat(JSONSchema):
    """The form of the answer, with its schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Body):
    """The options of the answer's text."""

    labels = frozenset({"verbosity"})
    format: TextFormat = TextFormat.model_validate({})


class ResponsesRequest(GenerationBody):
    """POST /v1/responses."""

    labels = foreign_fields.LABELS | foreign_fields.RESPONSES_LABELS
    length_fields = ("max_output_tokens",)
    neutral = foreign_fields.RESPONSES_NEUTRAL
    input: Annotated[Messages, BeforeValidator(_as_messages)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Annotated[dict[Name, Name], BeforeValidator(without_nulls)] | None = None
    text: TextOptions = TextOptions()
    include: list[Included] = Field([])
    top_logprobs: int | None = Field(None, ge=0, le=20)
    n: Literal[1] = 1
    num_beams: Literal[1] = 1
    return_token_ids: Annotated[bool, AfterValidator(_refuse_ids)] = False

    def messages(self) -> list[Message]:
        """Return the conversation, the instructions first."""
        if self.instructions is None:
            return self.input
        return [Message(role="system", content=self.instructions), *self.input]


async def respond(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Answer /v1/responses."""
    text = body.text.format
    if body.response_format is not None and "format" in body.text.model_fields_set:
        if (text.type, body.response_format.type) != ("text", "text"):
            raise UserError("exclude each other", option=("text.format", "response_format"))
    elif text.type != "text":
        if text.type == "json_schema" and "schema_" not in text.model_fields_set:
            raise UserError("is required", option="text.format.schema")
        body.response_format = ResponseFormat(type=text.type, json_schema=text)
    (choice,), config = await prepare_reply(service, body, body.messages(), param="input")
    stream = RequestStream(service.engine, service.metrics, [choice])
    await stream.submit(config)
    answer = ResponsesAnswer(service, request, body, choice)
    if body.stream:
        return EventStream(answer.events(stream), stream)
    await stream.wait(request)
    return JSONResponse(answer.response(choice.result))


@dataclass(frozen=True)
class ResponsesAnswer:
    """The answer to a valid request."""

    service: Service
    request: Request
    body: ResponsesRequest
    choice: Choice
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def content(self, text: str) -> dict[str, Any]:
        """Return the text as a part of the message."""
        logprobs = self.logprobs(self.choice.tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, tokens: list[Any]) -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens, if they were asked for."""
        if "message.output_text.logprobs" not in self.body.include and not self.body.top_logprobs:
            return []
        names = TokenNames(self.service.engine.tokenizer, self.body.return_tokens_as_token_ids)
        entries = [token_entry(self.choice, token) for token in tokens]
        result: list[dict[str, Any]] = chat_logprobs(entries, names)["content"]
        return result

    def message(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        """Return the message, which is the one output item."""
        item = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        return item | {"status": status, "content": list(parts)}

    def response(self, done: Completion | None = None) -> dict[str, Any]:
        """Return the answer; without `done`, an empty one in progress."""
        body, status, usage, output, why = self.body, "in_progress", None, list[Any](), None
        text_format = body.text.format.model_dump(exclude_unset=True, by_alias=True)
        if done is not None:
            status = "completed" if done.finish_reason == "stop" else "incomplete"
            why = None if status == "completed" else {"reason": "max_output_tokens"}
            output, usage = [self.message(status, self.content(done.text))], self.usage(done)
        return {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.created,
            "status": status, "error": None, "incomplete_details": why, "output": output,
            "model": self.service.name, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": {"type": "text", **text_format}},
            "top_logprobs": body.top_logprobs or 0, "tools": [], "tool_choice": "none",
            "parallel_tool_calls": False, "previous_response_id": None, "background": False,
            "store": False, "truncation": "disabled", "usage": usage,
        }  # fmt: skip

    def usage(self, done: Completion) -> dict[str, Any]:
        """Count tokens, also for the log."""
        n_prompt, n_new = len(self.choice.prompt_ids), len(done.ids)
        self.request.state.log_fields |= {"prompt_tokens": n_prompt, "completion_tokens": n_new}
        cached = {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": cached,
            "output_tokens": n_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_prompt + n_new,
        }

    async def events(self, stream: RequestStream) -> AsyncIterator[bytes]:
        """Yield server-sent events: the beginning, pieces of the text, and the whole answer."""
        number = -1

        def event(name: str, **content: Any) -> bytes:
            nonlocal number
            number += 1
            return encode_event({"type": name, "sequence_number": number, **content}, name)

        item = {"output_index": 0, "item_id": f"msg_{self.id}", "content_index": 0}
        try:
            for name in ("created", "in_progress"):
                yield event(f"response.{name}", response=self.response())
            beginning = self.message("in_progress")
            yield event("response.output_item.added", output_index=0, item=beginning)
            yield event("response.content_part.added", **item, part=self.content(""))
            async for _, token in stream:
                if token is None:
                    continue
                self.choice.tokens.append(token)
                logprobs = self.logprobs([token])
                if token.text or logprobs:
                    piece = {"delta": token.text, "logprobs": logprobs}
                    yield event("response.output_text.delta", **item, **piece)
            stream.require_finished(self.choice.result)
            response = self.response(self.choice.result)
            (message,) = response["output"]
            (content,) = message["content"]
            text = {"text": content["text"], "logprobs": content["logprobs"]}
            yield event("response.output_text.done", **item, **text)
            yield event("response.content_part.done", **item, part=content)
            yield event("response.output_item.done", output_index=0, item=message)
            yield event(f"response.{response['status']}", response=response)
        except Exception as error:
            refusal = stream_error(error)
            error_fields = ("code", "message", "param")
            yield event("error", **{name: getattr(refusal, name) for name in error_fields})
