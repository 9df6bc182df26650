"""Grammars on tokenizers with Qwen3's added tokens: whatever is drawn under the mask is a text of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from grammar_rig import write, write_qwen3_tokenizer

from minipaged.server.errors import ApiError
from minipaged.server.guided import Guide
from minipaged.text.tokenizer import Tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "use </tool_call> here", "你好"]}},
}
CLOCK = {
    "type": "object",
    "properties": {"utc": {"type": "boolean"}},
    "required": ["utc"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "weather_clock", "parameters": CLOCK}},
    {"type": "function", "function": {"name": "any"}},
]
CALL = re.compile(r"<tool_call>\n(\{.*?\})\n</tool_call>(?:\n(?=<tool_call>)|\Z)", re.DOTALL)


class Case:
    """A guide over one kind of tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
        self.guide = Guide(tokenizer, self.ends, 2048)  # more ids than the tokenizer knows, as every Qwen3

    def texts(self, mask: Callable[[list[int]], Any], seeds: int) -> list[str]:
        drawn = [write(mask, self.ends, seed) for seed in range(seeds)]
        found = [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in drawn if ids is not None]
        assert len(found) > seeds / 2, "too few texts come to an end"
        return found


@pytest.fixture(scope="module", params=["added", "special", "text"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(write_qwen3_tokenizer(tmp_path_factory.mktemp(request.param), tags=request.param))


def calls_of(text: str) -> list[dict[str, Any]]:
    """What stands between the tags; fails for anything else in the text."""
    found = CALL.findall(text)
    assert "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in found) == text
    return [json.loads(call) for call in found]


@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_follow_the_schema_of_a_tool_that_was_named(case: Case, parallel: bool) -> None:
    names = ["weather", "weather_clock"]
    mask = case.guide.mask_for_tools(TOOLS, names, parallel=parallel, thought_is_open=False)
    counts, called = set(), set()
    for text in case.texts(mask, 60):
        calls = calls_of(text)
        counts.add(len(calls))
        for call in calls:
            assert list(call) == ["name", "arguments"]
            jsonschema_rs.validate({"weather": WEATHER, "weather_clock": CLOCK}[call["name"]], call["arguments"])
            called.add(call["name"])
    assert called == set(names)
    assert counts == {1} if not parallel else counts > {1}


def test_a_forced_call_begins_and_ends_with_the_tokens_that_the_tokenizer_has(case: Case) -> None:
    mask = case.guide.mask_for_tools(TOOLS, ["weather_clock"], parallel=False, thought_is_open=False)
    for seed in range(10):
        token_ids = write(mask, case.ends, seed)
        assert token_ids is not None
        whole = '<tool_call>\n{"name": "weather_clock", "arguments": {"utc": true}}\n</tool_call>'
        assert case.tokenizer.decode(token_ids, skip_special_tokens=False) in (whole, whole.replace("true", "false"))
        tags = [case.tokenizer.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>")]
        if tags != [None, None]:
            assert [token_ids[0], token_ids[-1]] == tags


def test_a_tool_without_parameters_takes_any_object(case: Case) -> None:
    mask = case.guide.mask_for_tools(TOOLS, ["any"], parallel=False, thought_is_open=False)
    head, tail = '<tool_call>\n{"name": "any", "arguments": ', "}\n</tool_call>"
    for arguments in ("{}", '{"a": [1, null, {"b": "x"}]}'):
        ids = case.tokenizer.encode(head + arguments + tail)
        for end in range(len(ids)):
            assert mask(ids[:end])[ids[end]], case.tokenizer.decode(ids[: end + 1])
        assert mask(ids)[case.ends].all()
    ids = case.tokenizer.encode(head)
    assert not mask(ids)[case.tokenizer.encode("[")[0]]


def test_forced_calls_after_an_open_thought(case: Case) -> None:
    mask = case.guide.mask_for_tools(TOOLS, ["weather_clock"], parallel=False, thought_is_open=True)
    thought = case.tokenizer.encode("What is 1 < 2?\n</think>\n\n")
    text = case.tokenizer.encode('<tool_call>\n{"name": "weather_clock", "arguments": {"utc": true}}\n</tool_call>')
    written = [*thought, *text]
    for end in range(len(written)):
        allowed = mask(written[:end])
        assert allowed[written[end]], case.tokenizer.decode(written[: end + 1], skip_special_tokens=False)
        assert not allowed[case.ends].any(), "neither a thought nor half a call is an answer"
    assert mask(written)[case.ends].all()


@pytest.mark.parametrize(
    ("tools", "names", "param", "message"),
    [
        (TOOLS, ["nobody"], "tool_choice", "'nobody'"),
        (TOOLS, [], "tools", "at least one"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], ["f"], "tools", "object"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "no"}}}}}],
            ["f"],
            "tools",
            "cannot be used",
        ),
        (
            [{"function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}}],
            ["f"],
            "tools",
            "not",
        ),
    ],
)
def test_tools_that_cannot_be_forced_are_refused_by_name(
    case: Case, tools: Any, names: list[str], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        case.guide.mask_for_tools(tools, names, parallel=False, thought_is_open=False)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_keywords_that_no_grammar_knows_do_not_stop_a_tool_that_is_not_strict(case: Case) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean", "not": {"const": 3}}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**schema, "additionalProperties": False}}}]
    mask = case.guide.mask_for_tools(tools, ["f"], parallel=False, thought_is_open=False)
    for text in case.texts(mask, 5):
        assert isinstance(calls_of(text)[0]["arguments"]["a"], bool)
