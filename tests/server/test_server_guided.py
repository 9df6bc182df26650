"""Grammars: `response_format` and `guided_...` on the demo model, which would never write such text by itself."""

from __future__ import annotations

import builtins
import json
import re
from typing import Any

import numpy as np
import pytest
from server_rig import EOS, Rig, stub_rig

from minipaged.server.guided import MAX_STATES, GrammarMask, Guide
from minipaged.server.protocol import CompletionBody, parse

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "role": {"enum": ["king", "fool"]}},
    "required": ["age", "role"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "Who are you?"}]


def chat(rig: Rig, **body: Any) -> Any:
    body = {"model": "demo", "messages": USER, "max_tokens": 60, "seed": 1, "temperature": 0.8, **body}
    return rig.client.chat.completions.create(**body)


@pytest.mark.parametrize("seed", range(4))
def test_json_schema(demo: Rig, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    choice = chat(demo, response_format=form, seed=seed).choices[0]
    person = json.loads(choice.message.content)
    assert set(person) == {"age", "role"}
    assert 0 <= person["age"] <= 150
    assert person["role"] in ("king", "fool")
    assert choice.finish_reason == "stop"


def test_json_object(demo: Rig) -> None:
    choice = chat(demo, response_format={"type": "json_object"}, max_tokens=200, temperature=0.3).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_text_is_no_grammar(demo: Rig) -> None:
    plain = chat(demo).choices[0].message.content
    assert chat(demo, response_format={"type": "text"}).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", r"\d{3}-[a-f]{2}", r"\d{3}-[a-f]{2}"),
        ("guided_choice", ["to be", 'not "to" be', "你😀"], 'to be|not "to" be|你😀'),
        ("guided_json", SCHEMA, r'\{"age":\d+,"role":"(king|fool)"\}'),
        ("guided_grammar", 'start: "a" /b{1,9}/ "c"', "ab{1,9}c"),
    ],
)
def test_guided_fields_with_n_children_streamed(demo: Rig, field: str, value: Any, pattern: str) -> None:
    texts: dict[int, str] = {}
    options = {"extra_body": {field: value}, "n": 3, "stream": True, "max_tokens": 80, "temperature": 1.0}
    for chunk in demo.client.completions.create(model="demo", prompt="x", **options):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert len(texts) == 3
    for text in texts.values():
        assert re.fullmatch(pattern, text), text


def test_a_thought_is_free_and_what_follows_is_guided(tokenizer_folder: Any) -> None:
    """Where the template opens a thought, the grammar begins after it."""
    with stub_rig(tokenizer_folder) as rig:
        body = {
            "messages": USER,
            "chat_template_kwargs": {"always_think": True},
            "guided_choice": ["yes", "no"],
            "max_tokens": 20,
        }
        rig.runner.says([*b"hm", 260, *b"yes"])
        assert rig.http.post("/v1/chat/completions", json=body).status_code == 200
        mask = rig.runner.params[-1].token_mask
        assert mask(list(b"hm, what"))[: ord("~")].all()
        assert [chr(token) for token in np.flatnonzero(mask([*b"hm", 260]))] == ["\n", "n", "y"]
        assert np.flatnonzero(mask([*b"hm", 260, *b"yes"])).tolist() == [EOS]


def test_the_mask_is_a_function_of_its_argument(demo: Rig) -> None:
    """Children in turns, a preempted request from the start again, more states than are kept: always the same mask."""
    guide = Guide(demo.service.tokenizer, (1021, 1019))
    mask = guide.mask_for(
        parse(CompletionBody, json.dumps({"guided_regex": "[a-z]{1,90}"}).encode()), thought_is_open=False
    )
    assert isinstance(mask, GrammarMask)
    ids = [demo.service.tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    rng = np.random.default_rng(0)
    wanted = mask([])
    for _ in range(3 * MAX_STATES):
        history = [ids[i] for i in rng.integers(0, 8, size=rng.integers(0, 12))]
        got = mask(history)
        assert got[ids].all()
        assert bool(got[1021]) == bool(got[1019]) == bool(history), "both ends of text, and only after a letter"
        assert len(got) == demo.service.tokenizer.vocab_size
    assert (mask([]) == wanted).all()
    with pytest.raises(ValueError, match="grammar"):
        mask([demo.service.tokenizer.encode("7")[0]])


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "("},
        {"guided_json": {"type": "no such type"}},
        {"guided_json": "{not json"},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_grammar": "start: nowhere"},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"guided_regex": "a", "ignore_eos": True},
        {"guided_regex": "a", "min_tokens": 2},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"response_format": "json"},
    ],
)
def test_grammars_that_make_no_sense_are_refused(demo: Rig, fields: dict[str, Any]) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
        response = demo.http.post(path, json={**body, **fields, "stream": True})
        assert response.status_code == 400, response.text
        assert any(field in response.json()["error"]["message"] for field in fields)


MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"$ref": "#"}),
        ("guided_json", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
        ("guided_json", MANY),
        ("guided_grammar", "start: start"),
        ("guided_regex", "a{1000000}"),
        ("guided_choice", [f"choice {i}" for i in range(10_001)]),
    ],
)
def test_grammars_that_fail_when_followed_are_refused_before_a_stream_begins(demo: Rig, field: str, value: Any) -> None:
    body = {"prompt": "a", "max_tokens": 3, field: value, "stream": True}
    response = demo.http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert len(error["message"]) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_later_is_the_requests_fault(
    demo: Rig, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    real = GrammarMask._allowed

    def fails_at_the_third(mask: GrammarMask, token_ids: tuple[int, ...]) -> Any:
        if len(token_ids) >= 2:
            raise ValueError("the grammar is too large")
        return real(mask, token_ids)

    monkeypatch.setattr(GrammarMask, "_allowed", fails_at_the_third)
    body = {"prompt": "a", "max_tokens": 9, "guided_regex": "[a-z]{5,8}", "stream": stream}
    response = demo.http.post("/v1/completions", json=body)
    assert response.status_code == (200 if stream else 400)
    text = response.text.split("data: ")[-2] if stream else response.text
    error = json.loads(text)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
    assert "beyond token 2: the grammar is too large" in error["message"]


def test_without_the_package_a_400_names_it(demo: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    response = demo.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})
    assert response.status_code == 400
    assert "pip install llguidance" in response.json()["error"]["message"]
