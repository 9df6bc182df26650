"""The Lark grammar of forced tool calls, in the form that Qwen3 was trained on and that `tools` reads back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from minipaged.server.errors import refused
from minipaged.text.tool_calls import CLOSE, OPEN


def tool_grammar(
    tools: Sequence[dict[str, Any]], names: Sequence[str], *, parallel: bool, reference: Callable[[str], str | None]
) -> str:
    """One call of one of `names` (parallel: one or more of them), arguments by the JSON schema of that tool.

    tools: the request's, as OpenAI writes them; no `parameters` = any object. Keywords of a schema that llguidance does
    not know are left out of account, except for a function that is `strict`. reference: a token's name -> how the
    grammar refers to it, None where the vocabulary has no such token and the tag is plain text. ApiError 400 for a name
    that no tool has, and for parameters that are no object.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not names:
        raise refused("tools must hold at least one tool, if one is to be called", "tools")
    bodies, rules = [], []
    for number, name in enumerate(dict.fromkeys(names)):
        if name not in functions:
            raise refused(f"tool_choice names {name!r}, which tools does not hold", "tool_choice")
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        rules.append(f'call_{number}: {json.dumps(head)} %json {json.dumps(_arguments(functions[name]))} "}}"')
        bodies.append(f"call_{number}")
    open_tag, close_tag = (reference(tag) or json.dumps(tag) for tag in (OPEN, CLOSE))
    return "\n".join(
        [
            'start: call ("\\n" call)*' if parallel else "start: call",
            f'call: {open_tag} "\\n" ({" | ".join(bodies)}) "\\n" {close_tag}',
            *rules,
        ]
    )


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise refused(
            f"parameters of the tool {function['name']!r} must describe an object, got type {kind!r}", "tools"
        )
    # The separators of the chat template, which the model has learnt, and no other white space.
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "type": "object", "x-guidance": {**options, "lenient": not function.get("strict")}}
