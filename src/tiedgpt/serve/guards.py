"""What a request must pass before the application sees it: host, origin, key, size and time.

Refused are: other hosts than those allowed (a page on the web may point its own name at this
machine), origins of other pages, requests without the key, bodies beyond `Limits.body` or slower
than `Limits.body_seconds`. No CORS header is ever sent. Each request is one line of JSON in the
log; it holds neither prompts nor keys.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiedgpt.serve.assets import page_files
from tiedgpt.serve.errors import APIError
from tiedgpt.serve.texts import GONE

LOCAL = ("localhost", "127.0.0.1", "::1")
access_log = logging.getLogger("tiedgpt.serve.access")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request, and all together, may take; the fields' own limits are in `schemas`."""

    queue: int = 64
    """Texts that may wait for a slot; beyond that: 429 with Retry-After."""
    body: int = 1 << 20
    """Bytes of a body: 413."""
    headers: int = 1 << 16
    """Bytes of the headers: 400."""
    header_seconds: float = 10
    """In which the headers must have come, or the connection is closed."""
    body_seconds: float = 30
    """In which the body must have come: 408."""
    send_seconds: float = 30
    """In which a client must take what is sent, or the connection is closed."""
    drain_seconds: float = 30
    """In which running requests may end after SIGTERM."""
    inspections: int = 4
    """Embeddings and inspections that may run or wait: 429."""


@dataclass(frozen=True)
class Hosts:
    """The names by which this server may be called."""

    names: frozenset[str]
    any_address: bool = False
    """Whether any IP address will do: no page can point an address at this machine."""

    @classmethod
    def of(cls, bound: str, more: Collection[str] = ()) -> Hosts:
        """Return those of a server that is bound to an address."""
        everywhere = bound in ("0.0.0.0", "::", "")
        return cls(frozenset(map(str.lower, (*LOCAL, bound, *more))) - {""}, everywhere)

    @property
    def are_local(self) -> bool:
        """Whether all clients are on this machine."""
        return not self.any_address and self.names <= {*LOCAL}

    def allow(self, given: str) -> bool:
        """Whether a Host header, or an origin's host and port, is one of them."""
        try:
            parts = urlsplit(f"//{given}")
            name, _ = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return False
        if any(mark in given for mark in "/?#@"):
            return False
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address


class Guard:
    """ASGI middleware that refuses what must not pass, and logs every request."""

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
        """Paths that need no key: the page asks for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        request_id = uuid.uuid4().hex
        noted = scope.setdefault("state", {}).setdefault("noted", {})

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
            await self.app(scope, _replayed(body, receive), sent)
        except APIError as refused:
            close = {"connection": "close"} if refused.status in (408, 413) else None
            await refused.response(close)(scope, receive, sent)
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
                **noted,
            }
            access_log.info(json.dumps(line))

    def _check(self, path: str, headers: Headers) -> None:
        """Raise `APIError` for a request that must not pass, by its headers."""

        def only(name: str) -> str:  # what is given twice counts as none
            found = headers.getlist(name)
            return found[0] if len(found) == 1 else ""

        if not self.hosts.allow(only("host")):
            raise APIError(
                403, "this server is not called that: use its address, or start it with "
                "--allow-host", code="host_not_allowed",
            )  # fmt: skip
        if "origin" in headers and not self.hosts.allow(only("origin").partition("://")[2]):
            raise APIError(403, "pages of other origins are refused", code="origin_not_allowed")
        if self.key is None or path in self.open:
            return
        kind, _, given = only("authorization").partition(" ")
        is_equal = hmac.compare_digest(given.strip().encode(), self.key)
        if kind.lower() != "bearer" or not is_equal:
            raise APIError(
                401, "give the API key: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body, which is small; raise `APIError` if it is large or slow."""
        declared = headers.get("content-length", "0")
        if declared.isdigit() and len(declared) < 20 and int(declared) > self.limits.body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError(GONE, "the client went away", code="cancelled")
                    body += message.get("body", b"")
                    if len(body) > self.limits.body:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise APIError(408, "the body came too slowly", code="timeout") from None

    def _too_large(self) -> APIError:
        return APIError(413, f"a body may have {self.limits.body:,} bytes", code="body_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives the body first, and then tells when the client goes away."""
    first: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
