"""What a body may hold, and what is answered to one that is wrong (C42, C43, C44, C45, C46, C47)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from server_rig import Rig, refusal, stub_rig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BOTH = [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)]


def still_works(rig: Rig) -> None:
    rig.runner.says("ok")
    assert rig.client.completions.create(model="stub", prompt="hi").choices[0].text == "ok"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[
            ("/v1/completions", {"prompt": prompt})
            for prompt in ("", [], [""], [[]], ["a", ""], None, [1, "a"], [[1], "a"], ["a", [1]], {}, 5)
        ],
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {}),
        *[(path, {**body, "max_tokens": value}) for path, body in BOTH for value in (0, -1)],
        *[(path, {**body, "n": value}) for path, body in BOTH for value in (0, -1, 10**9)],
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}),
    ],
)
def test_c42_empty_prompts_and_zero_tokens_are_refused(stub: Rig, path: str, body: Any, stream: bool) -> None:
    refusal(stub.http.post(path, json={**body, "stream": stream}))
    still_works(stub)


def test_c44_default_and_enormous_max_tokens(tokenizer_folder: Path) -> None:
    """Completions: 16, or what fits if that is less. Chat: what fits. 10**9 is refused, never reserved."""
    with stub_rig(tokenizer_folder, engine={"max_model_len": 64}) as rig:
        create = rig.client.completions.create
        for given in ({}, {"max_tokens": None}):
            response = rig.http.post("/v1/completions", json={"prompt": [7] * 10, **given}).json()
            assert response["usage"]["completion_tokens"] == 16
            assert response["choices"][0]["finish_reason"] == "length"
        assert create(model="stub", prompt=[7] * 10, max_tokens=10).usage.completion_tokens == 10
        assert create(model="stub", prompt=[7] * 60).usage.completion_tokens == 4
        for path, body in BOTH:
            assert "1000000000" in refusal(rig.http.post(path, json={**body, "max_tokens": 10**9}))["message"]
        chat = rig.client.chat.completions.create
        whole = chat(model="stub", messages=CHAT["messages"])
        assert whole.usage.total_tokens == 64
        assert whole.choices[0].finish_reason == "length"
        assert chat(model="stub", messages=CHAT["messages"], max_completion_tokens=7).usage.completion_tokens == 7
        assert chat(model="stub", messages=CHAT["messages"], max_tokens=7).usage.completion_tokens == 7
        both = {**CHAT, "max_tokens": 5, "max_completion_tokens": 7}
        refusal(rig.http.post("/v1/chat/completions", json=both))
        rig.runner.says("four")
        ended = chat(model="stub", messages=CHAT["messages"])
        assert ended.choices[0].finish_reason == "stop"


BAD_BODIES = [
    b"{not json",
    b"",
    b"[]",
    b"null",
    b"123",
    b'"text"',
    b"\xff\xfe",
    '{"prompt": "hi"}'.encode("utf-16"),
    b'\xef\xbb\xbf{"prompt": "hi"}',
    b'{"prompt": "hi", "user": "\xff"}',
    b'{"prompt": "\\ud83d", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    b'{"prompt": "\\ude00x", "messages": [{"role": "user", "content": "\\ude00x"}]}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "unknown": "\\ud83d"}',
    b'{"prompt": "hi", "messages": "hi", "max_tokens": "5"}',
    b'{"prompt": 5, "messages": [5]}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5.5}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": true}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": "0.5"}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": -1}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "top_p": 1.1}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": "yes"}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stop": [""]}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stop": ""}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stop": 5}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "logit_bias": {"x": 1}}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5000": 1}}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [-1]}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "min_tokens": 9, "max_tokens": 5}',
    b'{"prompt": [9999], "messages": [{"role": "alien", "content": "hi"}]}',
    b'{"prompt": [-1], "messages": [{"role": "user"}]}',
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_c45_malformed_bodies_are_refused(stub: Rig, path: str) -> None:
    """Status 400 and OpenAI's error object, also when stream is true; never a 500, an event, or a traceback."""
    for body in BAD_BODIES:
        for raw in (body, body.replace(b"{", b'{"stream": true, ', 1) if body.startswith(b'{"') else body):
            response = stub.http.post(path, content=raw, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, (raw[:100], response.text)
            refusal(response)
    assert stub.runner.steps == 0
    still_works(stub)


@pytest.mark.parametrize("stream", [False, True])
def test_c45_paired_escapes_and_nul_are_text(stub: Rig, stream: bool) -> None:
    stub.runner.says("ok")
    for text in ("\\ud83d\\ude00", "a\\u0000b", "\\u4f60"):
        raw = f'{{"prompt": "{text}", "stream": {json.dumps(stream)}}}'.encode()
        assert stub.http.post("/v1/completions", content=raw).status_code == 200
        assert stub.runner.prompts[-1] == list(json.loads(f'"{text}"').encode())


def test_error_names_the_field(stub: Rig) -> None:
    for body, param in (
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [1]}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ):
        error = refusal(stub.http.post("/v1/completions", json={"prompt": "x", **body}))
        assert error["param"].startswith(param)
        assert param in error["message"]
        assert error["type"] == "invalid_request_error"


