"""Every field of a body has an effect that can be seen, is refused by its name, or asks for nothing (C46, D06, D30)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import known_fields
import pytest
import tokenizers
from server_rig import TEMPLATE, VOCAB, Rig, refusal, stub_rig, write_byte_tokenizer
from tokenizers import processors

from minipaged.server import unsupported
from minipaged.server.parts import StreamOptions, StructuredOutputs
from minipaged.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from minipaged.server.responses_protocol import ResponsesBody

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TEXT = f"<think>hm</think>\n\nok <|im_start|>{CALL}{CALL}"
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
GBNF = 'root ::= "a"'

# Field -> a value that asks for something, and what else the body holds, both with it and without it.
SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("other", {}),
    "stream": (True, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "stop": ("k", {}),
    "seed": (3, {}),
    "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}),
    "logit_bias": ({"5": 1}, {}),
    "top_k": (3, {}),
    "min_p": (0.1, {}),
    "repetition_penalty": (1.5, {}),
    "min_tokens": (2, {}),
    "ignore_eos": (True, {}),
    "stop_token_ids": ([107], {}),
    "skip_special_tokens": (False, {}),
    "include_stop_str_in_output": (True, {"stop": "k"}),
    "priority": (3, {}),
    "cache_salt": ("salt", {}),
    "request_id": ("mine", {}),
    "structured_outputs": ({"json": {"type": "object"}}, {}),
    "guided_json": ({"type": "object"}, {}),
    "guided_regex": ("a", {}),
    "guided_choice": (["a"], {}),
    "guided_grammar": (GBNF, {}),
    "json_schema": ('{"type": "object"}', {}),
    "regex": ("a", {}),
    "grammar": (GBNF, {}),
    "ebnf": (GBNF, {}),
}
GENERATION = {
    **SAMPLING,
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "n": (2, {}),
    "max_tokens": (3, {}),
    "response_format": ({"type": "json_object"}, {}),
    "prompt_logprobs": (2, {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
}
COMPLETIONS = {
    **GENERATION,
    "return_tokens_as_token_ids": (True, {"logprobs": 1}),
    "prompt": ("ho", {}),
    "logprobs": (1, {}),
    "echo": (True, {}),
    "add_special_tokens": (False, {}),
}
CONVERSATION = {
    "messages": ([{"role": "user", "content": "ho"}], {}),
    "tools": (TOOLS, {}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "documents": ([{"text": "a document"}], {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": [USER, {"role": "assistant", "content": "so"}]}),
    "add_special_tokens": (True, {}),
}
THOUGHTS = {
    "parallel_tool_calls": (False, {"tools": TOOLS}),
    "include_reasoning": (False, {}),
    "thinking_token_budget": (3, {}),
    "stop_in_reasoning": (True, {"stop": "m"}),
}
CHAT = {
    **GENERATION,
    **CONVERSATION,
    **THOUGHTS,
    "max_completion_tokens": (3, {}),
    "logprobs": (True, {}),
    "top_logprobs": (3, {"logprobs": True}),
    "tool_choice": ("required", {"tools": TOOLS}),
    "reasoning_effort": ("none", {}),
}
FLAT = [{"type": "function", **FUNCTION}]
RESPONSES = {
    **SAMPLING,
    **THOUGHTS,
    "parallel_tool_calls": (False, {"tools": FLAT}),
    "input": ([{"role": "user", "content": "ho"}], {}),
    "instructions": ("Be brief.", {}),
    "max_output_tokens": (3, {}),
    "tools": (FLAT, {}),
    "tool_choice": ({"type": "function", "name": "f"}, {"tools": FLAT}),
    "reasoning": ({"effort": "none"}, {}),
    "text": ({"format": {"type": "json_object"}}, {}),
    "include": (["message.output_text.logprobs"], {}),
    "top_logprobs": (2, {}),
    "metadata": ({"a": "b"}, {}),
    "user": ("me", {}),
    "safety_identifier": ("me", {}),
    "prompt_cache_key": ("me", {}),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
}
TOKENIZE = {
    **CONVERSATION,
    "model": ("nobody", {}),
    "prompt": ("ho", {"messages": None}),
    "return_token_strs": (True, {}),
}
BODIES: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[Any, dict[str, Any]]], set[str]]] = {
    "/v1/completions": (
        CompletionBody,
        {"prompt": "hi there", "max_tokens": 200},
        COMPLETIONS,
        known_fields.COMPLETIONS,
    ),
    "/v1/chat/completions": (ChatBody, {"messages": [USER]}, CHAT, known_fields.CHAT),
    "/v1/responses": (ResponsesBody, {"input": "hi"}, RESPONSES, known_fields.RESPONSES),
    "/tokenize": (TokenizeBody, {"messages": [USER]}, TOKENIZE, set()),
    "/detokenize": (
        DetokenizeBody,
        {"tokens": [97]},
        {"tokens": ([98], {}), "model": ("nobody", {})},
        set(),
    ),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server on which every field can have an effect: priorities, a first token that tokenizers add, documents."""
    folder = tmp_path_factory.mktemp("with_first_token")
    write_byte_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    backend.save(str(folder / "tokenizer.json"))
    template = "{%- if documents %}{{- documents[0].text }}{%- endif %}" + TEMPLATE
    engine = {"scheduling_policy": "priority"}
    names = ("stub", "other")
    with stub_rig(folder, template=template, engine=engine, num_blocks=1024, served_model_names=names) as rig:
        yield rig


