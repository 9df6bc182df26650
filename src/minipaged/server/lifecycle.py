"""Listening, signals and a clean end.

first SIGTERM or SIGINT   the socket closes: connections are refused (503 until then); requests in flight go on
shutdown_timeout - 1 s    what is still in flight is aborted, so that streams end with a last event
shutdown_timeout          connections that are still open are cut
second signal             the process ends at once
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from fastapi import FastAPI

    from minipaged.server.service import Service

logger = logging.getLogger(__name__)

HEADER_TIMEOUT = 30.0  # seconds from connecting to the end of the headers
DEAD_PEER_SECONDS = 60  # after which data that nobody acknowledges ends a connection
BACKLOG = 2048
ABORT_BEFORE_END = 1.0  # seconds of shutdown_timeout, but at most a fifth of it
ENGINE_END_SECONDS = 10.0  # for the step that runs when everything else has ended


class TimedProtocol(H11Protocol):
    """HTTP/1.1, closing connections that do not get as far as a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._headers_due = self.loop.call_later(HEADER_TIMEOUT, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_due.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet: whoever connects before the model is loaded is refused instead of waiting.

    OSError that names host and port if that is not possible.
    """
    if not host:
        raise OSError("--host must name an address, got '': 127.0.0.1 is this machine alone, 0.0.0.0 every interface")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts: without it, each answer on a reused
    # connection waits for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these: a client whose machine is gone, or that never reads, does not stay.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", DEAD_PEER_SECONDS // 2),
            ("TCP_KEEPINTVL", 10),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", DEAD_PEER_SECONDS * 1000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from None
    return sock


class Server(uvicorn.Server):
    """uvicorn with the shutdown described above."""

    def __init__(self, app: FastAPI, **config: Any) -> None:
        self.service: Service = app.state.service
        super().__init__(
            uvicorn.Config(
                app,
                http=TimedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=self.service.settings.shutdown_timeout,
                **config,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM, SIGINT: the first one drains, the second one ends the process."""
        if self.should_exit:
            sys.stderr.flush()
            os._exit(128 + sig)
        self.stop()

    def stop(self) -> None:
        """Drain and end; from any thread."""
        self.service.admission.draining = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what is in flight end, or end it."""
        timeout = self.service.settings.shutdown_timeout
        delay = timeout - min(ABORT_BEFORE_END, timeout / 5)
        timer = asyncio.get_running_loop().call_later(delay, self._abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _abort_all(self) -> None:
        live = list(self.service.admission.live)
        logger.warning("shutting down: %d requests are aborted", len(live))
        for request_id in live:
            asyncio.ensure_future(self.service.llm.abort(request_id))  # noqa: RUF006 - it does not wait for anything


def run(app: FastAPI, sock: socket.socket) -> None:
    """Serve until a signal; returns when everything has ended, the engine included."""
    server = Server(app)
    server.run(sockets=[sock])
    llm = server.service.llm
    closing = threading.Thread(target=llm.close, name="minipaged-close", daemon=True)
    closing.start()
    closing.join(ENGINE_END_SECONDS)
    if closing.is_alive():
        logger.error("the engine's step did not end within %g s: leaving without it", ENGINE_END_SECONDS)
        sys.stderr.flush()
        os._exit(1)
