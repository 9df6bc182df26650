"""`tool_choice`: which tools a model sees, and whether it has to call one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipaged.server.errors import refused

FORMS = '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'


@dataclass(frozen=True)
class ToolChoice:
    """tools: as they came, those that the template shows and that may be called. forced: the functions of which one has
    to be called, none if the model is free. named: there was no choice but one."""

    tools: list[dict[str, Any]]
    forced: tuple[str, ...] = ()
    named: bool = False


def tool_choice(choice: str | Mapping[str, Any] | None, tools: list[dict[str, Any]]) -> ToolChoice:
    """The meaning of a body's `tool_choice` for its `tools`. 400 for a choice that is none of OpenAI's, for one that
    names a function that is not there, and for one that asks for a call of nothing.
    """
    if choice == "none":
        return ToolChoice([])
    if choice is None or choice == "auto":
        return ToolChoice(tools)
    if not tools:
        raise refused("tool_choice needs tools: there are none that could be called", "tool_choice")
    known = [tool["function"]["name"] for tool in tools]
    if choice == "required":
        return ToolChoice(tools, forced=tuple(known))
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        name = _name(choice)
        _check_known([name], known)
        # The prompt keeps all tools, and with them the prefix that it shares with the conversation's other turns.
        return ToolChoice(tools, forced=(name,), named=True)
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) and kind == "allowed_tools" else None
    if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list) and allowed["tools"]:
        names = [_name(item) for item in allowed["tools"]]
        _check_known(names, known)
        mode = allowed.get("mode")
        if mode not in ("auto", "required"):
            raise refused(f'tool_choice.allowed_tools.mode must be "auto" or "required", got {mode!r}', "tool_choice")
        chosen = [tool for tool in tools if tool["function"]["name"] in names]
        return ToolChoice(chosen, forced=tuple(dict.fromkeys(names)) if mode == "required" else ())
    raise refused(f"tool_choice must be {FORMS}, got {choice!r:.200}", "tool_choice")


def _name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise refused(f'tool_choice must name a function as {{"function": {{"name": ...}}}}, got {choice!r:.200}')
    return name


def _check_known(names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise refused(f"tool_choice names {name!r}, which tools does not hold, only {known}", "tool_choice")
