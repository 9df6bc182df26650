"""Chat templates against Hugging Face's apply_chat_template. CASES C32."""

from __future__ import annotations

import dataclasses
import itertools
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from text_rig import write_byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from minipaged.errors import CheckpointError
from minipaged.text.chat_template import ChatTemplate
from minipaged.text.tokenizer import Tokenizer

# The logic of Qwen3's template (tools, thinking of earlier turns dropped, enable_thinking), written for these tests.
QWEN_LIKE = """
{%- macro turn(role, body) -%}
<|im_start|>{{ role }}
{{ body }}<|im_end|>
{% endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- turn('system', messages[0].content) }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- set text = message.content if message.content is string else '' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- text }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | default(call)) | tojson(indent=2) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- turn('user', '<tool_response>' + message.content + '</tool_response>') }}
    {%- elif message.role in ['user', 'system'] %}
        {{- turn(message.role, message.content) }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}
    {{- '[' + document.title + ']' + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

CALL = {
    "type": "function",
    "function": {"name": "f", "arguments": {"city": "Zürich <&'\">", "n": 3, "deep": [1.5, None]}},
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "你好 <b> & 'x' 😀"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "and 2+2?"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "look it up"},
        {"role": "tool", "content": "sunny", "name": None},
        {"role": "assistant", "content": "It is sunny.  "},
    ],
    [
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": None},
    ],
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "ärger <x>", "parameters": {"b": 1, "a": [True]}}}
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    write_byte_level_tokenizer(path)
    (path / "chat_template.jinja").write_text(QWEN_LIKE)
    return path


@pytest.fixture(scope="module")
def hf(folder: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    loaded.chat_template = QWEN_LIKE
    return loaded


@pytest.fixture(scope="module")
def template(folder: Path) -> ChatTemplate:
    loaded = ChatTemplate.from_folder(folder, Tokenizer(folder).special_tokens)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_rendering_and_tokens_equal_hugging_face_c32(
    folder: Path, template: ChatTemplate, hf: PreTrainedTokenizerFast, messages: list, tools: list | None
) -> None:
    documents = [{"title": "T", "text": "x"}]
    kinds: list[dict] = [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"documents": documents}]
    for generate, kwargs in itertools.product([True, False], kinds):
        before = json.dumps(messages)
        got = template.render(messages, tools=tools, add_generation_prompt=generate, **kwargs)
        want = hf.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False, **kwargs)
        assert got == want
        ids = hf.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, return_dict=False, **kwargs)
        assert Tokenizer(folder).encode(got, add_special_tokens=False) == list(ids)
        assert json.dumps(messages) == before


def test_enable_thinking_is_passed_on_c32(template: ChatTemplate) -> None:
    off = template.render(CHATS[0], enable_thinking=False)
    on = template.render(CHATS[0], enable_thinking=True)
    assert off == on + "<think>\n\n</think>\n\n"
    assert on == template.render(CHATS[0])
    assert on.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("content", ["It is", "It is  ", [{"type": "text", "text": "It is "}]])
@pytest.mark.parametrize("strip", [False, True])
def test_continue_final_message_equals_hugging_face(hf: PreTrainedTokenizerFast, content: Any, strip: bool) -> None:
    body = "(m.content if m.content is string else m.content[0].text)" + (" | trim" if strip else "")
    source = "{% for m in messages %}[{{ m.role }}]{{ " + body + " }}<|im_end|>{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    want = hf.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)
    assert ChatTemplate(source).render(messages, **kwargs) == want
    with pytest.raises(ValueError, match="exclude each other"):
        ChatTemplate(source).render(messages, continue_final_message=True)
    with pytest.raises(ValueError, match="leaves out the end"):
        ChatTemplate("x").render(messages, **kwargs)
    with pytest.raises(ValueError, match="needs text"):
        ChatTemplate(source).render([{"role": "assistant"}], **kwargs)


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'b': 'é<>&', 'a': 1} | tojson }}",
        "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true, indent=1, separators=(',', ': ')) }}",
        "  {% if true %}\n  x\n  {% endif %}\ny\n",
        "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{{ messages[0].content[::-1] }} {{ eos_token }} {{ missing }} {{ missing is defined }}",
        "{{ messages | map(attribute='role') | join(',') }}{{ tools }}{{ documents }}{{ add_generation_prompt }}",
    ],
)
def test_jinja_environment_equals_hugging_face(hf: PreTrainedTokenizerFast, source: str) -> None:
    got = ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(CHATS[0])
    want = hf.apply_chat_template(CHATS[0], chat_template=source, tokenize=False, add_generation_prompt=True)
    assert got == want


def test_strftime_now_gives_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(CHATS[0]) == str(datetime.now().year)


def test_messages_may_be_objects() -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    pydantic_like = SimpleNamespace(model_dump=lambda: {"role": "assistant", "content": "b"})
    assert ChatTemplate(source).render([Message("user", "a"), pydantic_like]) == "user:a;assistant:b;"


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHATS[0], "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", CHATS[0], "has no attribute"),
        ("{{ messages[0].content + 1 }}", CHATS[0], "TypeError"),
        ("{% for x %}", CHATS[0], "chat template failed"),
        ("{{ ''.__class__.__mro__ }}", CHATS[0], "chat template failed"),
        ("{{ messages.append(1) }}", CHATS[0], "chat template failed"),
        ("x", [], "at least one message, got none"),
        ("x", ["hi"], "list of dicts"),
        ("x", [{"role": "user", "content": object()}], "JSON-like"),
    ],
)
def test_errors_say_what_went_wrong(source: str, messages: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(source).render(messages)


def test_tools_must_be_schemas() -> None:
    with pytest.raises(ValueError, match="tools must be a list of dicts"):
        ChatTemplate("x").render(CHATS[0], tools=[print])  # type: ignore[list-item]


def test_named_templates_and_where_they_come_from(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    one = ChatTemplate.from_folder(tmp_path)
    assert one is not None
    assert one.render(CHATS[0], tools=TOOLS) == "one"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    two = ChatTemplate.from_folder(tmp_path)
    assert two is not None
    assert [two.render(CHATS[0]), two.render(CHATS[0], tools=TOOLS)] == ["plain", "with tools"]
    assert two.render(CHATS[0], template="tool_use") == "with tools"
    assert two.render(CHATS[0], template="{{ messages[0].role }}") == "user"
    with pytest.raises(ValueError, match=r"no chat template 'rag', only \['default', 'tool_use'\]"):
        two.render(CHATS[0], template="rag")
    with pytest.raises(ValueError, match="no default chat template"):
        ChatTemplate({"rag": "x"}).render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    three = ChatTemplate.from_folder(tmp_path)
    assert three is not None
    assert [three.render(CHATS[0]), three.render(CHATS[0], template="rag")] == ["from the file", "rag"]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates" / "rag.jinja").unlink()
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match="chat_template must be"):
        ChatTemplate.from_folder(tmp_path)


def test_keys_without_a_value_are_dropped_and_reasoning_is_found_under_each_name(hf: PreTrainedTokenizerFast) -> None:
    source = (
        "{% for m in messages %}{{ m.content is defined }} {{ m.name is defined }} {{ m.thinking }} "
        "{{ m.reasoning_content }};{% endfor %}"
    )
    messages = [
        {"role": "assistant", "content": None, "name": None, "reasoning": "r"},
        {"role": "assistant", "content": "", "name": "n", "thinking": "t"},
        {"role": "assistant", "content": "", "reasoning_content": "c"},
        {"role": "user", "content": "x"},
    ]
    got = ChatTemplate(source).render(messages)
    assert got == "False False r r;True True t t;True False c c;True False  ;"
    assert got == hf.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)


STRINGS_ONLY = (  # what Qwen3's template does with a content that is no string
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "[{{ m.role }}]{{ content }}{% endfor %}"
)


def test_text_parts_reach_a_template_that_reads_strings() -> None:
    """The content of OpenAI's clients is often a list of parts: none of it may get lost without a word."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate(STRINGS_ONLY)
    assert template.render([{"role": "user", "content": parts}]) == "[user]one\ntwo"
    assert template.render([{"role": "user", "content": []}, {"role": "assistant"}]) == "[user][assistant]"
    for loop in ("m.content", "m['content']", 'm[ "content" ]', "content"):
        reads = "{% for m in messages %}{% set content = m.content %}{% for p in LOOP %}<{{ p.text }}>{% endfor %}"
        reads = reads.replace("LOOP", loop) + "{% endfor %}"
        assert ChatTemplate(reads).render([{"role": "user", "content": parts}]) == "<one><two>"


@pytest.mark.parametrize(
    "content", [5, True, {"text": "hi"}, ["hi"], [{"type": "image_url", "image_url": {}}], [{"type": "text"}]]
)
def test_a_content_that_would_be_left_out_is_refused(content: object) -> None:
    """C45: wrong types are an error, not an empty message."""
    with pytest.raises(ValueError, match="content must be a string"):
        ChatTemplate(STRINGS_ONLY).render([{"role": "user", "content": content}])
