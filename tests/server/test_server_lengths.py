"""Requests that can never fit: refused before a stream begins, by the name of what is too long."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_rig import refusal, stub_rig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_c43_prompt_too_long_is_refused_before_the_stream(tokenizer_folder: Path) -> None:
    """(63, 1) runs, everything longer is 400; (60, 10) is not clamped (policy)."""
    with stub_rig(tokenizer_folder, engine={"max_model_len": 64}) as rig:
        for stream in (False, True):
            for length, max_tokens in ((63, 1), (64, 1), (65, 1), (60, 10), (200, 1), (64, None), (100_000, None)):
                body = {"prompt": [7] * length, "max_tokens": max_tokens, "stream": stream}
                response = rig.http.post("/v1/completions", json=body)
                if length == 63:
                    assert response.status_code == 200
                    continue
                error = refusal(response)
                assert error["code"] == "context_length_exceeded"
                assert "context length exceeded" in error["message"]
                assert str(length) in error["message"]
            chat = {"messages": [{"role": "user", "content": "x" * 100}], "stream": stream}
            assert refusal(rig.http.post("/v1/chat/completions", json=chat))["code"] == "context_length_exceeded"
        assert rig.runner.steps == 2


@pytest.mark.parametrize("letter", ["x", "\u00e9"])
def test_c43_a_text_that_can_never_fit_is_not_even_tokenised(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """The longest token has 13 characters ("<|endoftext|>"): 64 x 13 of them fit nowhere, and nobody waits for them."""
    with stub_rig(tokenizer_folder, engine={"max_model_len": 64}) as rig:
        fits = "<|endoftext|>" * 63
        assert rig.http.post("/v1/completions", json={"prompt": fits, "max_tokens": 1}).status_code == 200

        def never(text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("it was tokenised")

        monkeypatch.setattr(rig.service.tokenizer, "encode", never)
        for stream in (False, True):
            for path, body in (
                ("/v1/completions", {"prompt": letter * (64 * 13)}),
                ("/v1/completions", {"prompt": letter * 300_000}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": letter * (64 * 13)}]}),
            ):
                error = refusal(rig.http.post(path, json={**body, "stream": stream}))
                assert error["code"] == "context_length_exceeded"
                assert "context length exceeded" in error["message"]
                assert refusal(rig.http.post("/tokenize", json=body)) == error


def test_c43_what_the_whole_pool_cannot_hold_is_refused_likewise(tokenizer_folder: Path) -> None:
    """Another limit, the same kind of answer; what fits runs."""
    with stub_rig(tokenizer_folder, num_blocks=4) as rig:  # 16 slots serve 17 tokens
        assert rig.http.post("/v1/completions", json={"prompt": [7] * 10, "max_tokens": 7}).status_code == 200
        for length, max_tokens in ((10, 8), (17, 1), (1000, None)):
            body = {"prompt": [7] * length, "max_tokens": max_tokens, "stream": True}
            assert refusal(rig.http.post("/v1/completions", json=body))["code"] == "context_length_exceeded"


def test_a_refusal_names_the_field_that_is_too_large(tokenizer_folder: Path) -> None:
    with stub_rig(tokenizer_folder, engine={"max_num_seqs": 4}, max_queued_requests=16, num_blocks=16) as rig:
        for path, body, param in (
            ("completions", {"prompt": [7] * 10, "max_tokens": 56}, "max_tokens"),
            ("completions", {"prompt": [7] * 65, "max_tokens": 1}, "prompt"),
            ("completions", {"prompt": [7] * 500}, "prompt"),
            ("completions", {"prompt": "a", "n": 5}, "n"),
            ("completions", {"prompt": "a", "n": 100}, "n"),
            ("completions", {"prompt": ["a"] * 17}, "prompt"),
            ("completions", {"prompt": ["a"] * 9, "n": 2}, "prompt"),
            ("chat/completions", {**CHAT, "max_tokens": 1000}, "max_tokens"),
            ("chat/completions", {**CHAT, "max_completion_tokens": 1000}, "max_completion_tokens"),
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
            ("chat/completions", {**CHAT, "n": 5}, "n"),
        ):
            assert refusal(rig.http.post(f"/v1/{path}", json=body))["param"] == param, (path, body)
