"""Completions: prompts of every form, echo, log-probabilities, streams against answers in one piece (C18, C36, C40)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from server_rig import Rig, events

ROMEO = "ROMEO:\nWhat light is that?"


def streamed(rig: Rig, **body: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """What the events of a stream add up to, per choice, and the usage if there was one."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    *chunks, done = events(rig.http.post("/v1/completions", json={**body, "stream": True}))
    assert done == "[DONE]"
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        if not chunk["choices"]:
            usage = chunk["usage"]
        for choice in chunk["choices"]:
            sum_ = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert sum_["finish_reason"] is None
            sum_["text"] += choice["text"]
            sum_["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                lists = sum_["logprobs"] or {name: [] for name in choice["logprobs"]}
                sum_["logprobs"] = {name: lists[name] + choice["logprobs"][name] for name in lists}
    return choices, usage


def whole(rig: Rig, **body: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    answer = rig.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    keys = ("text", "logprobs", "finish_reason")
    return {c["index"]: {key: c[key] for key in keys} for c in answer.json()["choices"]}, answer.json()["usage"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ROMEO},
        {"prompt": [5, 6, 7]},
        {"prompt": [ROMEO, "JULIET:", "x"]},
        {"prompt": [[5, 6, 7], [8]], "n": 2},
        {"prompt": ROMEO, "echo": True},
        {"prompt": [ROMEO, "JULIET:"], "echo": True, "logprobs": 1, "n": 2},
        {"prompt": [5, 6, 7], "echo": True, "logprobs": 0},
        {"prompt": ROMEO, "logprobs": 5, "top_p": 0.3},
        {"prompt": ROMEO, "stop": ["\n", "th"]},
        {"prompt": ROMEO, "presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "min_p": 0.05},
        {"prompt": ROMEO, "logit_bias": {"10": 5}, "top_k": 3, "min_tokens": 4},
    ],
)
def test_c40_a_stream_adds_up_to_the_answer_in_one_piece(demo: Rig, body: dict[str, Any]) -> None:
    """Same seed, so the same text, log-probabilities, reasons and usage; indexes are prompt * n + child."""
    body = {"max_tokens": 12, "seed": 3, "temperature": 0.9, **body}
    expected, usage = whole(demo, **body)
    got, stream_usage = streamed(demo, **body, stream_options={"include_usage": True})
    assert sorted(expected) == list(range(len(expected)))
    rounded = [
        {
            i: {**c, "logprobs": c["logprobs"] and {k: approximate(v) for k, v in c["logprobs"].items()}}
            for i, c in d.items()
        }
        for d in (expected, got)
    ]
    assert rounded[0] == rounded[1]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert stream_usage[name] == usage[name]
    assert streamed(demo, **body)[1] is None, "no usage unless it is asked for"


def approximate(values: list[Any]) -> list[Any]:
    def one(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: round(number, 3) for name, number in value.items()}
        return round(value, 3) if isinstance(value, float) else value

    return [one(value) for value in values]


def test_c18_echo_with_logprobs_on_a_warm_cache(demo: Rig) -> None:
    """One entry per prompt token, the first null, equal to the cold run; they are the model's own."""
    prompt = demo.service.tokenizer.encode("A warm prompt of more than one block, and then some.")
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    first = whole(demo, **body)[0][0]["logprobs"]
    demo.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    plain = demo.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the cache is warm"
    second = whole(demo, **body)[0][0]["logprobs"]
    assert first["token_logprobs"][0] is None
    assert first["top_logprobs"][0] is None
    assert len(first["tokens"]) == len(prompt) + 1
    assert "".join(first["tokens"][:-1]) == demo.service.tokenizer.decode(prompt)
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-4)
    # The oracle: each prompt token as the only one that a bias of +100 leaves, on the prompt before it.
    for position in (1, len(prompt) // 2, len(prompt) - 1):
        forced = {"prompt": prompt[:position], "max_tokens": 1, "logprobs": 0, "logit_bias": {prompt[position]: 100}}
        alone = whole(demo, **forced)[0][0]["logprobs"]["token_logprobs"][0]
        assert first["token_logprobs"][position] == pytest.approx(alone, abs=1e-4)


def test_c36_number_of_logprobs(demo: Rig) -> None:
    for k in (0, 1, 5, None):
        logprobs = whole(demo, prompt=ROMEO, logprobs=k, max_tokens=6, top_p=0.3, seed=1)[0][0]["logprobs"]
        if k is None:
            assert logprobs is None
            continue
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 6
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[token] == value, "the sampled token is always there"
            assert max(k, 1) <= len(top) <= k + 1
            assert sum(math.exp(number) for number in top.values()) <= 1.001
            assert value > math.log(0.01), "from the raw distribution, top_p does not make it 0"


def test_c36_no_infinity_in_json(stub: Rig) -> None:
    stub.runner.says("abc")
    response = stub.http.post("/v1/completions", json={"prompt": "x", "logprobs": 4})
    assert "Infinity" not in response.text
    assert "NaN" not in response.text
    assert -9999.0 in response.json()["choices"][0]["logprobs"]["top_logprobs"][0].values()


def test_text_offsets_count_characters_of_the_text(stub: Rig) -> None:
    stub.runner.says("a你b")
    choice = stub.http.post("/v1/completions", json={"prompt": "é!", "echo": True, "logprobs": 1}).json()["choices"][0]
    assert choice["text"] == "é!a你b"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 3, 3, 4, 5]


def test_usage_counts_cached_tokens(stub: Rig) -> None:
    stub.runner.says("ok")
    prompt = "a prompt that nobody else uses here"
    cached = [
        stub.client.completions.create(model="stub", prompt=prompt).usage.prompt_tokens_details.cached_tokens
        for _ in range(2)
    ]
    assert cached == [0, (len(prompt) - 1) // 4 * 4]


def test_continuous_usage(stub: Rig) -> None:
    stub.runner.says("abc")
    stub.runner.delay = 0.01
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(
        stub.http.post("/v1/completions", json={"prompt": "x", "stream": True, "stream_options": options})
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
