"""The requests: every field, its type and its limits. Unknown fields are refused.

Every option of generation that the command line has is a field, with the bounds and the help of
`GenerationConfig`. Names and defaults are OpenAI's; its client sends other fields as `extra_body`.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import BOUNDS, GenerationConfig
from tiedgpt.inspect.registry import Inspection

MAX_FIELDS = 300
"""Fields of any object: each that is wrong would be an error."""
MAX_CONSTRAINT = 1 << 16
"""Characters of a regular expression, a schema or a grammar."""
MAX_TOKENS = 1 << 31
EXPECTED = {
    "prompt": "a text, ids >= 0, or a list of 1 to 128 of either",
    "input": "a text, ids >= 0, or a list of 1 to 128 of either",
    "stop": "a text of 1 to 256 characters, or a list of at most 4",
    "logit_bias": "an object of at most 300 ids and numbers, -100 to 100",
    "json_schema": "a JSON schema, as JSON or an object",
    "content": 'a text, or a list of parts {"type": "text", "text": ...}',
    "tool_choice": "none: tools are not supported",
}
"""Descriptions of the fields that have several types, for errors: "must be ..."."""


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
Prompts = Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=128, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=300),
    BeforeValidator(_require_few_fields),
    AfterValidator(lambda biases: {int(id): bias for id, bias in biases.items()}),
]
Constraint = Annotated[str, Field(max_length=MAX_CONSTRAINT)]
Name = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**63)]
LIMITS: dict[str, Any] = {
    "n": Annotated[int, Field(ge=1, le=8)],
    "temperature": Annotated[float, Field(ge=0, le=2)],
    "presence_penalty": Annotated[float, Field(ge=-2, le=2)],
    "frequency_penalty": Annotated[float, Field(ge=-2, le=2)],
    "repetition_penalty": Annotated[float, Field(gt=0, le=10)],
    "seed": Seed,
    "logit_bias": Biases,
    "stop": Stop | Annotated[list[Stop], Field(max_length=4)],
    "regex": Constraint,
    "json_schema": Constraint | dict[str, Any],
    "grammar": Constraint,
}
"""Options whose type or limits are OpenAI's or the server's own, not those of the engine."""


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


OPTIONS = [
    *(field.name for field in fields(GenerationConfig) if "help" in field.metadata),
    "logit_bias",
]
OPTIONS.remove("max_new_tokens")  # each request has its own max_tokens
"""Options of generation that are fields of the same name: those of the command line."""


def _option_fields() -> dict[str, Any]:
    """Return the type and the default of each of the `OPTIONS`."""
    hints, options = get_type_hints(GenerationConfig), GenerationConfig.__dataclass_fields__
    result: dict[str, Any] = {}
    for name in OPTIONS:
        hint = LIMITS.get(name, hints[name])
        if name not in LIMITS and name in BOUNDS:
            low, high = (None if math.isinf(bound) else bound for bound in BOUNDS[name])
            hint = Annotated[hint, Field(ge=low, le=high)]
        about = options[name].metadata.get("help")
        optional = (hint | None, Field(None, description=about))
        result[name] = (hint, Field(1, description=about)) if name == "n" else optional
    return result


_OptionsBody: Any = create_model("_OptionsBody", __base__=NamedBody, **_option_fields())


class GenerationBody(_OptionsBody):  # type: ignore[misc]
    """The fields of both completions and chat completions."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    # Accepted for OpenAI's clients, without effect:
    metadata: dict[Name, Name] | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None

    def config(self, **options: Any) -> GenerationConfig:
        """Return the engine's options for one text; contradictions raise `UserError`."""
        values = {name: getattr(self, name) for name in OPTIONS} | {"n": 1} | options
        if self.response_format and (schema := self.response_format.schema_of()) is not None:
            if self.json_schema is not None:
                raise UserError("exclude each other", option=("response_format", "json_schema"))
            values["json_schema"] = schema
        schema = values["json_schema"]
        if isinstance(schema, dict) and len(json.dumps(schema)) > MAX_CONSTRAINT:
            message = f"must have at most {MAX_CONSTRAINT:,} characters"
            raise UserError(message, option="json_schema")
        config = GenerationConfig(**values | {"stop": as_list(self.stop)})
        for name in ("n", "stream", "logprobs") if config.num_beams > 1 else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise UserError("exclude each other", option=("num_beams", name))
        return config


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts = ""
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: None = None
    # Beyond OpenAI's:
    return_tokens_as_token_ids: bool = False
    allow_special: bool = Field(
        False, description="read <|endoftext|> and other special tokens in a text as such"
    )


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Name
    content: str | Annotated[list[TextPart], Field(max_length=64)]
    name: Name | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates take it; `developer` is OpenAI's name for system."""
        texts = self.content if isinstance(self.content, str) else [x.text for x in self.content]
        content = "".join(texts)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    # Accepted for OpenAI's clients, without effect:
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    tool_choice: Literal["none"] | None = None
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
            names = AliasChoices(name, *([option.former_name] if option.former_name else []))
            default: Any = ... if option.is_required else None
            hint = hint if option.is_required else hint | None
            fields[name] = (hint, Field(default, validation_alias=names))
    base = TextBody if inspection.reads_text else Body
    return create_model(f"{inspection.name}_request", __base__=base, **fields)
