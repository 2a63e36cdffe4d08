"""The socket and the process: uvicorn with a deadline for headers, and the end by SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tiedgpt.errors import UserError
from tiedgpt.infer import Engine
from tiedgpt.serve.guards import Limits


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; `UserError` where the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256)
    except OverflowError:
        raise UserError(f"port must be from 0 to 65,535, got {port}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use: give another --port") from None
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


class Server(uvicorn.Server):
    """uvicorn with an engine: SIGTERM lets running texts end, a second one ends at once."""

    def __init__(self, app: FastAPI, engine: Engine, limits: Limits) -> None:
        self.app, self.engine, self.limits = app, engine, limits
        protocol = type("Protocol", (_Protocol,), {"header_seconds": limits.header_seconds})
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", loop="asyncio", log_config=None, access_log=False,
                h11_max_incomplete_event_size=limits.headers, server_header=False,
                timeout_graceful_shutdown=int(limits.drain_seconds) + 5,
            )
        )  # fmt: skip

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at the second signal, end. The process is not killed by it afterwards."""
        self.app.state.ready = False
        self.force_exit, self.should_exit = self.should_exit, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests; the texts that are left then are ended with an error."""
        loop = asyncio.get_running_loop()
        late = loop.call_later(
            self.limits.drain_seconds, lambda: loop.run_in_executor(None, self.engine.close)
        )
        await super().shutdown(sockets)
        late.cancel()


class _Protocol(H11Protocol):
    """Closes connections whose headers do not come in time."""

    header_seconds = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        # asyncio does it only for sockets that say they are TCP; without it, answers wait 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """Let the deadline run while a request has begun to come and is not there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
