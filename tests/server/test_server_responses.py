"""/v1/responses with the official client: items in, items and typed events out, and nothing stored."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from server_rig import Rig, refusal

from minipaged.server.responses_input import chat_messages

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Zürich", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]
EVENTS = {
    typing.get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def prompt_of(rig: Rig) -> str:
    return rig.service.tokenizer.decode(rig.runner.prompts[-1], skip_special_tokens=False)


def both_ways(rig: Rig, **body: Any) -> Response:
    """The response in one piece; checks that the stream's events are well formed, tell the same and end with it."""
    body = {"model": rig.service.settings.served_model_names[0], "input": "hi", **body}
    whole = rig.client.responses.create(**body)
    events = list(rig.client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:  # the client builds objects without checking them
        EVENTS[event.type].model_validate(event.model_dump(warnings=False))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[1].response.status == "in_progress"
    assert events[1].response.output == []
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert told(events[2:-1]) == [shown(item) for item in last.response.output] == [shown(i) for i in whole.output]
    for usage in (last.response.usage, whole.usage):
        usage.input_tokens_details.cached_tokens = 0  # the second prompt is found in the cache
    assert last.response.usage == whole.usage
    assert last.response.incomplete_details == whole.incomplete_details
    return whole


def shown(item: Any) -> dict[str, Any]:
    """An item without its ids."""
    fields = item.model_dump(exclude_none=True, warnings=False)
    return {name: value for name, value in fields.items() if name not in ("id", "call_id")}


def told(events: list[Any]) -> list[dict[str, Any]]:
    """The items that a stream tells of, put together from its deltas; checks the order of the events."""
    items: list[dict[str, Any]] = []
    expected = ["response.output_item.added"]
    for event in events:
        kind = event.type
        assert kind in expected, (kind, expected)
        if kind == "response.output_item.added":
            assert event.output_index == len(items)
            items.append({"id": event.item.id, "text": ""})
            expected = ["response.content_part.added", "response.function_call_arguments.delta"]
            continue
        assert event.output_index == len(items) - 1
        item = items[-1]
        if kind == "response.output_item.done":
            assert event.item.id == item["id"]
            done = shown(event.item)
            text = done["arguments"] if done["type"] == "function_call" else done["content"][0]["text"]
            assert item["text"] == text
            items[-1] = done
            expected = ["response.output_item.added"]
            continue
        assert event.item_id == item["id"]
        name = kind.rpartition(".")[0]
        if kind.endswith(".delta"):
            item["text"] += event.delta
            expected = [f"{name}.delta", f"{name}.done"]
        elif kind == "response.content_part.added":
            assert event.part.text == ""
            expected = [f"response.{t}.{w}" for t in ("output_text", "reasoning_text") for w in ("delta", "done")]
        elif kind == "response.content_part.done":
            assert event.part.text == item["text"]
            expected = ["response.output_item.done"]
        else:
            assert (event.arguments if name == "response.function_call_arguments" else event.text) == item["text"]
            last = "response.output_item.done" if name == "response.function_call_arguments" else None
            expected = [last or "response.content_part.done"]
    return items


def test_a_text(stub: Rig) -> None:
    stub.runner.says("Hello ünd 你")
    response = both_ways(stub, instructions="Be brief.", input="Who?", metadata={"a": "b"}, user="me")
    assert response.output_text == "Hello ünd 你"
    assert response.status == "completed"
    assert prompt_of(stub).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>")
    assert (response.metadata, response.user, response.instructions) == ({"a": "b"}, "me", "Be brief.")
    assert response.usage.input_tokens == len(stub.runner.prompts[-1])
    assert response.usage.output_tokens == len("Hello ünd 你".encode()) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.store is False  # type: ignore[attr-defined]
    assert response.id != stub.client.responses.create(model="stub", input="Who?").id


def test_thoughts_are_an_item_of_their_own(stub: Rig) -> None:
    thought = "<think>\nhm\n</think>"
    stub.runner.says(thought + "\n\nHello")
    response = both_ways(stub)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "hm"
    assert response.output_text == "Hello"
    # `<think>` is spelt out by this runner, in bytes.
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)
    hidden = both_ways(stub, extra_body={"include_reasoning": False})
    assert [item.type for item in hidden.output] == ["message"]
    off = both_ways(stub, reasoning={"effort": "none", "summary": "auto"})
    assert prompt_of(stub).endswith("<think>\n\n</think>\n\n")
    assert off.output_text == thought + "\n\nHello"
    assert off.reasoning.effort == "none"


def test_calls_are_items(stub: Rig) -> None:
    stub.runner.says("<think>which?</think>\nI look.\n" + CALL + "\n" + CALL + "\nDone.")
    response = both_ways(stub, tools=TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "message", *["function_call"] * 2, "message"]
    call = response.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich"})
    assert call.call_id != response.output[3].call_id
    assert '"name": "weather"' in prompt_of(stub)
    one = both_ways(stub, tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in one.output].count("function_call") == 1
    none = both_ways(stub, tools=TOOLS, tool_choice="none")
    assert CALL in none.output_text


