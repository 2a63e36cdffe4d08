"""The requests: every field, its type and its limits.

At every level, a field that is null is absent, one without effect (`foreign_fields`) is dropped,
and an unknown one is refused. Every option of generation that the command line has is a field, with
the bounds and the help of `GenerationConfig`. Names and defaults are OpenAI's; its client sends
other fields as `extra_body`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from dataclasses import Field as DataclassField
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

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
from pydantic_core import PydanticCustomError

from tiedgpt.errors import UserError
from tiedgpt.infer.generation_config import GenerationConfig
from tiedgpt.inspect.registry import INSPECTIONS, Inspection
from tiedgpt.serve import foreign_fields

MAX_FIELDS = 300
"""Fields of any object: each that is wrong would be an error."""
MAX_CONSTRAINT = 1 << 16
"""Characters of a regular expression, a schema or a grammar."""
MAX_TOKENS = 1 << 31
MAX_MESSAGES = 1024
"""Messages of a conversation."""
EXPECTED = {
    **{
        name: "a token's id >= 0, or its text"
        for inspection in INSPECTIONS.values()
        for name, option in inspection.options.items()
        if option.type == int | str
    },
    "prompt": "a text, ids >= 0, or a list of 1 to 128 of either",
    "input": "a text, ids >= 0, or a list of 1 to 128 of either",
    "stop": "a text of 1 to 256 characters, or a list of at most 64",
    "logit_bias": "an object of at most 300 ids and numbers, -100 to 100",
    "json_schema": "a JSON schema, as JSON or an object",
    "content": 'a text, or a list of parts {"type": "text", "text": ...}',
}
"""Descriptions of the fields that have several types, for errors: "must be ..."."""


def without_nulls(value: Any) -> Any:
    """Return an object's fields, or a list's items, without those that are null."""
    if isinstance(value, list):
        return [item for item in value if item is not None]
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_FIELDS:
        raise ValueError(f"must have at most {MAX_FIELDS} fields")
    return {name: field for name, field in value.items() if field is not None}


def as_list(value: Any) -> list[Any]:
    """Return a list of prompts, inputs or stops; a single one becomes a list of one."""
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [] if value is None else [value] if is_one else value


def _require_json(value: Any) -> Any:
    """Return a value; `ValueError` for NaN, infinity or a lone surrogate inside."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise ValueError("must be JSON: without NaN, infinity and lone surrogates") from None
    return value


Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(fail_fast=True)]
Prompt = str | Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Prompts = Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=128, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=300),
    BeforeValidator(without_nulls),
    AfterValidator(lambda biases: {int(id): bias for id, bias in biases.items()}),
]
Constraint = Annotated[str, Field(max_length=MAX_CONSTRAINT)]
Schema = Annotated[dict[str, Any], AfterValidator(_require_json)]
Name = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**63)]
TYPES: dict[str, Any] = {
    "seed": Seed,
    "logit_bias": Biases,
    "stop": Annotated[
        Stop | Annotated[list[Stop], Field(max_length=64)], BeforeValidator(without_nulls)
    ],
    "regex": Constraint,
    "json_schema": Constraint | Schema,
    "grammar": Constraint,
}
"""Options whose type is OpenAI's or the server's own, not that of the engine."""
CONSTRAINTS = {"least": "ge", "most": "le", "above": "gt", "below": "lt"}
"""Pydantic's names of an option's bounds."""


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    labels: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted without effect."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are accepted with these values, without effect."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        """Return the fields that have an effect; raise an error that names an unknown one."""
        value, fields = without_nulls(value), set(cls._names())
        if not isinstance(value, dict):
            return value
        result = {}
        for name, field in value.items():
            if name in fields:
                result[name] = field
            elif not foreign_fields.has_no_effect(name, field, cls.labels, cls.neutral):
                encodable = name.encode(errors="backslashreplace").decode()  # no lone surrogates
                context = {"name": encodable, "fields": sorted(fields)}
                raise PydanticCustomError("unknown_field", "is unknown", context)
        return result

    @classmethod
    def _names(cls) -> Iterator[str]:
        for name, field in cls.model_fields.items():
            alias = field.validation_alias or name
            yield from map(str, alias.choices if isinstance(alias, AliasChoices) else [alias])


class NamedBody(Body):
    """Requests that OpenAI's clients send with the model's name."""

    labels = foreign_fields.LABELS
    model: Name | None = None


class TextIDs(NamedBody):
    """Requests with texts that become ids."""

    add_special_tokens: bool | None = Field(
        None, description="begin as the tokenizer does; default: for texts, not for conversations"
    )


class StreamOptions(Body):
    """Options of a stream."""

    labels = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JSONSchema(Body):
    """A named JSON schema."""

    name: Name = ""
    description: Name | None = None
    schema_: Schema = Field({}, alias="schema")
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


def _add_bounds(hint: Any, option: DataclassField[Any]) -> Any:
    """Return a type with the bounds that the server has for an option."""
    bounds = {CONSTRAINTS[name]: x for name, x in option.metadata.get("served", {}).items()}
    return Annotated[hint, Field(**bounds)] if bounds else hint


