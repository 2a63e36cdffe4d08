"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from tiedgpt.errors import NoRoomError, TiedGPTError
from tiedgpt.infer import ClosedError, QueueFullError

RETRY_SECONDS = 1
"""What a client is told to wait for when too many requests wait."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OPTIONS = {
    "max_new_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
}
"""Options of the engine that the API calls otherwise."""


class APIError(Exception):
    """A request that is refused, with what the client is told."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def content(self) -> dict[str, Any]:
        """The body of the response."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Return the response."""
        headers = dict(headers or {})
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_SECONDS)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.content, self.status, headers)


def api_error(error: Exception) -> APIError:
    """Return what a client is told of an error; of one that is not ours, nothing in particular."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return APIError(429, "too many requests wait: try again later", code="queue_full")
    if isinstance(error, ClosedError):
        return APIError(503, "the server is ending", code="shutting_down")
    if isinstance(error, NoRoomError):
        return APIError(503, str(error), code="no_memory")
    if isinstance(error, TiedGPTError):
        message = error.problem(_field) + (f": {error.hint}" if error.hint else "")
        return APIError(400, message, param=_field(error.options[0]) if error.options else None)
    return APIError(500, "the server failed; its log says more", code="internal_error")


def _field(option: str) -> str:
    """Return what the API calls an option of the engine."""
    return OPTIONS.get(option, option)
