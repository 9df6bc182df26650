"""The output of a response: items that grow, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from minipaged.server.answer_text import Piece, Thought
from minipaged.text.tool_calls import ToolCall

Event = dict[str, Any]


class OutputItems:
    """From pieces of a text to items (thoughts, messages, calls) and to the typed events of OpenAI's API, in order.

    items: as they stand. An item is complete when another one begins, the last one with `finish`.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last one, while it grows

    def feed(self, pieces: Sequence[Piece], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """What these pieces change. logprobs: of tokens of the answer, for the message that is open afterwards."""
        for piece in pieces:
            if isinstance(piece, ToolCall):
                yield from self._call(piece)
            elif isinstance(piece, Thought):
                yield from self._text("reasoning", piece.text, [])
            else:
                yield from self._text("message", piece, list(logprobs))
                logprobs = ()
        if logprobs and self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += logprobs

    def finish(self, status: str) -> Iterator[Event]:
        """The end of the last item: "completed" or "incomplete". A text that is empty is an empty message."""
        if not self.items:
            yield from self._begin("message")
        yield from self._end(status)

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._end("completed")
            yield from self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
        else:
            part["logprobs"] += logprobs
            yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, kind: str) -> Iterator[Event]:
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _new_id("rs"), "type": kind, "summary": [], "encrypted_content": None}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item |= {"content": [], "status": "in_progress"}
        self.items.append(item)
        self._open = item
        yield self._item_event("response.output_item.added", {**item, "content": []})
        item["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=_copy(part))

    def _end(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        part = item["content"][0]
        if item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
        else:
            yield self._event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=list(part["logprobs"])
            )
        yield self._event("response.content_part.done", content_index=0, part=_copy(part))
        item["status"] = status
        yield self._item_event("response.output_item.done", {**item, "content": [_copy(part)]})
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._end("completed")
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self.items.append(item)
        yield self._item_event("response.output_item.added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", delta=call.arguments)
        yield self._event("response.function_call_arguments.done", arguments=call.arguments, name=call.name)
        yield self._item_event("response.output_item.done", dict(item))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
