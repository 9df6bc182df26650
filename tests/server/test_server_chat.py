"""Chats: template, thoughts, tools, n, log-probabilities; streamed and in one piece (C15, C32, C36, C40, C46)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_rig import Rig

from minipaged.text.reasoning import ReasoningSplitter, Thinking, thinking_after

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def both_ways(rig: Rig, **body: Any) -> dict[str, Any]:
    """The message and its finish_reason, in one piece; checks that the stream gives the same."""
    body = {"model": "stub", "messages": USER, **body}
    whole = rig.client.chat.completions.create(**body).choices[0]
    stream = rig.client.chat.completions.create(**body, stream=True)
    seen: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for number, chunk in enumerate(stream):
        (choice,) = chunk.choices
        assert (choice.delta.role == "assistant") == (number == 0)
        seen["content"] += choice.delta.content or ""
        seen["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == len(seen["calls"])
            assert call.id.startswith("call_")
            seen["calls"].append((call.function.name, json.loads(call.function.arguments)))
        assert seen["finish_reason"] is None, "the reason comes last"
        seen["finish_reason"] = choice.finish_reason
    message = whole.message
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
    assert seen == {
        "content": message.content or "",
        "reasoning_content": message.reasoning_content or "",
        "calls": calls,
        "finish_reason": whole.finish_reason,
    }
    return seen


def prompt_of(rig: Rig) -> str:
    return rig.service.tokenizer.decode(rig.runner.prompts[-1], skip_special_tokens=False)


def test_c32_thinking_is_split_from_content_when_it_is_on(stub: Rig) -> None:
    stub.runner.says("<think>\nhm, é\n</think>\n\nHello\n")
    for kwargs in ({}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}):
        answer = both_ways(stub, **kwargs)
        assert answer["reasoning_content"] == "hm, é"
        assert answer["content"] == "Hello\n"
        assert answer["finish_reason"] == "stop"
        assert prompt_of(stub).endswith("<|im_start|>assistant\n")


def test_c32_thinking_off_closes_the_thought_and_splits_nothing(stub: Rig) -> None:
    stub.runner.says("<think>\nhm\n</think>\n\nHello")
    answer = both_ways(stub, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer["reasoning_content"] == ""
    assert answer["content"] == "<think>\nhm\n</think>\n\nHello"
    assert prompt_of(stub).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_c32_a_thought_that_the_template_opens(stub: Rig) -> None:
    stub.runner.says("hm</think>Hello")
    answer = both_ways(stub, extra_body={"chat_template_kwargs": {"always_think": True}})
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Hello")


def test_a_thought_that_does_not_end_is_reasoning(stub: Rig) -> None:
    stub.runner.says("<think>for ever and ever")
    answer = both_ways(stub, max_tokens=14)
    assert answer == {
        "content": "",
        "reasoning_content": "for eve",
        "calls": [],
        "finish_reason": "length",
    }


def test_reasoning_goes_back_into_the_template(stub: Rig) -> None:
    stub.runner.says("ok")
    messages = [*USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}, *USER]
    assert stub.client.chat.completions.create(model="stub", messages=messages).choices[0].message.content == "ok"


def test_continue_final_message(stub: Rig) -> None:
    stub.runner.says("lo")
    messages = [*USER, {"role": "assistant", "content": "Hel"}]
    answer = both_ways(stub, messages=messages, extra_body={"continue_final_message": True})
    assert answer["content"] == "lo"
    assert prompt_of(stub).endswith("assistant\nHel")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", 1),
        ("I look.\n" + CALL + "\n" + CALL + "\n", "I look.", 2),
        ("<think>which?</think>\n" + CALL, "", 1),
        ("no call", "no call", 0),
        ("a < b <tool", "a < b <tool", 0),
        ("x <tool_call>{broken}</tool_call> y", "x <tool_call>{broken}</tool_call> y", 0),
        ('<tool_call>{"name": "weather"}</tool_call>', '<tool_call>{"name": "weather"}</tool_call>', 0),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
        ('<tool_call>{"name": "weather", "arguments": {}}', '<tool_call>{"name": "weather", "arguments": {}}', 0),
    ],
)
def test_tool_calls(stub: Rig, text: str, content: str, calls: int) -> None:
    """Whole calls become `tool_calls`; malformed or unfinished ones stay text, character by character."""
    stub.runner.says(text)
    answer = both_ways(stub, tools=TOOLS)
    assert answer["calls"] == [("weather", {"city": "Zürich"})] * calls
    assert answer["content"] == content
    assert answer["finish_reason"] == ("tool_calls" if calls else "stop")
    assert '"name": "weather"' in prompt_of(stub)


def test_tools_are_not_parsed_unless_they_are_given(stub: Rig) -> None:
    stub.runner.says(CALL)
    assert both_ways(stub)["content"] == CALL
    assert both_ways(stub, tools=TOOLS, tool_choice="none")["content"] == CALL
    assert "weather" not in prompt_of(stub)


def test_the_result_of_a_tool_goes_back(stub: Rig) -> None:
    stub.runner.says(CALL)
    message = stub.client.chat.completions.create(model="stub", messages=USER, tools=TOOLS).choices[0].message
    assert message.content is None
    stub.runner.says("21 degrees")
    messages = [
        *USER,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"},
    ]
    assert both_ways(stub, messages=messages, tools=TOOLS)["content"] == "21 degrees"
    assert '"arguments": {"city": "Zürich"}' in prompt_of(stub)


def test_c15_n_children_in_one_piece_and_streamed(stub: Rig) -> None:
    """Indexes once each, the prompt counted once, a child that ends early does not end the others."""

    def script(sequence: Any) -> int:
        if sequence.index == 1 and sequence.num_generated == 2:
            return 258
        return ord("a") + sequence.index + 3 * sequence.num_generated

    stub.runner.script = script
    answer = stub.client.chat.completions.create(model="stub", messages=USER, n=3, max_tokens=5)
    texts = {c.index: c.message.content for c in answer.choices}
    assert texts == {0: "adgjm", 1: "be", 2: "cfilo"}
    assert {c.index: c.finish_reason for c in answer.choices} == {0: "length", 1: "stop", 2: "length"}
    assert answer.usage.completion_tokens == 5 + 3 + 5
    assert answer.usage.prompt_tokens == len(stub.runner.prompts[-1])
    streamed = {0: "", 1: "", 2: ""}
    reasons = {}
    options = {"include_usage": True}
    for chunk in stub.client.chat.completions.create(
        model="stub", messages=USER, n=3, max_tokens=5, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            assert choice.index not in reasons
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert streamed == texts
    assert reasons == {0: "length", 1: "stop", 2: "length"}
    assert usage.completion_tokens == answer.usage.completion_tokens
    assert usage.prompt_tokens == answer.usage.prompt_tokens


def test_c15_sampled_children_of_the_demo_model(demo: Rig) -> None:
    def texts() -> list[str]:
        answer = demo.client.chat.completions.create(
            model="demo", messages=USER, n=3, seed=7, temperature=1, max_tokens=12
        )
        return [choice.message.content for choice in sorted(answer.choices, key=lambda c: c.index)]

    first = texts()
    assert len(set(first)) > 1
    assert texts() == first
    greedy = demo.client.chat.completions.create(model="demo", messages=USER, n=3, temperature=0, max_tokens=12)
    assert len({choice.message.content for choice in greedy.choices}) == 1


def test_c36_chat_logprobs(stub: Rig) -> None:
    stub.runner.says("aé")
    create = stub.client.chat.completions.create
    assert create(model="stub", messages=USER).choices[0].logprobs is None
    assert create(model="stub", messages=USER, logprobs=False).choices[0].logprobs is None
    for wish, k in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 5}, 5)):
        whole = create(model="stub", messages=USER, logprobs=True, **wish).choices[0].logprobs.content
        assert [entry.bytes for entry in whole[:-1]] == [[97], [195], [169]]
        assert [len(entry.top_logprobs) for entry in whole] == [k] * 4
        assert {entry.logprob for entry in whole} == {-0.5}
        if k:
            assert [top.logprob for top in whole[0].top_logprobs] == [-0.5, -1.0, -9999.0, -3.0, -4.0]
        streamed = [
            entry
            for chunk in create(model="stub", messages=USER, logprobs=True, stream=True, **wish)
            for entry in chunk.choices[0].logprobs.content
        ]
        assert streamed == whole
    for k in (21, 400, -1):
        body = {"messages": USER, "logprobs": True, "top_logprobs": k}
        assert stub.http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("text", [" leading", "    .", "你😀é", "tail ", "\n\n", "a\u200db"])
def test_c39_c40_deltas_add_up(stub: Rig, text: str) -> None:
    stub.runner.says(text)
    assert both_ways(stub)["content"] == text


def test_c39_a_text_that_ends_inside_a_character(stub: Rig) -> None:
    stub.runner.says("你😀")
    assert both_ways(stub, max_tokens=5)["content"] == "你\ufffd"


def test_c37_stop_strings(stub: Rig) -> None:
    stub.runner.says("abcSTOPdef")
    assert both_ways(stub, stop=["STOP"])["content"] == "abc"
    assert both_ways(stub, stop=["def", "ST", "STOP"])["content"] == "abc"
    assert both_ways(stub, stop=["STOP"], extra_body={"include_stop_str_in_output": True})["content"] == "abcSTOP"
    assert both_ways(stub, stop=[])["content"] == "abcSTOPdef"
    stub.runner.says("abcSTOX")
    assert both_ways(stub, stop=["STOP", "1", "2", "3", "4"])["content"] == "abcSTOX"


def test_c38_ignore_eos_and_min_tokens(stub: Rig) -> None:
    stub.runner.says("ab")
    answer = both_ways(stub, max_tokens=8, extra_body={"ignore_eos": True})
    assert answer["finish_reason"] == "length"
    usage = stub.client.chat.completions.create(
        model="stub", messages=USER, max_tokens=8, extra_body={"ignore_eos": True}
    ).usage
    assert usage.completion_tokens == 8
    stub.runner.says("abSTOPcdSTOP")
    answer = both_ways(stub, stop="STOP", extra_body={"min_tokens": 8})
    assert answer["content"] == "abSTOPcd"


# ---- the parsers alone: whatever the cuts


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def split(thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(thinking)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


SNIPPETS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", " ", "a", "é", "<", ">", "\n\n", "k>", "word"]),
    max_size=9,
)


@given(SNIPPETS, st.randoms(use_true_random=False), st.sampled_from(Thinking))
def test_reasoning_does_not_depend_on_the_cuts(snippets: list[str], rng: random.Random, thinking: Thinking) -> None:
    text = "".join(snippets)
    whole = split(thinking, [text])
    assert split(thinking, cut(text, rng)) == whole
    assert split(thinking, list(text)) == whole
    # An independent reading of the rule.
    begins = text.lstrip().startswith("<think>")
    if thinking is Thinking.OFF or (thinking is Thinking.POSSIBLE and not begins):
        assert whole == ("", text)
        return
    inner = text.lstrip()[len("<think>") :] if thinking is Thinking.POSSIBLE else text
    thought, closed, content = inner.partition("</think>")
    assert whole == (thought.strip("\n"), content.lstrip("\n") if closed else "")


@pytest.mark.parametrize(
    ("prompt", "kwargs", "wanted"),
    [
        ("<|im_start|>assistant\n", {}, Thinking.POSSIBLE),
        ("user <think> a\nassistant\n", {}, Thinking.POSSIBLE),
        ("assistant\n<think>\n", {}, Thinking.OPENED),
        ("assistant\n<think>\n\n</think>\n\n", {}, Thinking.OFF),
        ("assistant\n", {"enable_thinking": False}, Thinking.OFF),
        ("assistant\n<think>", {"enable_thinking": False}, Thinking.OPENED),
        ("assistant\n<think>so", {"continued": "<think>so"}, Thinking.OPENED),
        ("assistant\n<think>so</think>a", {"continued": "<think>so</think>a"}, Thinking.OFF),
    ],
)
def test_what_a_prompt_says_about_thoughts(prompt: str, kwargs: dict[str, Any], wanted: Thinking) -> None:
    assert thinking_after(prompt, **kwargs) is wanted


WALKS = '{"name": "weather", "arguments": {"city": "a", "days": 2}}'


@pytest.mark.parametrize(
    "arguments", ['{"text": "use </tool_call> here"}', r'{"half": "\ud83d!", "nul": "\u0000"}', '{"a":1 ,  "b": 2}']
)
def test_the_models_own_arguments_come_through(stub: Rig, arguments: str) -> None:
    stub.runner.says(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    message = stub.client.chat.completions.create(model="stub", messages=USER, tools=TOOLS, n=2).choices[1].message
    assert message.tool_calls[0].function.arguments == arguments
    assert both_ways(stub, tools=TOOLS)["calls"] == [("weather", json.loads(arguments))]


def test_half_a_surrogate_pair_anywhere_breaks_no_response(stub: Rig) -> None:
    stub.runner.says(r'<tool_call>{"name": "\ud83d", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>')
    for stream in (False, True):
        answer = stub.http.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS, "stream": stream})
        assert answer.status_code == 200
        assert r"\ud83d" in answer.text
        assert "error" not in answer.text


def test_stop_strings_spare_the_thought_unless_asked_not_to(stub: Rig) -> None:
    stub.runner.says("<think>\na\n\nb\n</think>\n\nHello\n\nyou")
    answer = both_ways(stub, stop=["\n\n"])
    assert (answer["reasoning_content"], answer["content"], answer["finish_reason"]) == ("a\n\nb", "Hello", "stop")
    answer = both_ways(stub, stop=["\n\n"], extra_body={"stop_in_reasoning": True})
    assert (answer["reasoning_content"], answer["content"]) == ("a", "")


def test_tools_are_printed_in_the_clients_order(stub: Rig) -> None:
    tool = {
        "function": {"parameters": {"properties": {}, "type": "object"}, "strict": True, "name": "f"},
        "type": "function",
    }
    stub.runner.says("ok")
    both_ways(stub, tools=[tool])
    assert json.dumps(tool) in prompt_of(stub)
