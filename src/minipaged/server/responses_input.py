"""Items of the responses API as messages, tools and choices of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minipaged.server.errors import ApiError, refused

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part -> where its text is."""


def chat_messages(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation: the instructions as a system message, then the input. ApiError 400 for items that are no text,
    and for those that only a server with a memory could know.
    """
    if not given:
        raise refused("input must be a non-empty string or list of items", "input")
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": given})
        return conversation.messages
    for number, item in enumerate(given):
        conversation.add(f"input[{number}]", item)
    return conversation.messages


class _Conversation:
    """Items one after the other; what belongs to one turn of the model becomes one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's, as long as items can be added to it

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(where, item)
        elif kind == "reasoning":
            self._add_reasoning(where, item)
        elif kind == "function_call":
            function = {"name": _string(where, item, "name"), "arguments": _string(where, item, "arguments")}
            call = {"id": _string(where, item, "call_id"), "type": "function", "function": function}
            self._open_turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(f"{where}.output", item.get("output"))
            self._other({"role": "tool", "tool_call_id": _string(where, item, "call_id"), "content": content})
        elif kind == "item_reference":
            raise _refused(f"{where}: nothing is stored here: give the item itself")
        else:
            raise _refused(f"{where}: items of type {kind!r} are not supported, only text and calls of functions")

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), _content(f"{where}.content", item.get("content"))
        if role not in ("user", "system", "developer", "assistant"):
            raise _refused(f"{where}.role must be user, system, developer or assistant, got {role!r}")
        if role != "assistant":
            self._other({"role": role, "content": content})
            return
        turn = self._open_turn()
        if "content" in turn or "tool_calls" in turn:  # in a turn of its own, so that the order is kept
            self._turn = None
            turn = self._open_turn()
        turn["content"] = content

    def _add_reasoning(self, where: str, item: Mapping[str, Any]) -> None:
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        found = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(parts):
            raise _refused(f"{where}: the parts of a thought must have text")
        if not texts and item.get("encrypted_content"):
            raise _refused(f"{where}.encrypted_content cannot be read here: leave the item out, or give its content")
        if texts:
            turn = self._open_turn()
            if turn.keys() - {"role"}:  # a thought begins a turn
                self._turn = None
                turn = self._open_turn()
            turn["reasoning_content"] = "\n".join(texts)

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn

    def _other(self, message: dict[str, Any]) -> None:
        self._turn = None
        self.messages.append(message)


def _content(where: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} must be a string or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(TEXT_PARTS[kind]) if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise _refused(f"{where}: only parts of text are supported, got type {kind!r}")
        parts.append({"type": "text", "text": text})
    return parts


def _string(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _refused(f"{where}.{name} must be a string")
    return value


def _refused(message: str) -> ApiError:
    return refused(message, "input")


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions as chats write them. ApiError 400 for any other kind of tool."""
    if tools is None:
        return None
    converted = []
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            raise refused(f"tools[{number}]: only tools of type function are supported, got {kind!r}", "tools")
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def chat_tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """A choice as chats write it; what is neither is left to be refused there."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [chat_tool_choice(tool) for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return dict(choice)