def test_an_agent_goes_on_with_its_own_items(stub: Rig) -> None:
    """Output items go back as they came; what belongs to one turn becomes one message."""
    stub.runner.says("<think>which?</think>\nI look.\n" + CALL)
    asked: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]
    first = stub.client.responses.create(model="stub", input=asked, tools=TOOLS)
    call = first.output[-1]
    stub.runner.says("21 degrees")
    answer = [{"type": "function_call_output", "call_id": call.call_id, "output": '{"t": 21}'}]
    second = both_ways(stub, input=[*asked, *[item.model_dump() for item in first.output], *answer], tools=TOOLS)
    assert second.output_text == "21 degrees"
    text = prompt_of(stub)
    assert text.count("<|im_start|>assistant\n") == 2
    assert "I look." + CALL.replace("\n</", "\n</") in text
    assert text.rindex('{"t": 21}') > text.rindex("<tool_call>")


def test_input_items_become_messages() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    function = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = {"type": "message", "role": "assistant", "content": parts, "id": "m", "status": "completed"}
    items = [{"role": "user", "content": parts}, thought, said, call, said, thought, call, call]
    items += [{"type": "function_call_output", "call_id": "c1", "output": parts}, thought]
    assert chat_messages(items, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": texts},
        {"role": "assistant", "reasoning_content": "hm", "content": texts, "tool_calls": [function]},
        {"role": "assistant", "content": texts},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [function, function]},
        {"role": "tool", "tool_call_id": "c1", "content": texts},
        {"role": "assistant", "reasoning_content": "hm"},
    ]


def test_length_and_an_empty_answer(stub: Rig) -> None:
    cut = both_ways(stub, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output_text, cut.output[0].status) == ("abc", "incomplete")
    stub.runner.says("")
    assert both_ways(stub).output_text == ""
    stub.runner.says("<think>")
    assert both_ways(stub).status == "completed"


def test_logprobs_are_of_the_answer(stub: Rig) -> None:
    stub.runner.says("<think>hm</think>\n\nab")
    for wish in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        response = both_ways(stub, **wish)
        tokens = response.output[1].content[0].logprobs
        assert [token.token for token in tokens if token.token in "ab"] == ["a", "b"]
        assert len(tokens) < 6, "none of the thought"
        assert {len(token.top_logprobs) for token in tokens} == {wish.get("top_logprobs", 0)}


class Flag(BaseModel):
    up: bool


class Person(BaseModel):
    age: int
    role: str


def test_structured_output_on_the_demo_model(demo: Rig) -> None:
    form = {
        "type": "json_schema",
        "name": "person",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}, "role": {"enum": ["king", "fool"]}},
            "required": ["age", "role"],
            "additionalProperties": False,
        },
    }
    sampling = {"model": "demo", "input": "Who?", "temperature": 0, "max_output_tokens": 60}
    person = Person.model_validate_json(demo.client.responses.create(**sampling, text={"format": form}).output_text)
    assert person.role in ("king", "fool")
    sent = both_ways(demo, **{**sampling, "text": {"format": {"type": "json_object", "schema": form["schema"]}}})
    assert Person.model_validate_json(sent.output_text).age <= 9
    with demo.client.responses.stream(**sampling, text={"format": form}) as stream:
        for _ in stream:
            pass
        assert Person.model_validate_json(stream.get_final_response().output_text) == person
    parsed = demo.client.responses.parse(**sampling, text_format=Flag)
    assert isinstance(parsed.output_parsed, Flag)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "stored"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, "nobody"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_output_tokens"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"reasoning": {"summary": "detailed"}}, "summary"),
        ({"reasoning_effort": "low"}, "reasoning"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(stub: Rig, body: Any, name: str) -> None:
    for stream in (False, True):
        error = refusal(stub.http.post("/v1/responses", json={"input": "hi", **body, "stream": stream}))
        assert name in error["message"]
    assert stub.runner.steps == 0


def test_nothing_is_asked_for_by_false_and_null(stub: Rig) -> None:
    stub.runner.says("ok")
    nulls = dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls", "text", "reasoning"))
    body = {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto", **nulls}
    assert stub.http.post("/v1/responses", json={"input": "hi", **body}).status_code == 200


def test_an_engine_that_fails_ends_a_stream_with_an_event(stub: Rig) -> None:
    stub.runner.errors = [RuntimeError("injected")]
    assert stub.http.post("/v1/responses", json={"input": "hi"}).status_code == 500
    stub.runner.errors = [RuntimeError("injected")]
    events = list(stub.client.responses.create(model="stub", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"


def test_a_stream_that_is_aborted_ends_with_an_event(stub: Rig) -> None:
    stub.runner.close_at = 3
    with stub.client.responses.create(model="stub", input="hi", stream=True) as stream:
        events = iter(stream)
        while next(events).type != "response.output_text.delta":
            pass
        for request_id in list(stub.service.admission.live):
            stub.llm.engine.abort(request_id)
        stub.runner.gate.set()
        last = list(events)[-1]
    assert last.type == "response.failed"
    assert "shutting down" in last.response.error.message
