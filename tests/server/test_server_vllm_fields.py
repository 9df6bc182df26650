"""What vLLM's answers hold beside OpenAI's: token ids, prompt log-probabilities, `reasoning`, budgets (D28, D30)."""

from __future__ import annotations

from typing import Any

import pytest
from server_rig import EOS, Rig, events, refusal
from test_server_chat import both_ways, prompt_of

from minipaged import LLM, SamplingParams
from minipaged.server.answer_text import thought_tokens
from minipaged.server.thinking_budget import ThinkingBudget
from minipaged.text.reasoning import Thinking
from minipaged.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>hm</think>\n\nok"


# ---- prompt_logprobs


def test_prompt_logprobs_are_those_of_the_engine(demo: Rig) -> None:
    """In each choice of a completion, once in a chat; ids as keys, the token itself and the k most likely ones."""
    prompt = "ROMEO:\nWhat"
    ids, choices = demo.service.tokenizer.encode(prompt), []
    with LLM(num_blocks=128, block_size=4, dtype="float32") as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0)
        expected = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    body = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 2, "n": 2}
    for given in (prompt, [ids, ids]):
        choices += demo.http.post("/v1/completions", json={**body, "prompt": given}).json()["choices"]
    assert len(choices) == 2 + 4
    for choice in choices:
        assert choice["logprobs"] is None
        given = choice["prompt_logprobs"]
        assert given[0] is None
        assert len(given) == len(ids)
        for token_id, entry, wanted in zip(ids[1:], given[1:], expected[1:], strict=True):
            assert str(token_id) in entry
            assert {int(key) for key in entry} == set(wanted)
            for key, lp in wanted.items():
                shown = entry[str(key)]
                assert shown["logprob"] == pytest.approx(lp.logprob, abs=1e-4)
                assert (shown["rank"], shown["decoded_token"]) == (lp.rank, lp.decoded_token)
    chat = {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0}
    answer = demo.http.post("/v1/chat/completions", json=chat).json()
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (answer["usage"]["prompt_tokens"] - 1)


def test_prompt_logprobs_beside_an_echo(stub: Rig, demo: Rig) -> None:
    """Each with as many alternatives as were asked for."""
    body = {"prompt": "ROMEO", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3, "temperature": 0}
    (choice,) = demo.http.post("/v1/completions", json=body).json()["choices"]
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {3, 4}
    assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    for path, base in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": USER})):
        for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -2}, {"prompt_logprobs": 1, "stream": True}):
            assert refusal(stub.http.post(path, json={**base, **wrong}))["param"] == "prompt_logprobs"
        assert "prompt_logprobs" not in stub.http.post(path, json={**base, "max_tokens": 1}).text


# ---- token ids


def test_token_ids_of_prompt_and_answer(stub: Rig) -> None:
    stub.runner.says("aé")
    answer_ids = [*"aé".encode(), EOS]
    for path, base in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": USER})):
        body = {**base, "n": 2, "return_token_ids": True}
        whole = stub.http.post(path, json=body).json()
        prompt_ids = stub.runner.prompts[-1]
        assert [choice["token_ids"] for choice in whole["choices"]] == [answer_ids] * 2
        if path == "/v1/completions":
            assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompt_ids] * 2
        else:
            assert whole["prompt_token_ids"] == prompt_ids
        streamed: dict[int, list[int]] = {0: [], 1: []}
        prompts = []
        for chunk in events(stub.http.post(path, json={**body, "stream": True}))[:-1]:
            (choice,) = chunk["choices"]
            streamed[choice["index"]] += choice["token_ids"]
            prompts += filter(None, [chunk.get("prompt_token_ids"), choice.get("prompt_token_ids")])
        assert streamed == {0: answer_ids, 1: answer_ids}
        assert prompts == [prompt_ids] * (2 if path == "/v1/completions" else 1)
        assert "token_ids" not in stub.http.post(path, json=base).text


def test_tokens_as_token_ids(stub: Rig) -> None:
    stub.runner.says("aé")
    body = {"prompt": "hi", "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = stub.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:195", "token_id:169", f"token_id:{EOS}"]
    assert logprobs["text_offset"] == [0, 1, 1, 2], "of the text all the same"
    assert list(logprobs["top_logprobs"][0]) == ["token_id:97", "token_id:98"]
    chat = {"messages": USER, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    content = stub.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:2]] == ["token_id:97", "token_id:195"]
    assert content[1]["bytes"] == [195]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["token_id:97", "token_id:98"]


# ---- reasoning


def test_reasoning_has_both_names(stub: Rig) -> None:
    stub.runner.says(THOUGHT)
    body = {"messages": USER}
    message = stub.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events(stub.http.post("/v1/chat/completions", json={**body, "stream": True}))[:-1]
    ]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "hm"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_is_taken_under_both_names(stub: Rig, name: str) -> None:
    stub.runner.says("ok")
    messages = [*USER, {"role": "assistant", name: "r"}, *USER]
    seen = []
    render = stub.service.chat_template.render
    stub.service.chat_template.render = lambda given, **options: seen.extend(given) or render(given, **options)
    try:
        assert stub.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    finally:
        del stub.service.chat_template.render
    assert seen[1][name] == "r"


