"""The requests: every field, its type and its limits. Unknown fields are refused.

Names and defaults are OpenAI's. Fields beyond OpenAI's are marked; clients send them as
`extra_body`.
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
    WithJsonSchema,
    model_validator,
)

from tiedgpt.errors import UserError
from tiedgpt.infer.options import GenerationConfig

MOST_FIELDS = 48
MOST_PROMPTS = 128
MOST_STOPS, MOST_STOP_LENGTH = 4, 256
MOST_BIASES = 300
MOST_MESSAGES = 1024
MOST_FORM = 1 << 16
"""Characters of a regular expression, a schema or a grammar."""
ONE = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _prompts(value: Any) -> list[str | list[int]]:
    """Return prompts as a list, each a text or ids; checked by hand: a union's errors are long."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) and all(map(_is_id, value)):
        return [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_PROMPTS:
        raise ValueError(f"must be a text, ids, or a list of 1 to {MOST_PROMPTS} of them")
    for one in value:
        if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
            raise ValueError("must be a text, ids >= 0, or a list of either")
    return value


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > MOST_STOPS:
        raise ValueError(f"must be a text or a list of at most {MOST_STOPS} texts")
    if not all(isinstance(text, str) and 0 < len(text) <= MOST_STOP_LENGTH for text in texts):
        raise ValueError(f"must be texts of 1 to {MOST_STOP_LENGTH} characters")
    return texts


def _biases(value: Any) -> dict[int, float]:
    given = {} if value is None else value
    if not isinstance(given, dict) or len(given) > MOST_BIASES:
        raise ValueError(f"must be an object of at most {MOST_BIASES} ids")
    found = {}
    for id, bias in given.items():
        if not (id.isascii() and id.isdigit() and len(id) < 10):
            raise ValueError("must have ids as its keys")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("must have numbers from -100 to 100")
        found[int(id)] = float(bias)
    return found


def _id_list(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise ValueError("must be a list of ids >= 0")
    return value


def _unsupported(value: Any) -> None:
    if value is not None:
        raise ValueError("is not supported: leave it out")


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [*ONE["anyOf"], {"type": "array", "items": ONE}]}),
]
Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MOST_STOP_LENGTH},
                {"type": "array", "maxItems": MOST_STOPS, "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]
Biases = Annotated[
    dict[int, float],
    BeforeValidator(_biases),
    WithJsonSchema({"type": "object", "maxProperties": MOST_BIASES}),
]
Ids = Annotated[list[int], BeforeValidator(_id_list), WithJsonSchema(IDS_SCHEMA)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**63)]
Form = Annotated[str, Field(max_length=MOST_FORM)]
Unsupported = Annotated[Any, BeforeValidator(_unsupported), WithJsonSchema({"type": "null"})]


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MOST_FIELDS:  # each would be an error
            raise ValueError(f"must have at most {MOST_FIELDS} fields")
        return data


class Named(Body):
    """Requests that OpenAI's clients send with the model's name."""

    model: str | None = Field(None, max_length=512)
    user: str | None = Field(None, max_length=512)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JSONSchema(Body):
    """A named JSON schema."""

    name: str = Field("", max_length=64)
    description: str | None = Field(None, max_length=1024)
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class Generating(Named):
    """What completions and chat completions share."""

    n: int = Field(1, ge=1, le=8)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases = {}
    stop: Stops = []
    seed: Seed | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's:
    top_k: int | None = Field(None, ge=1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    regex: Form | None = None
    json_schema: Form | dict[str, Any] | None = None
    grammar: Form | None = None
    logprob_token_ids: Ids = Field([], max_length=64)

    SAME: ClassVar = (
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "stop"),
        *("seed", "top_k", "min_p", "repetition_penalty", "regex", "grammar"),
    )

    def config(self, **options: Any) -> GenerationConfig:
        """Return the engine's options; what contradicts itself is a `UserError`."""
        given = {name: getattr(self, name) for name in self.SAME}
        schema = self.json_schema
        if self.response_format is not None and self.response_format.type != "text":
            if schema is not None:
                raise UserError("response_format and json_schema exclude each other: omit one")
            asked = self.response_format.json_schema
            schema = {"type": "object"}
            if self.response_format.type == "json_schema":
                if asked is None:
                    raise UserError("response_format must have a json_schema")
                schema = asked.schema_
        if isinstance(schema, dict) and len(json.dumps(schema)) > MOST_FORM:
            raise UserError(f"json_schema must have at most {MOST_FORM:,} characters")
        return GenerationConfig(**given, json_schema=schema, **options)


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: Prompts = [""]
    max_tokens: int | None = Field(None, ge=0, le=1 << 31)
    best_of: int | None = Field(None, ge=1, le=8)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: Unsupported = None
    # Beyond OpenAI's:
    return_tokens_as_token_ids: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs are asked for; 0 asks for those of the tokens alone."""
        return self.logprobs is not None


class Part(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: str = Field(max_length=64)
    content: str | Annotated[list[Part], Field(max_length=64)]
    name: str | None = Field(None, max_length=64)

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs are asked for."""
        return self.logprobs


class EmbeddingRequest(Named):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Unsupported = None
    # Beyond OpenAI's:
    pooling: Literal["mean", "last"] = "mean"


class TokenizeRequest(Named):
    """POST /tokenize."""

    prompt: str
    add_special_tokens: bool = False


class DetokenizeRequest(Named):
    """POST /detokenize."""

    tokens: Ids


class Inspected(Body):
    """What every function of `inspect` but vocabulary reads: a text, or ids."""

    text: str | None = None
    ids: Ids | None = None


class PositionsRequest(Inspected):
    """POST /inspect/positions."""

    top: int = Field(10, ge=1, le=100)
    poke: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    poke_with: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)


class LensRequest(Inspected):
    """POST /inspect/lens."""

    top: int = Field(5, ge=1, le=50)
    position: int = Field(-1, ge=-(1 << 31), lt=1 << 31)
    after_attention: bool = False


class DotRequest(Inspected):
    """POST /inspect/dot."""

    top: int = Field(10, ge=1, le=1000)
    position: int = Field(-1, ge=-(1 << 31), lt=1 << 31)


class VocabularyRequest(Body):
    """POST /inspect/vocabulary."""

    own_rank_rows: int = Field(1024, ge=0, le=8192)


class GradientSplitRequest(Inspected):
    """POST /inspect/gradient_split."""


class AttentionRequest(Inspected):
    """POST /inspect/attention."""

    layer: int = Field(0, ge=-(1 << 31), lt=1 << 31)


class AblateRequest(Inspected):
    """POST /inspect/ablate."""

    mode: Literal["zero", "mean"] = "zero"
