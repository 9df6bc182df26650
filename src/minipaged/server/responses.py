"""/v1/responses: OpenAI's newer API, without its memory. A response is a chat whose answer is written as items."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from minipaged.server.answer_text import Thought, thought_tokens
from minipaged.server.chat_request import ChatRequest
from minipaged.server.errors import ApiError, from_value_error
from minipaged.server.http import EventStream, encode, read_body, while_connected
from minipaged.server.logprobs import token_logprobs
from minipaged.server.protocol import parse
from minipaged.server.responses_items import Event, OutputItems
from minipaged.server.responses_protocol import ResponsesBody, in_our_words
from minipaged.server.service import Batch, Delta, Service, note, usage

if TYPE_CHECKING:
    from minipaged.engine import CompletionOutput, RequestOutput


async def create(service: Service, request: Request) -> Response:
    """Answer one POST: everything that can be refused is refused before the first byte of a stream."""
    body = await read_body(request, service.settings.max_body_bytes, service.settings.body_timeout)
    call = await while_connected(request.receive, service.in_worker(lambda: _Call(service, body)))
    notes = request.state.notes
    batch = service.submit([call.chat.request])
    if call.body.stream:
        return EventStream(_stream(call, batch, notes), batch.close, last=b"")
    (output,) = await while_connected(request.receive, batch.results())
    for _ in call.events(output):
        pass
    note(notes, [output], usage([output]))
    return Response(encode(call.response(output)), media_type="application/json")


async def _stream(call: _Call, batch: Batch, notes: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Every event of one streamed response."""
    number = 0

    def encoded(event: Event) -> bytes:
        nonlocal number
        kind, data = str(event["type"]), encode({**event, "sequence_number": number})
        number += 1
        return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"

    for kind in ("created", "in_progress"):
        yield encoded({"type": f"response.{kind}", "response": call.response(None)})
    last: RequestOutput | None = None
    outputs: AsyncIterator[tuple[int, RequestOutput]]
    try:
        async with contextlib.aclosing(batch.outputs()) as outputs:
            async for _, output in outputs:
                last = output
                for event in call.events(output):
                    yield encoded(event)
    except ApiError as error:
        yield encoded({"type": "response.failed", "response": call.failed(error)})
        return
    assert last is not None
    note(notes, [last], usage([last]))
    response = call.response(last)
    yield encoded({"type": f"response.{response['status']}", "response": response})


class _Call:
    """One call: what was asked, the engine's request for it, and how to write the answer."""

    def __init__(self, service: Service, raw: bytes) -> None:
        """Runs in a worker. ApiError for what is refused, in the names of this API's fields."""
        self.body = parse(ResponsesBody, raw)
        self.model = service.check_model(self.body.model)
        try:
            self.chat = ChatRequest(service, self.body.as_chat())
        except ApiError as error:
            raise in_our_words(error) from None
        except ValueError as error:
            raise in_our_words(from_value_error(error)) from None
        self.id = f"resp_{self.body.request_id or service.new_id()}"
        self.created = int(time.time())
        self.output = OutputItems()
        self._text = self.chat.new_text()
        self._delta = Delta()

    def events(self, output: RequestOutput) -> Iterator[Event]:
        """What is new in an output."""
        for child, text, old_tokens in self._delta.of(0, output):
            pieces = self._text.feed(text, end=child.finished)
            if self.body.include_reasoning is False:
                pieces = [piece for piece in pieces if not isinstance(piece, Thought)]
            yield from self.output.feed(pieces, self._logprobs(child, old_tokens))
            if child.finished:
                yield from self.output.finish("completed" if child.finish_reason == "stop" else "incomplete")

    def _logprobs(self, child: CompletionOutput, old_tokens: int) -> list[dict[str, Any]]:
        """Of new tokens that are not of the thought."""
        chat = self.chat
        if chat.k is None:
            return []
        start = max(old_tokens, thought_tokens(child.token_ids, chat.thinking, chat.tokenizer))
        return token_logprobs((child.logprobs or [])[start:], chat.k, chat.tokenizer)

    def response(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response object: of a request that has ended, or None for one that has just begun."""
        if output is None:
            return self._object("in_progress")
        (child,) = output.outputs
        if child.finish_reason == "abort":
            return self.failed(ApiError(503, "the request was aborted: the server is shutting down"))
        total = usage([output])
        counted = {
            "input_tokens": total["prompt_tokens"],
            "input_tokens_details": {**total["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": total["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": thought_tokens(child.token_ids, self.chat.thinking, self.chat.tokenizer)
            },
            "total_tokens": total["total_tokens"],
        }
        status = "completed" if child.finish_reason == "stop" else "incomplete"
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._object(status), "usage": counted, "incomplete_details": details}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response object of a request that was ended by an error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return {**self._object("failed"), "error": {"code": code, "message": error.message}}

    def _object(self, status: str) -> dict[str, Any]:
        body, params = self.body, self.chat.request.params
        done = status != "in_progress"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": self.output.items if done else [],
            "parallel_tool_calls": self.chat.parallel,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