def test_c46_unknown_fields_are_ignored(stub: Rig) -> None:
    stub.runner.says("ok")
    extra = {"metadata": {"a": "b"}, "no_such_field": [1, {"x": None}], "user": "me", "service_tier": "auto"}
    message = {"role": "user", "content": "hi", "name": "ann", "no_such_field": 1, "refusal": None}
    nulls = dict.fromkeys(
        ("max_tokens", "n", "stop", "stream", "logprobs", "temperature", "tools", "seed", "logit_bias", "best_of"), None
    )
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": [message]})):
        assert stub.http.post(path, json={**body, **extra, **nulls}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "best_of", "x"),
        ("/v1/completions", "suffix", "end"),
        ("/v1/completions", "use_beam_search", True),
        ("/v1/completions", "prompt_logprobs", 21),
        ("/v1/completions", "truncate_prompt_tokens", 5),
        ("/v1/completions", "allowed_token_ids", [1]),
        ("/v1/completions", "bad_words", ["x"]),
        ("/v1/completions", "logprobs", 21),
        ("/v1/completions", "logprobs", -1),
        ("/v1/completions", "logprobs", True),
        ("/v1/completions", "priority", 1),
        ("/v1/completions", "cache_salt", ""),
        ("/v1/completions", "stream_options", {"include_usage": True}),
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "function_call", "auto"),
        ("/v1/chat/completions", "modalities", ["audio"]),
        ("/v1/chat/completions", "audio", {"voice": "x"}),
        ("/v1/chat/completions", "store", True),
        ("/v1/chat/completions", "reasoning_effort", "huge"),
        ("/v1/chat/completions", "chat_template", "{{ 1 }}"),
        ("/v1/chat/completions", "chat_template_kwargs", {"template": "{{ 1 }}"}),
        ("/v1/chat/completions", "chat_template_kwargs", {"messages": []}),
        ("/v1/chat/completions", "tool_choice", "required"),
        ("/v1/chat/completions", "tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("/v1/chat/completions", "tools", [{"type": "retrieval"}]),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": ""}}]),
        ("/v1/chat/completions", "top_logprobs", 5),
        ("/v1/chat/completions", "logprobs", 5),
    ],
)
def test_c46_what_is_not_supported_and_changes_the_answer_is_refused(
    stub: Rig, path: str, field: str, value: Any
) -> None:
    body = {"prompt": "hi"} if path == "/v1/completions" else CHAT
    assert field in refusal(stub.http.post(path, json={**body, field: value}))["message"]
    assert stub.runner.steps == 0


