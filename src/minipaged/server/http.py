"""Bodies in, JSON or events out, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minipaged.server.errors import ApiError, refused, unexpected

T = TypeVar("T")

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
DISCARD = 8
"""A body of up to so many times the limit is read to its end and thrown away, since a client that is still sending when
the connection closes may never see the answer."""


def encode(content: Any) -> bytes:
    """Compact JSON. ValueError for NaN and infinity, which JSON does not have."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a model can write: JSON has it as an escape only
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The whole body. ApiError 413 beyond `limit` bytes, 408 if it takes longer than `timeout` seconds, 415 if it is
    compressed, 400 for a browser that sends it without asking first.
    """
    headers = request.headers
    if "origin" in headers and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # Any page in a browser may send other types to this address unasked; for this one the browser asks first (a
        # preflight request), and hears no unless --allowed-origins says yes. Programs send no Origin, and their
        # Content-Type is not looked at.
        raise refused("Content-Type must be application/json in a request with an Origin")
    too_large = ApiError(413, f"the body must be at most {limit} bytes", headers={"Connection": "close"})
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > DISCARD * limit:
        raise too_large
    chunks: list[bytes] = []

    async def read() -> None:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > DISCARD * limit:
                break
        if size > limit:
            raise too_large

    try:
        await asyncio.wait_for(read(), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(408, f"the body did not arrive within {timeout:g} s", headers={"Connection": "close"}) from None
    coding = ", ".join(headers.getlist("content-encoding"))
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding {coding!r} is not supported: send the body uncompressed, without this header",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},  # RFC 9110, section 15.5.16
        )
    return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client closes its connection (then: ClientDisconnect).

    To be used once the body has been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)  # what it holds is given back before we go on


class EventStream(Response):
    """Server-sent events from an iterator of encoded ones, ended by `last`; the iterator is closed in any case.

    An exception in it becomes an event: the status line is long gone. `finish` runs at the very end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], finish: Callable[[], None], *, last: bytes = DONE) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.finish = finish
        self.last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send(send))
        finally:
            self.finish()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.events) as events:
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not isinstance(error, ApiError):
                    logger.exception("a stream failed")
                    error = unexpected(error)
                await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": self.last, "more_body": False})
