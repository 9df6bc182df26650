"""What depends on the model that is served: its names, a tokenizer or none, a chat template or none."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from server_rig import Rig, events, refusal, stub_rig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_models_and_unknown_names(stub: Rig) -> None:
    assert [model.id for model in stub.client.models.list()] == ["stub"]
    assert stub.client.models.retrieve("stub").id == "stub"
    with pytest.raises(openai.NotFoundError) as caught:
        stub.client.completions.create(model="gpt-4", prompt="hi")
    assert caught.value.code == "model_not_found"
    refusal(stub.http.get("/v1/models/gpt-4"), 404)
    refusal(stub.http.get("/v2/models"), 404)
    refusal(stub.http.get("/v1/completions"), 405)


def test_a_small_pool_bounds_what_is_promised(tokenizer_folder: Path) -> None:
    """4 blocks of 4 serve 17 tokens, since the last one drawn is never written; a request of the length named runs."""
    for max_model_len, longest in ((64, 17), (None, 17), (10, 10)):
        with stub_rig(tokenizer_folder, num_blocks=4, engine={"max_model_len": max_model_len}) as rig:
            assert rig.http.get("/v1/models").json()["data"][0]["max_model_len"] == longest
            assert rig.http.get("/v1/models/stub").json()["max_model_len"] == longest
            assert rig.http.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"] == longest
            for extra, status in ((0, 200), (1, 400)):
                body = {"prompt": [7], "max_tokens": longest - 1 + extra, "ignore_eos": True}
                assert rig.http.post("/v1/completions", json=body).status_code == status


def test_without_a_tokenizer_there_are_token_ids_only() -> None:
    with stub_rig(None) as rig:
        body = {"prompt": [5, 6], "max_tokens": 3, "logprobs": 1}
        choice = rig.http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", "token_id:99"]
        assert "tokenizer" in refusal(rig.http.post("/v1/completions", json={"prompt": "hi"}))["message"]
        assert "tokenizer" in refusal(rig.http.post("/v1/completions", json={"prompt": [1], "stop": "x"}))["message"]
        assert "tokenizer" in refusal(rig.http.post("/v1/completions", json={"prompt": [1], "echo": True}))["message"]
        assert "tokenizer" in refusal(rig.http.post("/v1/chat/completions", json=CHAT))["message"]
        assert "tokenizer" in refusal(rig.http.post("/tokenize", json={"prompt": "x"}))["message"]
        rig.runner.delay = 0.02
        stream = events(rig.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "stream": True}))
        assert len(stream) == 4  # a token without text is news as well


def test_without_a_chat_template_there_is_no_chat(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, template=None) as rig:
        assert "chat template" in refusal(rig.http.post("/v1/chat/completions", json=CHAT))["message"]


def test_tools_need_a_template_that_knows_them(tokenizer_folder: Path) -> None:
    plain = "{%- for message in messages %}{{ message.content }}{%- endfor %}"
    with stub_rig(tokenizer_folder, template=plain) as rig:
        body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
        assert refusal(rig.http.post("/v1/chat/completions", json=body))["param"] == "tools"
        assert rig.http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200


def test_tokenize_and_detokenize(stub: Rig) -> None:
    answer = stub.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == list("hé".encode())
    assert answer["count"] == 3
    assert answer["token_strs"][0] == "h"
    chat = stub.http.post("/tokenize", json=CHAT).json()
    text = stub.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", **CHAT}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**30]}),
        ("/detokenize", {"tokens": "x"}),
    ):
        refusal(stub.http.post(path, json=body))
