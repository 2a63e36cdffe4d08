"""The requests: every field, its type and its limits. Unknown fields are refused.

Names and defaults are OpenAI's; fields beyond OpenAI's are marked, and come as `extra_body` from
its client. A field's description completes "must be" in the error that names it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from tiedgpt.errors import UserError
from tiedgpt.infer.options import GenerationConfig
from tiedgpt.inspect.registry import Inspection

MAX_FIELDS = 300
"""Fields of any object: each that is wrong would be an error."""
MAX_CONSTRAINT = 1 << 16
"""Characters of a regular expression, a schema or a grammar."""


def _require_few_fields(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"must have at most {MAX_FIELDS} fields")
    return value


def as_list(value: Any) -> list[Any]:
    """Return a list of prompts, inputs or stops; a single one becomes a list of one."""
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [] if value is None else [value] if is_one else value


Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(fail_fast=True)]
Prompt = str | Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=128, fail_fast=True)],
    Field(description="a text, ids >= 0, or a list of 1 to 128 of either"),
]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=4)] | None,
    Field(description="a text of 1 to 256 characters, or a list of at most 4"),
]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=300, description="an object of at most 300 ids and numbers, -100 to 100"),
    BeforeValidator(_require_few_fields),
    AfterValidator(lambda given: {int(id): bias for id, bias in given.items()}),
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**63)]
Constraint = Annotated[str, Field(max_length=MAX_CONSTRAINT)]
Schema = Annotated[
    Constraint | dict[str, Any], Field(description="a JSON schema, as JSON or an object")
]
Name = Annotated[str, Field(max_length=512)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _checked = model_validator(mode="before")(_require_few_fields)


class NamedBody(Body):
    """Requests that OpenAI's clients send with the model's name."""

    model: Name | None = None
    user: Name | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JSONSchema(Body):
    """A named JSON schema."""

    name: Name = ""
    description: Name | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def schema_of(self) -> dict[str, Any] | None:
        """Return the schema that is asked for."""
        if self.type == "json_schema" and self.json_schema is None:
            raise UserError("must have a json_schema", option="response_format")
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class GenerationBody(NamedBody):
    """The fields of both completions and chat completions."""

    n: int = Field(1, ge=1, le=8)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    stop: Stops = None
    seed: Seed | None = None
    # Accepted for OpenAI's clients, without effect:
    metadata: dict[Name, Name] | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's:
    top_k: Count | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    regex: Constraint | None = None
    json_schema: Schema | None = None
    grammar: Constraint | None = None

    ENGINE_OPTIONS: ClassVar = (
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"),
        *("top_k", "min_p", "repetition_penalty", "regex", "grammar"),
    )

    def config(self, **options: Any) -> GenerationConfig:
        """Return the engine's options; contradictions raise `UserError`."""
        schema: Any = self.response_format.schema_of() if self.response_format else None
        if schema is not None and self.json_schema is not None:
            raise UserError("response_format and json_schema exclude each other", hint="omit one")
        schema = self.json_schema if schema is None else schema
        if isinstance(schema, dict) and len(json.dumps(schema)) > MAX_CONSTRAINT:
            message = f"must have at most {MAX_CONSTRAINT:,} characters"
            raise UserError(message, option="json_schema")
        options |= {name: getattr(self, name) for name in self.ENGINE_OPTIONS}
        return GenerationConfig(stop=as_list(self.stop), json_schema=schema, **options)


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts = ""
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: None = None
    # Beyond OpenAI's:
    return_tokens_as_token_ids: bool = False
    allow_special: bool = Field(
        False, description="read <|endoftext|> and other special tokens in a text as such"
    )


class Part(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Name
    content: str | Annotated[list[Part], Field(max_length=64)] = Field(
        description='a text, or a list of parts {"type": "text", "text": ...}'
    )
    name: Name | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates take it; `developer` is OpenAI's name for system."""
        parts = [] if isinstance(self.content, str) else [part.text for part in self.content]
        content = self.content if isinstance(self.content, str) else "".join(parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    # Accepted for OpenAI's clients, without effect:
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    tool_choice: Literal["none"] | None = Field(None, description="none: tools are not supported")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class EmbeddingRequest(NamedBody):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    # Beyond OpenAI's:
    pooling: Literal["mean", "last"] = "mean"


class TokenizeRequest(NamedBody):
    """POST /tokenize; no tokenizer here adds special tokens."""

    prompt: str
    add_special_tokens: bool = False


class DetokenizeRequest(NamedBody):
    """POST /detokenize."""

    tokens: Ids


class TextBody(Body):
    """The input of an inspection: a text, or ids."""

    text: str | None = None
    ids: Ids | None = None


def inspection_body(inspection: Inspection) -> type[Body]:
    """Return the request of POST /inspect/NAME, with the inspection's own options and limits."""
    fields: dict[str, Any] = {}
    for name, option in inspection.options.items():
        if option.is_served and not option.is_of_table:
            number = Annotated[int, Field(ge=option.least, le=option.most)]
            hint = {int: number, int | str: number | Name}.get(option.type, option.type)
            fields[name] = (hint, ...) if option.is_required else (hint | None, None)
    base = TextBody if inspection.reads_text else Body
    return create_model(f"{inspection.name}_request", __base__=base, **fields)
