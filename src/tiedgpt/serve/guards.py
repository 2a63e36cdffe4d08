"""The checks of a request before the application sees it: host, origin, key, size and time.

The guard refuses other hosts than those allowed (a page on the web may point its own name at this
machine), origins of other pages, requests without the key, headers and bodies that are too large,
slow or compressed. No CORS header is ever sent. Each request is one line of JSON in the log, which
holds neither prompts nor keys. HEAD is answered as GET, without the body.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiedgpt.errors import UserError
from tiedgpt.serve.assets import page_files
from tiedgpt.serve.errors import APIError
from tiedgpt.serve.streams import CLIENT_LEFT

OPERATION = ("/health", "/ready", "/metrics", "/version")
"""Routes that are answered while the server ends."""
LOCAL = ("localhost", "127.0.0.1", "::1")
REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""A client's id of a request that is echoed and logged: visible ASCII."""
HOST = re.compile(r"([^\[\]:/?#@\s]+|\[[0-9a-f.]*:[0-9a-f:.]*\])(?::([0-9]{0,5}))?", re.IGNORECASE)
"""A host and perhaps a port; an IPv6 address stands in brackets."""
access_log = logging.getLogger("tiedgpt.serve.access")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a request, and of all together; the limits of fields are in `schemas`."""

    queue: int = 64
    """Texts that may wait for a slot, and inspections and embeddings for their turn.

    Beyond that: 429 with Retry-After.
    """
    body: int = 1 << 20
    """Bytes of a body; beyond that: 413."""
    headers: int = 1 << 16
    """Bytes of the headers with the path; beyond that: 431."""
    header_seconds: float = 10
    """Seconds for the headers to come; after that the connection is closed."""
    body_seconds: float = 30
    """Seconds for the body to come; after that: 408."""
    send_seconds: float = 30
    """Seconds for a client to take the response; after that the connection is closed."""
    drain_seconds: float = 30
    """Seconds for running requests to end after SIGTERM."""
    discarded: int = 1 << 26
    """Bytes of a body that is too large which are read, so that the client reads the refusal."""


@dataclass(frozen=True)
class Hosts:
    """The names by which this server may be called."""

    names: frozenset[str]
    any_address: bool = False
    """Whether any IP address will do: no page can point an address at this machine."""

    @classmethod
    def of(cls, bound: str, more: Collection[str] = ()) -> Hosts:
        """Return the names of a server at an address, and `more` names.

        Raises `UserError` for an invalid name.
        """
        names = {*LOCAL, bound.lower()} - {""}
        for host in more:
            name = host_name(f"[{host}]" if host.count(":") > 1 and "[" not in host else host)
            if name is None:
                raise UserError(
                    f"must be a host name or an address, got {host!r}",
                    option="allow_host",
                    hint="give the name alone, such as gpt.example",
                )
            names.add(name)
        return cls(frozenset(names), bound in ("0.0.0.0", "::", ""))

    @property
    def are_local(self) -> bool:
        """Whether all clients are on this machine."""
        return not self.any_address and self.names <= {*LOCAL}

    def allow(self, host: str) -> bool:
        """Whether a Host header, or an origin's host and port, is one of them."""
        name = host_name(host)
        if name is None or name in self.names:
            return name is not None
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address

    def allow_origin(self, origin: str) -> bool:
        """Whether an Origin header is a page of one of them."""
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and self.allow(host)


def host_name(host: str) -> str | None:
    """Return the name or address in HOST or HOST:PORT, in lower case; None for any other text."""
    match = HOST.fullmatch(host)
    if match is None or int(match[2] or 0) >= 1 << 16:
        return None
    return match[1].strip("[]").lower()