def seen(rig: Rig, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Everything that a body can change: status and text of the answer, what the engine was asked for."""
    rig.runner.reset()
    ids = rig.service.tokenizer.encode(TEXT)
    rig.runner.says(ids)
    rig.runner.prompts, rig.runner.params = [], []
    response = rig.http.post(path, json={name: value for name, value in body.items() if value is not None})
    text = re.sub(r'(?<=[_"-])[0-9a-f]{32}(?=")|"(created|created_at|completed_at)":\d+', "", response.text)
    if response.headers["content-type"].startswith("text/event-stream"):  # how much is in one event is a matter of time
        text = repr(sorted(set(re.findall(r'"(\w+)":', text))))
    asked = [repr(params) for params in rig.runner.params]
    masks = [params.token_mask for params in rig.runner.params if params.token_mask is not None]
    if masks:  # functions have addresses: what they allow is what counts
        asked = [sum(masks[0]([])) if masks[0]([]) is not None else VOCAB]
    rig.wait_idle()
    return response.status_code, text, (asked, list(rig.runner.prompts))


@pytest.mark.parametrize("path", BODIES)
def test_every_field_that_is_taken_changes_something(rig: Rig, path: str) -> None:
    kind, base, effects, _ = BODIES[path]
    assert set(effects) == set(kind.model_fields), "a field without a case here: what is its effect?"
    for name, (value, extra) in effects.items():
        body = {**base, **extra}
        seen(rig, path, body)  # the prefix is in the cache from now on
        without = seen(rig, path, body)
        with_it = seen(rig, path, {**body, name: value})
        assert with_it[0] == 200 or value == "nobody", (name, without[1][:300], with_it[1][:300])
        assert with_it != without, f"{name} is taken and does nothing"
        assert seen(rig, path, {**body, name: None}) == without or name in base, f"{name}: null is not left out"


@pytest.mark.parametrize("path", BODIES)
def test_every_field_that_others_know_is_taken_or_refused_or_asks_for_nothing(path: str) -> None:
    kind, _, _, known = BODIES[path]
    taken, refused, ignored = set(kind.model_fields), set(kind.not_supported), set(unsupported.IGNORED)
    assert known <= taken | refused | ignored
    assert not taken & refused
    assert not refused & ignored


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_supported_is_refused_by_its_name(rig: Rig, path: str) -> None:
    kind, base, _, _ = BODIES[path]
    for name in kind.not_supported:
        for value in ("something", ["x"]):
            error = refusal(rig.http.post(path, json={**base, name: value}))
            assert error["param"] == name
            assert name in error["message"]
            assert error["message"].partition(": ")[2], "the way out"


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing_change_nothing(rig: Rig, path: str) -> None:
    kind, base, _, _ = BODIES[path]
    seen(rig, path, base)
    without = seen(rig, path, base)
    neutral = {name: unsupported.NEUTRAL.get(name, unsupported.ASKS_FOR_NOTHING) for name in kind.not_supported}
    for number in range(max(map(len, [*neutral.values(), ()]))):
        given = {name: values[number % len(values)] for name, values in neutral.items()}
        assert seen(rig, path, {**base, **given}) == without
    ignored = {name: "anything" for name in unsupported.IGNORED if name not in kind.model_fields}
    assert seen(rig, path, {**base, **ignored, "no_such_field": {"x": 1}}) == without


STRUCTURES = {
    "json": {"type": "object"},
    "regex": "a",
    "choice": ["a"],
    "grammar": GBNF,
    "json_object": True,
}


def test_every_name_in_structured_outputs(rig: Rig) -> None:
    options = {"disable_any_whitespace", "disable_additional_properties", "disable_fallback"}
    names = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    assert names == set(STRUCTURES) | options
    for name, value in STRUCTURES.items():
        status, text, (allowed, _) = seen(rig, "/v1/completions", {"prompt": "hi", "structured_outputs": {name: value}})
        assert status == 200, text
        assert 0 < allowed[0] < VOCAB / 2
    for wrong in (
        {},
        {"json": {}, "regex": "a"},
        {"structural_tag": "x"},
        {"regex": "a", "whitespace_pattern": " "},
        {"json": {}, "disable_additional_properties": True},
    ):
        error = refusal(rig.http.post("/v1/completions", json={"prompt": "x", "structured_outputs": wrong}))
        assert "structured_outputs" in error["message"]


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        ({"type": "json_object", "schema": {"type": "array"}}, False),
        ({"type": "json_schema", "schema": {"type": "array"}}, False),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "array"}, "name": "x", "strict": True}}, False),
        ({"type": "json_schema"}, True),
        ({"type": "text", "schema": {}}, True),
        ({"type": "json_object", "json_schema": {"schema": {}}}, True),
        ({"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}, True),
        ({"type": "json_object", "schemas": {}}, True),
        ({"type": "json_schema", "json_schema": {"schema": {}, "shema": {}}}, True),
        ({"type": "structural_tag", "structures": []}, True),
    ],
)
def test_a_schema_in_a_response_format_is_followed_wherever_it_stands(rig: Rig, form: Any, wrong: bool) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {**BODIES[path][1], "response_format": form}
        if wrong:
            assert "response_format" in refusal(rig.http.post(path, json=body))["message"]
            continue
        seen(rig, path, body)
        mask = rig.runner.params[-1].token_mask
        assert [token_id for token_id, allowed in enumerate(mask([])) if allowed] == [ord("[")]


def test_every_stream_option(rig: Rig) -> None:
    assert set(StreamOptions.model_fields) == {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_obfuscation": True}}
    assert "include_obfuscation" in refusal(rig.http.post("/v1/completions", json=body))["message"]


def test_grammars_in_lark_and_in_gbnf(demo: Rig) -> None:
    for grammar in ('start: "yes" | "no"', 'root ::= "yes" | "no"'):
        for field in ("guided_grammar", "grammar", "ebnf"):
            text = demo.http.post("/v1/completions", json={"prompt": "x", field: grammar}).json()["choices"][0]["text"]
            assert text in ("yes", "no")
    for grammar in ("", "x", "root ::= (", "start: ("):
        error = refusal(demo.http.post("/v1/completions", json={"prompt": "x", "grammar": grammar}))
        assert error["param"] == "grammar"
