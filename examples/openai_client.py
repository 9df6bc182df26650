"""Talks to `minipaged serve` with OpenAI's own client: pip install openai, then python openai_client.py [URL]."""

from __future__ import annotations

import sys

from openai import OpenAI

client = OpenAI(base_url=(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id
print(f"model: {model}")

print("\n-- a chat, streamed; Qwen3's thoughts come apart from what it says")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Who goes there?"}],
    max_tokens=80,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}},
)
for chunk in stream:
    for choice in chunk.choices:
        thought = getattr(choice.delta, "reasoning_content", None)
        print(f"({thought})" if thought else choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        cached = chunk.usage.prompt_tokens_details.cached_tokens
        print(
            f"\n{chunk.usage.prompt_tokens} prompt tokens ({cached} cached), {chunk.usage.completion_tokens} generated"
        )

print("\n-- three samples of one prompt, with log-probabilities")
answer = client.completions.create(model=model, prompt="ROMEO:\n", n=3, seed=1, max_tokens=12, logprobs=1)
for choice in answer.choices:
    total = sum(choice.logprobs.token_logprobs)
    print(f"{total:8.2f}  {choice.text!r}")

print("\n-- JSON by schema")
schema = {
    "type": "object",
    "properties": {"name": {"enum": ["Romeo", "Juliet"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Who are you, and how old?"}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    max_tokens=60,
)
print(answer.choices[0].message.content)
