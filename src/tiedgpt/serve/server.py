"""The socket and the process: uvicorn with deadlines, and the end by SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.serve.errors import APIError
from tiedgpt.serve.guards import Limits, headers_too_large


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; `UserError` where the address cannot be had."""
    if not 0 <= port < 1 << 16:
        raise UserError(f"must be from 0 to 65,535, got {port}", option="port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} of {host} is in use", hint="give another --port"
            ) from None
        reason = str(error.strerror).partition(" (")[0]
        raise UserError(f"cannot listen on host={host}, port={port}: {reason}") from None


class Server(uvicorn.Server):
    """uvicorn with an engine: SIGTERM lets running texts end, a second one ends at once.

    Until `open` gives it the application, every request gets 503. `on_drain` is called with the
    number of texts that are being finished.
    """

    def __init__(
        self, limits: Limits, on_drain: Callable[[int], None] = lambda n_texts: None
    ) -> None:
        self.app: FastAPI | None = None
        self.engine: Engine | None = None
        self.limits, self.on_drain = limits, on_drain
        protocol = type("Protocol", (_Protocol,), {"limits": limits})
        super().__init__(
            uvicorn.Config(
                self._respond, interface="asgi3", lifespan="off", http=protocol, ws="none",
                loop="asyncio", log_config=None, access_log=False, server_header=False,
                h11_max_incomplete_event_size=limits.headers, timeout_graceful_shutdown=5,
            )
        )  # fmt: skip

    @contextmanager
    def listening(self, listener: socket.socket) -> Iterator[Future[None]]:
        """Serve in a thread inside the block; yield a future that is done when the server ends."""
        with ThreadPoolExecutor(1, "tiedgpt-server") as thread:
            try:
                yield thread.submit(self.run, [listener])
            finally:
                self.should_exit = True

    def open(self, app: FastAPI, engine: Engine) -> None:
        """Begin to answer."""
        app.state.ready = True
        self.app, self.engine = app, engine

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        refusal = APIError(503, "the model is being loaded: try again soon", code="loading")
        await refusal.response({"connection": "close"})(scope, receive, send)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at the second signal, end. The process is not killed by it afterwards."""
        self._refuse_requests()
        self.force_exit, self.should_exit = self.should_exit, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests, refusing new ones with 503; cut texts that take too long."""
        self._refuse_requests()
        stats = self.engine.stats() if self.engine is not None else {}
        if n_texts := int(stats.get("running", 0) + stats.get("waiting", 0)):
            self.on_drain(n_texts)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_seconds):
                while self.server_state.tasks and not self.force_exit:
                    await asyncio.sleep(0.05)
        if self.server_state.tasks and self.engine is not None:
            await asyncio.to_thread(self.engine.close)
        await super().shutdown(sockets)

    def _refuse_requests(self) -> None:
        if self.app is not None:
            self.app.state.ready = False


class _Protocol(H11Protocol):
    """Deadlines that uvicorn lacks: for receiving headers and for sending a response."""

    limits = Limits()

    def connection_made(self, transport: Any) -> None:
        # asyncio does it only for sockets that say they are TCP; without it, answers wait 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=0)  # writing pauses once the system takes no more
        super().connection_made(transport)
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin("sending", self.limits.send_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end("sending")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end("headers")
        self._end("sending")

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 cannot read; uvicorn calls this while it handles the error."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        refusal = APIError(status, "this is no valid HTTP/1.1 request", code="invalid_http")
        refusal = headers_too_large(self.limits) if status == 431 else refusal
        response = refusal.response({"connection": "close"})
        for event in (
            h11.Response(status_code=status, headers=response.raw_headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Run the deadline of the headers until a request is complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._end("headers")
        elif "headers" not in self._deadlines:
            self._begin("headers", self.limits.header_seconds)

    def _begin(self, what: str, seconds: float) -> None:
        self._deadlines[what] = self.loop.call_later(seconds, self.transport.abort)

    def _end(self, what: str) -> None:
        if deadline := self._deadlines.pop(what, None):
            deadline.cancel()
