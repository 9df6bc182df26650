"""Forced calls, and how many of them: `tool_choice`, `parallel_tool_calls`, tools beside a response format (D28)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from server_rig import Rig, refusal
from test_server_chat import CALL, both_ways, prompt_of

USER = [{"role": "user", "content": "hi"}]
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Zürich", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "clock": {
        "type": "object",
        "properties": {"utc": {"type": "boolean"}},
        "required": ["utc"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "clock"}}
ONE_OF = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


def call_twice(rig: Rig, **body: Any) -> list[Any]:
    """The choices of a sampled answer, and of the same one streamed, as (calls, content, finish_reason)."""
    body = {"model": "demo", "messages": USER, "tools": TOOLS, "max_tokens": 100, "seed": 5, "temperature": 1, **body}
    whole = [
        ([(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()], choice.finish_reason)
        for choice in rig.client.chat.completions.create(**body).choices
    ]
    streamed: list[Any] = [([], None) for _ in whole]
    for chunk in rig.client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            calls, _ = streamed[choice.index]
            assert not choice.delta.content, "nothing but calls"
            calls += [(c.function.name, c.function.arguments) for c in choice.delta.tool_calls or ()]
            streamed[choice.index] = (calls, choice.finish_reason)
    assert streamed == whole
    for calls, _ in whole:
        for name, arguments in calls:
            jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))
    return whole


def test_required_gives_calls_that_follow_the_schemas(demo: Rig) -> None:
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    choices = [choice for seed in range(6) for choice in call_twice(demo, n=2, seed=seed, **one)]
    assert {reason for _, reason in choices} == {"tool_calls"}
    assert all(calls for calls, _ in choices)
    assert {name for calls, _ in choices for name, _ in calls} == set(SCHEMAS)


@pytest.mark.parametrize(("choice", "reason"), [(NAMED, "stop"), (ONE_OF, "tool_calls")])
def test_a_function_that_is_named_is_called(demo: Rig, choice: Any, reason: str) -> None:
    """With OpenAI's reason: "stop", when nothing was left to choose."""
    ((calls, ended),) = call_twice(demo, tool_choice=choice, parallel_tool_calls=False)
    assert [name for name, _ in calls] == ["clock"]
    assert ended == reason


def test_at_most_one_call_unless_parallel(demo: Rig, stub: Rig) -> None:
    for seed in range(4):
        ((calls, _),) = call_twice(demo, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert len(calls) == 1
    stub.runner.says("I look.\n" + CALL + "\n" + CALL + "\n" + CALL)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert len(both_ways(stub, tools=tools, parallel_tool_calls=True)["calls"]) == 3
    answer = both_ways(stub, tools=tools, parallel_tool_calls=False)
    assert (len(answer["calls"]), answer["content"], answer["finish_reason"]) == (1, "I look.", "tool_calls")


def test_allowed_tools_are_those_that_the_model_sees(stub: Rig) -> None:
    stub.runner.says("ok")
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    assert both_ways(stub, tools=TOOLS, tool_choice=choice)["content"] == "ok"
    assert '"clock"' in prompt_of(stub)
    assert '"weather"' not in prompt_of(stub)


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def test_beside_a_response_format_the_model_answers_or_calls(stub: Rig, demo: Rig) -> None:
    """Both on its own, as agents with an output type ask for it; a forced call goes first."""
    tag = stub.service.tokenizer.token_to_id("<tool_call>")

    def starts(**body: Any) -> set[int]:
        stub.runner.says("ok")
        stub.client.chat.completions.create(model="stub", messages=USER, response_format=FORM, **body)
        return {token_id for token_id, allowed in enumerate(stub.runner.params[-1].token_mask([])) if allowed}

    assert starts() == starts(tools=TOOLS, tool_choice="none") == {ord("{")}
    free = starts(tools=TOOLS)
    assert {ord("{"), tag} <= free <= {ord("{"), tag, ord("<")}
    assert starts(tools=TOOLS, tool_choice="required") == free - {ord("{")}
    body = {"model": "demo", "messages": USER, "tools": TOOLS, "response_format": FORM, "temperature": 0}
    message = demo.client.chat.completions.create(**body, parallel_tool_calls=False).choices[0].message
    assert message.tool_calls or message.content.startswith("{")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "'nobody'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}},
            "allowed_tools.mode",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
                "tool_choice": "required",
            },
            "parameters",
        ),
    ],
)
def test_choices_that_make_no_sense_are_refused(stub: Rig, body: Any, name: str) -> None:
    for stream in (False, True):
        error = refusal(stub.http.post("/v1/chat/completions", json={"messages": USER, **body, "stream": stream}))
        assert name in error["message"]
    assert stub.runner.steps == 0
