"""Around the application: a log line and an id for each request, keys, and no new work while shutting down."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minipaged.server.errors import CLIENT_GONE, ApiError, unexpected

logger = logging.getLogger("minipaged.server.access")
logger_of_faults = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version", "/metrics", "/openapi.json"))
"""Answered without a key, and while shutting down: they tell nothing about what users do, and cost nothing."""
_SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestLog:
    """One line per request: method, path, status, seconds, and what `note` adds. No line ever holds text of a user."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        notes: dict[str, Any] = {}
        scope.setdefault("state", {})
        scope["state"].update(request_id=request_id, notes=notes)
        status, started = CLIENT_GONE, time.monotonic()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception as error:
            logger_of_faults.exception("request %s failed", request_id)
            if status != CLIENT_GONE:
                raise  # the answer has begun: only the end of the connection can tell that it is not complete
            await unexpected(error).response()(scope, receive, observed)
        finally:
            if logger.isEnabledFor(logging.INFO):
                seconds = round(time.monotonic() - started, 4)
                line = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
                logger.info("%s", json.dumps({"request_id": request_id, **line, **notes}))


class Gate:
    """401 without one of the keys, 503 while shutting down."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], is_draining: Callable[[], bool]) -> None:
        self.app = app
        self.keys = [key.encode() for key in api_keys]
        self.is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" and scope["path"] not in OPEN_PATHS else None
        if error is not None:
            await error.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self.keys and not self._known(Headers(scope=scope).get("authorization", "")):
            return ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self.is_draining():
            return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        return None

    def _known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")  # as it came: header values are decoded so
        # Every key is compared, each in constant time: how long it takes says nothing about how much of one was right.
        matches = [hmac.compare_digest(given, known) for known in self.keys]
        return any(matches) and scheme.lower() == "bearer"
