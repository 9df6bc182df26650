"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from minipaged.server.answer_text import AnswerText, Piece, Thought
from minipaged.server.chat_request import ChatRequest
from minipaged.server.http import EventStream, encode, event, read_body, while_connected
from minipaged.server.logprobs import prompt_logprobs, token_logprobs
from minipaged.server.protocol import ChatBody, parse
from minipaged.server.service import Delta, Service, note, stream_events, usage
from minipaged.text.tool_calls import ToolCall

if TYPE_CHECKING:
    from minipaged.engine import CompletionOutput, RequestOutput


async def create(service: Service, request: Request) -> Response:
    """Answer one POST: everything that can be refused is refused before the first byte of a stream."""
    body = await read_body(request, service.settings.max_body_bytes, service.settings.body_timeout)
    call = await while_connected(request.receive, service.in_worker(lambda: _Call(service, body)))
    notes = request.state.notes
    batch = service.submit([call.chat.request])
    if call.body.stream:
        events = stream_events(batch, call.chunks, call.usage_chunk if call.include_usage else None, notes)
        return EventStream(events, batch.close)
    (output,) = await while_connected(request.receive, batch.results())
    answer = call.answer(output)
    note(notes, [output], answer["usage"])
    return Response(encode(answer), media_type="application/json")


class _Call:
    """One call: what was asked, the engine's request for it, and how to write the answer."""

    def __init__(self, service: Service, raw: bytes) -> None:
        """Runs in a worker. ApiError or ValueError for what is refused."""
        body = self.body = parse(ChatBody, raw)
        self.model = service.check_model(body.model)
        self.id = f"chatcmpl-{body.request_id or service.new_id()}"
        self.created = int(time.time())
        self.include_usage = service.include_usage(body)
        self.chat = ChatRequest(service, body)
        self._delta = Delta()
        self._texts: dict[int, AnswerText] = {}

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for child in output.outputs:
            delta = self._delta_of(child, child.text, end=True)
            calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
            message = {
                "role": "assistant",
                "content": delta.get("content", None if calls else ""),
                "reasoning": delta.get("reasoning"),
                "reasoning_content": delta.get("reasoning_content"),
                "refusal": None,
                **({"tool_calls": calls} if calls else {}),
            }
            choices.append({"index": child.index, "message": message, **self._ending(child, 0)})
        answer = {**self._head("chat.completion"), "choices": choices, "usage": usage([output])}
        if self.chat.prompt_k is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.chat.prompt_k)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def chunks(self, number: int, output: RequestOutput) -> Iterator[bytes]:
        """The events for what is new in an output."""
        for child, text, old_tokens in self._delta.of(number, output):
            first_of_all, first = not self._texts, child.index not in self._texts
            delta = self._delta_of(child, text, end=child.finished)
            if first:
                delta = {"role": "assistant", "content": "", **delta}
            choice = {"index": child.index, "delta": delta, **self._ending(child, old_tokens)}
            chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
            if self.body.return_token_ids and first_of_all:
                chunk["prompt_token_ids"] = output.prompt_token_ids
            if self.include_usage:
                options = self.body.stream_options
                chunk["usage"] = usage([output]) if options and options.continuous_usage_stats else None
            yield event(chunk)

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        """The last event, if the usage was asked for."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": total})

    def _delta_of(self, child: CompletionOutput, text: str, *, end: bool) -> dict[str, Any]:
        """What a piece of text adds to the message: both names of the reasoning, calls numbered."""
        state = self._texts.setdefault(child.index, self.chat.new_text())
        known = state.num_calls
        pieces = state.feed(text, end=end)
        delta: dict[str, Any] = {}
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        if thought and self.body.include_reasoning is not False:
            delta = {"reasoning": thought, "reasoning_content": thought}
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        if said:
            delta["content"] = said
        calls = _calls(pieces)
        if calls:
            delta["tool_calls"] = [{"index": known + i, **call.as_json()} for i, call in enumerate(calls)]
        return delta

    def _ending(self, child: CompletionOutput, old_tokens: int) -> dict[str, Any]:
        """What a choice holds beside its text, for the tokens after the first `old_tokens`."""
        chat, logprobs = self.chat, None
        if chat.k is not None:
            entries = (child.logprobs or [])[old_tokens:]
            as_ids = bool(self.body.return_tokens_as_token_ids)
            logprobs = {"content": token_logprobs(entries, chat.k, chat.tokenizer, as_ids=as_ids), "refusal": None}
        return {
            "logprobs": logprobs,
            "finish_reason": chat.finish_reason(child.finish_reason, self._texts[child.index].num_calls),
            "stop_reason": child.stop_reason,
            **({"token_ids": child.token_ids[old_tokens:]} if self.body.return_token_ids else {}),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _calls(pieces: Sequence[Piece]) -> list[ToolCall]:
    return [piece for piece in pieces if isinstance(piece, ToolCall)]
