"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tiedgpt.errors import NoRoomError, TiedGPTError
from tiedgpt.infer import ClosedError, QueueFullError
from tiedgpt.names import OTHER_NAMES
from tiedgpt.serve.foreign_fields import REMEDIES
from tiedgpt.serve.schemas import EXPECTED

RETRY_SECONDS = 1
"""Seconds after which a client may try again when too many requests wait."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OPTIONS = {
    "max_new_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "include_stop": "include_stop_str_in_output",
}
"""The API's name of each engine option that has another name there."""


class APIError(Exception):
    """The refusal of a request: the status and the error that the client gets."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def content(self) -> dict[str, Any]:
        """The body of the response."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error_type = TYPES.get(self.status, default)
        fields = {"message": self.message, "type": error_type}
        return {"error": fields | {"param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Return the response."""
        headers = dict(headers or {})
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_SECONDS)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.content, self.status, headers)


def api_error(error: Exception, request: Request | None = None) -> APIError:
    """Return the error that a client gets; the details of a bug are in the log only."""
    match error:
        case APIError():
            return error
        case RequestValidationError():
            return _body_error(error)
        case HTTPException() if request is not None:
            return _http_error(request, error)
        case QueueFullError():
            return APIError(429, "too many requests wait: try again later", code="queue_full")
        case ClosedError():
            return APIError(503, "the server is ending", code="shutting_down")
        case NoRoomError():
            return APIError(503, str(error), code="no_memory")
        case TiedGPTError():
            message = error.problem(_field) + (f": {error.hint}" if error.hint else "")
            return APIError(400, message, param=_field(error.options[0]) if error.options else None)
    return APIError(500, "the server failed; its log says more", code="internal_error")


def _field(option: str) -> str:
    """Return the API's name of an option of the engine."""
    return OPTIONS.get(option, option)


def _body_error(error: RequestValidationError) -> APIError:
    """Return an error that names the path of the first wrong field, and does not repeat values."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body must be JSON: {first['ctx']['error']}", code="invalid_json")
    path, value = list[str](), error.body
    keys = first["loc"][1:]
    for number, key in enumerate(keys):  # names of types in a union are no fields
        is_inside = isinstance(value, dict | list)
        has_key = key in value if isinstance(value, dict) else is_inside and isinstance(key, int)
        if has_key or (first["type"] == "missing" and key == first["loc"][-1]):
            path.append(str(key)[:64])
            value = value[key] if has_key else None
        inside = [value, *(value if isinstance(value, list) else [])]
        objects = [item for item in inside if isinstance(item, dict)]
        if any(name in item for item in objects for name in keys[number + 1 :]):
            continue  # the wrong field is inside
        if key in EXPECTED and first["type"] not in ("missing", "unknown_field", "value_error"):
            must = f"must be {EXPECTED[key]}"
            return APIError(400, f"{'.'.join(path)} {must}", param=".".join(path))
    if first["type"] == "unknown_field":
        path.append(first["ctx"]["name"][:64])
        problem = _unknown_field(first["ctx"]["name"], first["ctx"]["fields"])
        return APIError(400, f"{'.'.join(path)} {problem}", param=".".join(path))
    if not path:
        return APIError(400, "the body must be a JSON object", code="invalid_json")
    problem = first["msg"].removeprefix("Value error, ").replace("valid dictionary", "JSON object")
    problem = re.sub(r"^\w+ should\b", "must", problem)
    if first["type"] == "missing":
        problem = "is required"
    return APIError(400, f"{'.'.join(path)} {problem}", param=".".join(path))


def _unknown_field(name: str, fields: Collection[str]) -> str:
    """Return the problem with a field that the request lacks, and what to use instead."""
    if name in REMEDIES:
        return f"is not supported: {REMEDIES[name]}"
    option = _field(OTHER_NAMES["GenerationConfig"].get(name, name))
    options = [option] if option != "max_tokens" else ["max_tokens", "max_output_tokens"]
    near = [option for option in options if option in fields]
    near = near or difflib.get_close_matches(name.lower(), fields, n=1)
    return "is not a field of this request" + (f": use {near[0]}" if near else "")


def _http_error(request: Request, error: HTTPException) -> APIError:
    """Return a sentence for an error of the framework."""
    method, path, cause = request.method, request.url.path[:200], error.__cause__
    if error.status_code == 404:
        return APIError(404, f"there is no route {path}: GET /openapi.json lists all")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return APIError(405, f"{path} takes {allowed}, not {method}")
    problem = str(error.detail)
    if isinstance(cause, UnicodeDecodeError):
        problem = "the body must be UTF-8"
    elif isinstance(cause, RecursionError):
        problem = "the body must be nested less deeply"
    elif isinstance(cause, ValueError):
        problem = f"the body must be JSON: {cause}"
    return APIError(error.status_code, problem, code="invalid_json")


def add_error_handlers(app: FastAPI, hidden: Mapping[str, str]) -> None:
    """Answer errors in OpenAI's form; `hidden`: paths of this machine, and what replaces them."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        refusal = api_error(error, request)
        for path, replacement in hidden.items():
            refusal.message = refusal.message.replace(path, replacement)
        return refusal.response(getattr(error, "headers", None))

    for error_class in (APIError, TiedGPTError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(error_class, on_error)
