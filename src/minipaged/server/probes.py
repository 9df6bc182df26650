"""Everything but generating: health, readiness, metrics, the model's name, tokens, a status page."""

from __future__ import annotations

import html
import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from minipaged import __version__
from minipaged.server.chat_request import template_messages, template_tools
from minipaged.server.errors import ApiError, refused
from minipaged.server.http import encode, read_body, while_connected
from minipaged.server.protocol import DetokenizeBody, TokenizeBody, parse
from minipaged.server.service import Service


def json_response(content: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(encode(content), status, media_type="application/json")


def health(service: Service) -> Response:
    """200 while the engine's thread lives, its steps work and none takes too long, else 503 with the reason."""
    llm, limit = service.llm, service.settings.step_timeout
    if not llm.is_running:
        died = f": {type(llm.error).__name__}" if llm.error is not None else ""
        raise ApiError(503, f"the engine's thread has ended{died}", code="engine_dead")
    if llm.failure is not None:
        raise ApiError(503, llm.failure, code="engine_failing")
    running = llm.step_seconds
    if running > limit:
        raise ApiError(
            503,
            f"a step has been running for {running:.1f} s, more than step_timeout = {limit:g} s",
            code="step_timeout",
        )
    return json_response({"status": "ok"})


def ready(service: Service) -> Response:
    """200 if a request sent now would be taken: healthy, not shutting down, room in the queue."""
    health(service)
    if service.admission.draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    if service.admission.full:
        raise ApiError(503, "the queue is full", code="queue_full")
    return json_response({"status": "ready"})


def model_card(service: Service, name: str, created: int) -> dict[str, Any]:
    """A model object of the models API."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "minipaged",
        "root": service.settings.served_model_names[0],
        "parent": None,
        "max_model_len": service.longest,
    }


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a prompt, or of what the chat template makes of messages."""
    raw = await read_body(request, service.settings.max_body_bytes, service.settings.body_timeout)

    def work() -> dict[str, Any]:
        body = parse(TokenizeBody, raw)
        service.check_model(body.model)
        tokenizer = service.need_tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise refused("give either prompt or messages", "prompt")
        if body.prompt is not None:
            ids = service.encode(body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
        else:
            continued = bool(body.continue_final_message)
            generation = not continued if body.add_generation_prompt is None else body.add_generation_prompt
            text = service.render(
                template_messages(body.messages or ()),
                tools=template_tools(body.tools),
                documents=body.documents,
                template_kwargs=body.chat_template_kwargs,
                add_generation_prompt=generation,
                continue_final_message=continued,
            )
            ids = service.encode(text, "messages", add_special_tokens=bool(body.add_special_tokens))
        answer = {"count": len(ids), "max_model_len": service.longest, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
        return answer

    return json_response(await while_connected(request.receive, service.in_worker(work)))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    raw = await read_body(request, service.settings.max_body_bytes, service.settings.body_timeout)

    def work() -> dict[str, Any]:
        body = parse(DetokenizeBody, raw)
        service.check_model(body.model)
        vocab_size = service.llm.engine.config.vocab_size or service.need_tokenizer().vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise refused(f"tokens must be from 0 to {vocab_size - 1}, got {token_id}", "tokens")
        return {"prompt": service.need_tokenizer().decode(body.tokens, skip_special_tokens=False)}

    return json_response(await while_connected(request.receive, service.in_worker(work)))


def status_page(service: Service, started: float) -> str:
    """A plain page for people: what is served, and how it is doing."""
    stats, llm = service.llm.stats(), service.llm
    rows = {
        "model": ", ".join(service.settings.served_model_names),
        "version": __version__,
        "up for": f"{time.monotonic() - started:.0f} s",
        "engine": "running" if llm.is_running else "dead",
        "longest sequence": f"{service.longest} tokens",
        "sequences running": stats.running,
        "requests waiting": stats.waiting,
        "KV blocks": f"{stats.blocks_in_use} in use, {stats.blocks_idle} idle, {stats.blocks_free} free "
        f"of {stats.blocks_total}",
        "prefix cache": f"{stats.prefix_hit_tokens} of {stats.prefix_query_tokens} prompt tokens found",
        "preemptions": stats.preemptions,
    }
    cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
    style = "body{font-family:sans-serif;margin:2em}th{text-align:left;padding-right:2em;font-weight:normal}"
    links = " ".join(f'<a href="{path}">{path}</a>' for path in ("/v1/models", "/metrics", "/health", "/openapi.json"))
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><title>minipaged</title><style>{style}</style></head>"
        f"<body><h1>minipaged</h1><table>{cells}</table><p>{links}</p></body></html>"
    )
