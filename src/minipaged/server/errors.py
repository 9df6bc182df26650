"""Every refusal and failure as OpenAI's clients expect it: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

CLIENT_GONE = 499  # nobody reads it; the log does


class ApiError(Exception):
    """An answer that is an error. `param` names the field of the body that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer, or of an event in a stream that has begun."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request is wrong, and the same request will always be."""
    return ApiError(400, message, param=param, code=code)


def unexpected(error: Exception) -> ApiError:
    """For a fault of ours: what happened is in the log, and none of the client's business."""
    return ApiError(500, f"internal error: {type(error).__name__}; the server's log has more", code="internal_error")


def from_value_error(error: ValueError) -> ApiError:
    """What the engine, the tokenizer or the template refuse; their messages begin with the field they are about."""
    message = str(error)
    field = re.match(r"([a-z_]+) (?:must|holds)\b", message)
    return refused(message, field.group(1) if field else None)


def from_validation_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    return refused(f"{where}: {first['msg']}" if where else first["msg"], where or None)


def _is_branch(part: int | str) -> bool:
    """Pydantic also names which member of a union it tried ("str", "list[str]"): that is not part of the body."""
    return isinstance(part, str) and (part in _TYPES or re.fullmatch(r"[a-zA-Z_]\w*", part) is None)


_TYPES = frozenset(("str", "int", "float", "bool", "dict", "list"))


def install(app: FastAPI) -> None:
    """Let the exceptions that are meant for clients become such answers; `RequestLog` sees to all others."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, gone)