def test_reasoning_can_be_left_out(stub: Rig) -> None:
    stub.runner.says(THOUGHT)
    answer = both_ways(stub, extra_body={"include_reasoning": False})
    assert (answer["reasoning_content"], answer["content"]) == ("", "ok")
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_reasoning_effort(stub: Rig, effort: str) -> None:
    """Nothing and next to nothing turn thinking off; what the template's variables say themselves goes first."""
    stub.runner.says(THOUGHT)
    off = effort in ("none", "minimal")
    assert both_ways(stub, reasoning_effort=effort)["reasoning_content"] == ("" if off else "hm")
    assert prompt_of(stub).endswith("</think>\n\n") == off
    kwargs = {"chat_template_kwargs": {"enable_thinking": off}}
    assert both_ways(stub, reasoning_effort=effort, extra_body=kwargs)["reasoning_content"] == ("hm" if off else "")


def test_reasoning_effort_is_a_variable_of_the_template(stub: Rig) -> None:
    seen: dict[str, Any] = {}
    render = stub.service.chat_template.render
    stub.service.chat_template.render = lambda given, **options: seen.update(options) or render(given, **options)
    try:
        stub.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, "reasoning_effort": "low"})
    finally:
        del stub.service.chat_template.render
    assert (seen["reasoning_effort"], seen["enable_thinking"]) == ("low", True)


def test_thinking_that_cannot_be_turned_off_is_a_refusal(stub: Rig) -> None:
    body = {"messages": USER, "reasoning_effort": "none", "chat_template_kwargs": {"always_think": True}}
    assert refusal(stub.http.post("/v1/chat/completions", json=body))["param"] == "reasoning_effort"
    assert stub.http.post("/v1/chat/completions", json={**body, "reasoning_effort": "low"}).status_code == 200


# ---- thinking_token_budget


def written(mask: Any, wanted: list[int]) -> list[int]:
    """The ids of a model that writes `wanted`, unless the mask makes it write something else first."""
    ids: list[int] = []
    left = list(wanted)
    while left:
        allowed = mask(ids)
        if allowed is None or allowed[left[0]]:
            ids.append(left.pop(0))
            continue
        (forced,) = [token_id for token_id, may in enumerate(allowed) if may]
        ids.append(forced)
    return ids


@pytest.mark.parametrize("tag_is_a_token", [True, False])
@pytest.mark.parametrize("thinking", [Thinking.OPENED, Thinking.POSSIBLE])
@pytest.mark.parametrize("budget", [0, 1, 3, 40])
def test_a_thought_ends_at_its_budget(
    stub: Rig, budget: int, thinking: Thinking, tag_is_a_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Tokenizer = stub.service.tokenizer
    spell = tokenizer.encode if tag_is_a_token else lambda text, add_special_tokens=False: list(text.encode())
    monkeypatch.setattr(tokenizer, "encode", spell)
    head = spell("\n<think>") if thinking is Thinking.POSSIBLE else []
    body, tail = list(b"0123456789"), spell("</think>") + list(b"\n\nanswer 0123456789 0123456789 0123456789")
    mask = ThinkingBudget(budget, thinking, tokenizer, 320, None)
    got = written(mask, [*head, *body, *tail])
    if budget >= len(body):
        assert got == [*head, *body, *tail]
    else:
        assert got[: len(head) + budget] == [*head, *body[:budget]]
        close = spell("</think>")
        assert got[len(head) + budget :][: len(close)] == close
        assert got[len(head) + budget + len(close) :] == [*body[budget:], *tail], "free again afterwards"
    assert thought_tokens(got, thinking, tokenizer) == len(head) + min(budget, len(body)) + len(spell("</think>"))


def test_a_text_without_a_thought_has_no_budget(stub: Rig) -> None:
    tokenizer = stub.service.tokenizer
    text = list(b"an answer that begins at once, and is longer than any budget <think> </think>")
    mask = ThinkingBudget(2, Thinking.POSSIBLE, tokenizer, 320, None)
    assert written(mask, text) == text
    assert thought_tokens(text, Thinking.POSSIBLE, tokenizer) == thought_tokens(text, Thinking.OFF, tokenizer) == 0


def test_a_budget_and_a_grammar_hold_together(demo: Rig) -> None:
    """The thought is free up to its budget, what follows it is the grammar's."""
    body = {
        "messages": [*USER, {"role": "assistant", "content": "<think>\nso"}],
        "continue_final_message": True,
        "guided_choice": ["yes", "no"],
        "thinking_token_budget": 5,
        "max_tokens": 40,
        "temperature": 1,
        "return_token_ids": True,
    }
    tokenizer = demo.service.tokenizer
    for seed in range(5):
        (choice,) = demo.http.post("/v1/chat/completions", json={**body, "seed": seed}).json()["choices"]
        assert choice["message"]["content"] in ("yes", "no")
        assert choice["finish_reason"] == "stop"
        thought, tag, _ = tokenizer.decode(choice["token_ids"], skip_special_tokens=False).partition("</think>")
        assert tag
        assert len(tokenizer.encode(thought)) <= 5


@pytest.mark.parametrize("budget", [-2, 1.5, True, "5"])
def test_budgets_that_make_no_sense(stub: Rig, budget: Any) -> None:
    body = {"messages": USER, "thinking_token_budget": budget}
    assert refusal(stub.http.post("/v1/chat/completions", json=body))["param"] == "thinking_token_budget"
    assert stub.http.post("/v1/chat/completions", json={**body, "thinking_token_budget": -1}).status_code == 200