def test_c46_neutral_values_of_unsupported_fields_are_fine(stub: Rig) -> None:
    stub.runner.says("ok")
    body = {"prompt": "hi", "best_of": 1, "suffix": "", "use_beam_search": False, "length_penalty": 1.0}
    assert stub.http.post("/v1/completions", json=body).status_code == 200
    chat = {**CHAT, "modalities": ["text"], "store": False, "parallel_tool_calls": True, "tool_choice": "none"}
    assert stub.http.post("/v1/chat/completions", json=chat).status_code == 200


def test_c46_content_parts_are_text_or_refused(stub: Rig) -> None:
    stub.runner.says("ok")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    stub.client.chat.completions.create(model="stub", messages=[{"role": "user", "content": parts}])
    assert "one\ntwo<|im_end|>" in text_of(stub)
    image = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    error = refusal(stub.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": image}]}))
    assert "image_url" in error["message"]


def test_c46_the_developer_role_is_the_system_role(stub: Rig) -> None:
    stub.runner.says("ok")
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    stub.client.chat.completions.create(model="stub", messages=messages)
    assert text_of(stub).startswith("<|im_start|>system\nbe brief<|im_end|>")


def text_of(rig: Rig) -> str:
    return rig.service.tokenizer.decode(rig.runner.prompts[-1], skip_special_tokens=False)


def test_c46_every_sampling_field_reaches_the_engine(stub: Rig) -> None:
    stub.runner.says("ok")
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"7": -100, "8": 2.5},
        "stop": ["x", "y"],
        "max_tokens": 9,
    }
    wanted = {**fields, "logit_bias": {7: -100.0, 8: 2.5}, "stop": ("x", "y"), "stop_token_ids": (9,), "n": 2}
    stub.runner.script = lambda sequence: 9
    for path, body in BOTH:
        assert stub.http.post(path, json={**body, **fields, "n": 2}).status_code == 200
        params = stub.runner.params[-1]
        assert {name: getattr(params, name) for name in wanted} == wanted


def test_c46_priority_and_cache_salt(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, engine={"scheduling_policy": "priority"}) as rig:
        rig.runner.says("ok")
        for salt, cached in ((None, 0), (None, 8), ("a", 0), ("a", 8), ("b", 0)):
            body = {"prompt": "0123456789", "priority": 3, "cache_salt": salt}
            usage = rig.http.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
            assert rig.runner.params[-1].priority == 3


@pytest.mark.parametrize("stream", [False, True])
def test_c47_duplicate_request_ids_do_not_meet(stub: Rig, stream: bool) -> None:
    """Overlapping and afterwards: the engine's ids are its own, both answers are right."""
    stub.runner.script = lambda sequence: (sequence.token_ids[0] + sequence.num_generated) % 256
    stub.runner.gate.clear()
    sockets = [
        stub.send(
            "/v1/completions",
            {"prompt": [first], "max_tokens": 3, "request_id": "same", "stream": stream},
        )
        for first in (65, 97)
    ]
    stub.runner.in_step.wait(5)
    stub.runner.gate.set()
    for sock, text in zip(sockets, ("ABC", "abc"), strict=True):
        data = b""
        while (b"[DONE]" if stream else b'"usage"') not in data:
            data += sock.recv(65536)
        assert b"cmpl-same" in data
        assert "".join(re.findall(r'"text":"([^"]*)"', data.decode())) == text
        sock.close()
    again = stub.http.post("/v1/completions", json={"prompt": [65], "max_tokens": 3, "request_id": "same"})
    assert again.json()["choices"][0]["text"] == "ABC"


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_seed_is_an_int64(stub: Rig, path: str, body: Any) -> None:
    for seed in (2**63, -(2**63) - 1, 10**30):
        error = refusal(stub.http.post(path, json={**body, "seed": seed}))
        assert "-9223372036854775808 to 9223372036854775807" in error["message"]
    for seed in (2**63 - 1, -(2**63)):
        stub.runner.says("ok")
        assert stub.http.post(path, json={**body, "seed": seed}).status_code == 200