def _option_fields() -> dict[str, Any]:
    """Return the type and the default of each of the `OPTIONS`."""
    hints, options = get_type_hints(GenerationConfig), GenerationConfig.__dataclass_fields__
    result: dict[str, Any] = {}
    for name in OPTIONS:
        about = options[name].metadata.get("help")
        hint = TYPES.get(name) or _add_bounds(hints[name], options[name])
        optional = (hint | None, Field(None, description=about))
        result[name] = (hint, Field(1, description=about)) if name == "n" else optional
    return result


_OptionsBody: Any = create_model("_OptionsBody", __base__=TextIDs, **_option_fields())


class GenerationBody(_OptionsBody):  # type: ignore[misc]
    """The fields of both completions and chat completions."""

    neutral = foreign_fields.NEUTRAL
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """The names of the field that limits the length of the text."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's:
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = Field(False, description="leave them out of the text")
    ignore_eos: bool = Field(False, description="continue after the end of text or of a reply")
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def length_field(self) -> str:
        """The name of the field that limits the length of this text."""
        names = [name for name in self.length_fields if getattr(self, name) is not None]
        return (names or self.length_fields)[0]

    def config(self, end_ids: Sequence[int] = (), **options: Any) -> GenerationConfig:
        """Return the engine's options for one text; contradictions raise `UserError`.

        `end_ids` are the template's, which end a reply.
        """
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise UserError("needs stream to be true", option="stream_options")
        values = {name: getattr(self, name) for name in OPTIONS} | {"n": 1} | options
        values |= {
            "stop_ids": [*(self.stop_token_ids or ()), *(() if self.ignore_eos else end_ids)],
            "include_stop": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "min_new_tokens": self.min_tokens,
        }
        if self.min_tokens > options["max_new_tokens"]:
            more = f"{self.min_tokens} is more than {options['max_new_tokens']}"
            fields = ("min_tokens", self.length_field)
            raise UserError(f"contradict each other: {more}", option=fields)
        if self.response_format and (schema := self.response_format.schema_of()) is not None:
            if self.json_schema is not None:
                raise UserError("exclude each other", option=("response_format", "json_schema"))
            values["json_schema"] = schema
        schema = values["json_schema"]
        if isinstance(schema, dict) and len(json.dumps(schema)) > MAX_CONSTRAINT:
            message = f"must have at most {MAX_CONSTRAINT:,} characters"
            raise UserError(message, option="json_schema")
        config = GenerationConfig(**values | {"stop": as_list(self.stop)})
        fields = type(self).model_fields
        for name in fields.keys() & {"n", "stream", "logprobs"} if config.num_beams > 1 else ():
            if getattr(self, name) != fields[name].default:
                raise UserError("exclude each other", option=("num_beams", name))
        return config


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts = ""
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    # Beyond OpenAI's:
    allow_special: bool = Field(
        False, description="read <|endoftext|> and other special tokens in a text as such"
    )


class TextPart(Body):
    """A part of a message's content."""

    labels = foreign_fields.PART_LABELS
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class Message(Body):
    """A message of a conversation; a refusal is the assistant's text, too."""

    labels = foreign_fields.MESSAGE_LABELS
    neutral = foreign_fields.MESSAGE_NEUTRAL
    role: Name
    content: str | Annotated[list[TextPart], Field(max_length=64)]
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _content_of_assistant(cls, value: Any) -> Any:
        """Add an empty text to an assistant's message without content; refuse other objects."""
        if isinstance(value, dict) and value.get("content") is None and "type" not in value:
            for name, remedy in foreign_fields.NO_MESSAGES.items():
                if value.get(name) is not None:
                    raise ValueError(f"has no content: {remedy}")
        if isinstance(value, dict) and value.get("role") == "assistant":
            return value if value.get("content") is not None else value | {"content": ""}
        return value

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates take it; `developer` is OpenAI's name for system."""
        texts = self.content if isinstance(self.content, str) else [x.text for x in self.content]
        content = "".join([*texts, self.refusal])
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class TemplateOptions(Body):
    """How a conversation becomes a prompt, beyond OpenAI's."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="end with the beginning of a reply; default: unless the last continues",
    )
    continue_final_message: bool = Field(
        default=False, description="leave the last message open, so that the model continues it"
    )


class ChatRequest(GenerationBody, TemplateOptions):
    """POST /v1/chat/completions."""

    length_fields = ("max_completion_tokens", "max_tokens")
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class EmbeddingRequest(TextIDs):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    # Beyond OpenAI's:
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="read only so many first tokens; -1: the context"
    )


class TokenizeRequest(TextIDs, TemplateOptions):
    """POST /tokenize: a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool = False


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
        if option.metadata["is_served"] and not option.metadata["is_of_table"]:
            number: Any = _add_bounds(int, option)
            types: dict[Any, Any] = {int: number, int | str: number | Name}
            hint = types.get(option.type, option.type)
            is_required = option.default is MISSING
            fields[name] = (hint, ...) if is_required else (hint | None, None)
    base = TextBody if inspection.reads_text else Body
    return create_model(f"{inspection.name}_request", __base__=base, **fields)
