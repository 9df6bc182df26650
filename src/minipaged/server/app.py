"""The application: every route, and how it is described in /openapi.json."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from minipaged import __version__
from minipaged.server import chat, completions, errors, probes, responses
from minipaged.server.middleware import Gate, RequestLog
from minipaged.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from minipaged.server.responses_protocol import ResponsesBody
from minipaged.server.service import Service

if TYPE_CHECKING:
    from pydantic import BaseModel

    from minipaged.llm import AsyncLLM
    from minipaged.server.settings import ServerSettings
    from minipaged.text.chat_template import ChatTemplate

F = TypeVar("F", bound=Callable[..., Any])

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REFUSALS = {
    400: "The request is wrong.",
    401: "No valid key.",
    404: "No such model.",
    408: "The body took too long.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The engine failed.",
    503: "The engine is dead, or the server is shutting down.",
}


def create_app(llm: AsyncLLM, settings: ServerSettings, *, chat_template: ChatTemplate | None = None) -> FastAPI:
    """The server's ASGI application around a running engine, which stays the caller's to close.

    chat_template: None = the model's own.
    """
    if chat_template is None:
        chat_template = getattr(getattr(llm, "loaded", None), "chat_template", None)
    service = Service(llm, settings, chat_template)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="minipaged", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_generating(app, service)
    _add_probes(app, service)
    errors.install(app)
    app.add_middleware(Gate, api_keys=settings.api_keys, is_draining=lambda: service.admission.draining)
    app.add_middleware(RequestLog)  # around both: it sees every answer
    if settings.allowed_origins:
        # The outermost: a browser's question comes without a key, and reads no answer that does not name its origin,
        # refusals included.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _add_generating(app: FastAPI, service: Service) -> None:
    stream = {"text/event-stream": {"schema": {"type": "string"}}}

    @app.post("/v1/completions", **_describe(CompletionBody, service, extra_content=stream))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        return await completions.create(service, request)

    @app.post("/v1/chat/completions", **_describe(ChatBody, service, extra_content=stream))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await chat.create(service, request)

    @app.post("/v1/responses", **_describe(ResponsesBody, service, extra_content=stream))
    async def create_response(request: Request) -> Response:
        """Answer a conversation, given as items; nothing is stored."""
        return await responses.create(service, request)

    @app.post("/tokenize", **_describe(TokenizeBody, service))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        return await probes.tokenize(service, request)

    @app.post("/detokenize", **_describe(DetokenizeBody, service))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await probes.detokenize(service, request)


def _add_probes(app: FastAPI, service: Service) -> None:
    created, started = int(time.time()), time.monotonic()

    @_get(app, "/v1/models", **_describe(None, service))
    async def list_models() -> Response:
        """The names under which the model is served."""
        cards = [probes.model_card(service, name, created) for name in service.settings.served_model_names]
        return probes.json_response({"object": "list", "data": cards})

    @_get(app, "/v1/models/{model:path}", **_describe(None, service))
    async def get_model(model: str) -> Response:
        """One of them."""
        return probes.json_response(probes.model_card(service, service.check_model(model), created))

    @_get(app, "/health", **_describe(None, service))
    async def health() -> Response:
        """Whether the engine works."""
        return probes.health(service)

    @_get(app, "/ready", **_describe(None, service))
    async def ready() -> Response:
        """Whether a request would be taken now."""
        return probes.ready(service)

    @_get(app, "/version", **_describe(None, service))
    async def version() -> Response:
        """The version of minipaged."""
        return probes.json_response({"version": __version__})

    @_get(app, "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @_get(app, "/", response_class=HTMLResponse)
    async def status() -> HTMLResponse:
        """For people."""
        return HTMLResponse(probes.status_page(service, started))


def _get(app: FastAPI, path: str, **described: Any) -> Callable[[F], F]:
    """GET, and HEAD for load balancers that ask no more than whether: uvicorn sends the same headers and no body."""

    def decorate(endpoint: F) -> F:
        app.head(path, **{**described, "include_in_schema": False})(endpoint)
        return app.get(path, **described)(endpoint)

    return decorate


def _describe(
    body: type[BaseModel] | None, service: Service, *, extra_content: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What FastAPI cannot see, because bodies are read and checked by hand: their schema, and the possible errors."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status, text in REFUSALS.items()
    }
    responses[200] = {"content": {"application/json": {"schema": {"type": "object"}}, **(extra_content or {})}}
    described: dict[str, Any] = {"response_class": Response, "responses": responses}
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schema = _inlined(schema, schema.pop("$defs", {}))
        _add_ranges(schema, service)
        described["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    return described


def _add_ranges(schema: dict[str, Any], service: Service) -> None:
    """Ranges as `SamplingParams` and this server's limits check them; types alone would promise too much."""
    longest = service.longest
    ranges: dict[str, dict[str, Any]] = {
        "model": {"enum": [*service.settings.served_model_names, None]},
        "n": {"minimum": 1, "maximum": service.llm.engine.config.max_num_seqs},
        "temperature": {"minimum": 0},
        "top_p": {"minimum": 0, "maximum": 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "top_k": {"minimum": -1},
        "max_tokens": {"minimum": 1, "maximum": longest},
        "max_completion_tokens": {"minimum": 1, "maximum": longest},
        "max_output_tokens": {"minimum": 1, "maximum": longest},
        "min_tokens": {"minimum": 0, "maximum": longest},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"minimum": 1e-6, "maximum": 1e6},
        "top_logprobs": {"minimum": 0, "maximum": service.settings.max_logprobs},
        "cache_salt": {"minLength": 1},
        "prompt": {"minLength": 1, "minItems": 1},
        "messages": {"minItems": 1},
        "input": {"minLength": 1, "minItems": 1},
        "prompt_logprobs": {"minimum": 0, "maximum": service.settings.max_logprobs},
        "thinking_token_budget": {"minimum": -1},
    }
    for name, extra in ranges.items():
        field = schema["properties"].get(name, {})
        for branch in field.get("anyOf", [field] if field else []):
            if branch.get("type") != "null":
                branch.update(extra)
    if "prompt" in schema["properties"] and "messages" not in schema["properties"]:
        schema.setdefault("required", []).append("prompt")


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """`schema` with every reference replaced by what it means (none of ours is recursive)."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    return [_inlined(item, definitions) for item in schema] if isinstance(schema, list) else schema
