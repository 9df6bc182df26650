"""Finds the calls of tools in a generated text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minipaged.text.json_scanner import ObjectScanner
from minipaged.text.reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call; `arguments` is JSON text of an object, as OpenAI's clients expect it and as the model wrote it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_call(text: str) -> ToolCall | None:
    """The call that the JSON between the tags makes, None if it makes none.

    Line breaks and tabs inside its strings, which JSON forbids and models write, are escaped.
    """
    text = text.strip()
    scanner = ObjectScanner()
    if not text or scanner.feed(text, 0) != len(text) or "arguments" not in scanner.members:
        return None
    start, end = scanner.members["arguments"]
    try:
        call = json.loads(text, strict=False)
        arguments = text[start:end]
        if isinstance(call["arguments"], str):  # some models write the arguments as JSON text inside the JSON
            arguments = call["arguments"]
        value = json.loads(arguments, strict=False)
        if not isinstance(value, dict) or not isinstance(call["name"], str) or not call["name"]:
            return None
    except (ValueError, KeyError, RecursionError):
        return None
    if any(ord(character) < 32 for character in arguments):
        arguments = json.dumps(value, ensure_ascii=False)
    return ToolCall(call["name"], arguments)


class ToolCallParser:
    """Text in pieces of any size in; text and calls, in order, out. What does not depend on the cuts: the joined text,
    the calls.

    A call is an opening tag, one JSON object, a closing tag: the JSON says where it ends, so that a tag inside one of
    its strings does not. Text is held back only for as long as it may still become a call. Whitespace between calls,
    before the first and after the last one is dropped. Whatever is not a call stays text, tags included.
    """

    def __init__(self) -> None:
        self._held = ""
        self._scanner: ObjectScanner | None = None  # of the object behind the tag with which `_held` begins
        self._scanned = 0  # characters of `_held` that need no second look
        self._space = ""  # whitespace that is text only if text follows
        self._after_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain after this piece."""
        self._held += text
        pieces: list[str | ToolCall] = []
        while True:
            if not self._held.startswith(OPEN):
                start = self._held.find(OPEN)
                end = start if start >= 0 else len(self._held) - held_back(self._held, OPEN)
                pieces += self._text(self._held[:end])
                self._held = self._held[end:]
                if start < 0:
                    return pieces
            call_end = self._end_of_call()
            if call_end is None:
                return pieces
            whole = self._held[: max(call_end, len(OPEN))]
            self._held, self._scanner, self._scanned = self._held[len(whole) :], None, 0
            call = parse_call(whole[len(OPEN) : -len(CLOSE)]) if call_end > 0 else None
            if call is None:
                pieces += self._text(whole)
            else:
                self._space, self._after_call = "", True
                pieces.append(call)

    def finish(self) -> list[str | ToolCall]:
        """What was held back, when the text has ended: a call that is not closed is text, and may hide another one."""
        pieces: list[str | ToolCall] = []
        while self._held:
            whole = self._held[: len(OPEN)]  # `_held` begins with a tag, or with the beginning of one
            self._held, self._scanner, self._scanned = self._held[len(whole) :], None, 0
            pieces += self._text(whole)
            pieces += self.feed("")
        if self._space and not self._after_call:
            pieces.append(self._space)
        self._space = ""
        return pieces

    def _end_of_call(self) -> int | None:
        """Where the call with whose tag `_held` begins ends, its closing tag included; -1 if it is none, None if that
        is not certain yet."""
        position = max(self._scanned, len(OPEN))
        if self._scanner is None or not self._scanner.length:
            position = _skip_blanks(self._held, position)
            self._scanned = position
            if position == len(self._held):
                return None
            self._scanner = ObjectScanner()
        if not self._scanner.done:
            end = self._scanner.feed(self._held, position)
            self._scanned = len(self._held) if end is None else end
            if end is None or end < 0:
                return end
        position = _skip_blanks(self._held, self._scanned)
        rest = self._held[position : position + len(CLOSE)]
        if rest == CLOSE:
            return position + len(CLOSE)
        return None if CLOSE.startswith(rest) else -1

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


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
