"""Finds the calls of tools in a generated text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minipaged.text.reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is JSON text of an object, as OpenAI's clients expect it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_call(text: str) -> ToolCall | None:
    """The call in what stands between the tags, None if it is not one."""
    try:
        call = json.loads(text)
        arguments = call["arguments"]
        if isinstance(arguments, str):  # some models write the arguments as JSON text inside the JSON
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or not isinstance(call["name"], str) or not call["name"]:
            return None
        return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class ToolCallParser:
    """Text in pieces of any size in; text and calls, in order, out. What does not depend on the cuts: the joined text,
    the calls.

    Whitespace between calls, before the first and after the last one is dropped. Whatever is not a call stays text,
    tags included.
    """

    def __init__(self) -> None:
        self._held = ""
        self._space = ""  # whitespace that is text only if text follows
        self._after_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain after this piece."""
        self._held += text
        pieces: list[str | ToolCall] = []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                safe = len(self._held) - held_back(self._held, OPEN)
                pieces += self._text(self._held[:safe])
                self._held = self._held[safe:]
                return pieces
            pieces += self._text(self._held[:start])
            self._held = self._held[start:]
            end = self._held.find(CLOSE)
            if end < 0:
                return pieces
            whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            call = parse_call(whole[len(OPEN) : -len(CLOSE)])
            if call is None:
                pieces += self._text(whole)
            else:
                self._space, self._after_call = "", True
                pieces.append(call)

    def finish(self) -> list[str | ToolCall]:
        """What was held back, when the text has ended: a call that is not closed is text."""
        held, self._held = self._held, ""
        pieces: list[str | ToolCall] = [*self._text(held)]
        if self._space and not self._after_call:
            pieces.append(self._space)
        self._space = ""
        return pieces

    def _text(self, text: str) -> Iterator[str]:
        if not text:
            return
        body = text.rstrip()
        if not body:
            self._space += text
            return
        before, self._space = self._space, text[len(body) :]
        whole = before + body
        yield whole.lstrip() if self._after_call else whole
        self._after_call = False