class RequestGuard:
    """ASGI middleware that checks and logs every request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        hosts: Hosts,
        key: str | None,
        count: Callable[[int], None],
    ) -> None:
        self.app, self.limits, self.hosts, self.count = app, limits, hosts, count
        self.key = None if key is None else key.encode()
        self.open = {"/health", *page_files()}
        """Paths that need no key: the page asks the user for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        request_id = _request_id(Headers(scope=scope))
        log_fields = scope.setdefault("state", {}).setdefault("log_fields", {})
        is_head = scope["method"] == "HEAD"

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send({**message, "body": b""} if is_head and "body" in message else message)

        try:
            headers = Headers(scope=scope)
            self._check_headers(scope, headers)
            self._check_caller(scope["path"], headers)
            if not scope["app"].state.ready and scope["path"] not in OPERATION:
                raise APIError(503, "the server is ending", code="shutting_down")
            body = await self._body(headers, receive)
            self._check_type(scope["method"], headers)
            inner = {**scope, "method": "GET"} if is_head else scope
            await self.app(inner, _replay(body, receive), respond)
        except APIError as refusal:
            if refusal.status == 413 and "expect" not in headers:
                await self._refuse_body(refusal, receive, respond)
            else:
                close = {"connection": "close"} if refusal.status in (408, 413, 431, 503) else None
                await refusal.response(close)(scope, receive, respond)
        finally:
            self.count(status)
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "id": request_id,
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(time.perf_counter() - began, 4),
                **log_fields,
            }
            access_log.info(json.dumps(line))

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        """Raise `APIError` for headers that are too large."""
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in headers.raw)
        if size > self.limits.headers:
            raise headers_too_large(self.limits)

    def _check_type(self, method: str, headers: Headers) -> None:
        """Raise `APIError` for a body that is not plain JSON."""
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise APIError(415, f"the body is compressed ({encoding[:20]}): send plain JSON")
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and media_type != "application/json":
            problem = f"the body's type is {media_type[:40] or 'missing'}"
            raise APIError(415, f"{problem}: send JSON with Content-Type: application/json")

    def _check_caller(self, path: str, headers: Headers) -> None:
        """Raise `APIError` for a host, an origin or a key that is not allowed."""

        def only(name: str) -> str:  # a header that is sent twice counts as missing
            values = headers.getlist(name)
            return values[0] if len(values) == 1 else ""

        if not self.hosts.allow(only("host")):
            remedy = "use its address, or start it with --allow-host"
            problem = f"this server is not called that: {remedy}"
            raise APIError(403, problem, code="host_not_allowed")
        if "origin" in headers and not self.hosts.allow_origin(only("origin")):
            raise APIError(403, "pages of other origins are refused", code="origin_not_allowed")
        if self.key is None or path in self.open:
            return
        scheme, _, key = only("authorization").partition(" ")
        is_equal = hmac.compare_digest(key.strip().encode(), self.key)
        if scheme.lower() != "bearer" or not is_equal:
            raise APIError(
                401, "give the API key: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body, which is small; raise `APIError` if it is large or slow."""
        limit, declared = self.limits.body, headers.get("content-length", "0")
        too_large = APIError(413, f"a body may have {limit:,} bytes", code="body_too_large")
        if declared.isdigit() and len(declared) < 20 and int(declared) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(CLIENT_LEFT, "the client disconnected", code="cancelled")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise APIError(408, "the body came too slowly", code="timeout") from None

    async def _refuse_body(self, refusal: APIError, receive: Receive, respond: Send) -> None:
        """Send a refusal, and discard what still comes: a client may read only after it has sent.

        If the connection were closed at once, the client would see a reset and no reason.
        """
        response = refusal.response({"connection": "close"})
        start = {"status": response.status_code, "headers": response.raw_headers}
        await respond({"type": "http.response.start", **start})
        body = {"type": "http.response.body", "body": response.body}
        await respond({**body, "more_body": True})
        n_left = self.limits.discarded
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.body_seconds):
                while n_left > 0 and (message := await receive()).get("more_body"):
                    n_left -= len(message["body"])
        await respond({**body, "body": b"", "more_body": False})


def _request_id(headers: Headers) -> str:
    """Return the client's own id of a request, or a new one."""
    client_id = headers.get("x-request-id", "")
    return client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex


def headers_too_large(limits: Limits) -> APIError:
    """Return the refusal of headers that are too large."""
    limit = f"{limits.headers:,} bytes"
    return APIError(431, f"the path and headers may have {limit}", code="headers_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body first, and then says when the client disconnects."""
    first: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again
