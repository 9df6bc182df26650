"""What a body of /v1/responses may hold, and the chat that it asks for."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, ValidationError

from minipaged.server import unsupported
from minipaged.server.errors import ApiError, from_validation_error, refused
from minipaged.server.parts import Part
from minipaged.server.protocol import ChatBody, ReasoningEffort, SamplingBody
from minipaged.server.responses_input import chat_messages, chat_tool_choice, chat_tools

WITH_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (WITH_LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name. Thoughts are given out as they are, so nothing of them is left to be encrypted."""


class ReasoningOptions(Part):
    """How much to think. Thoughts come whole, in `content`: "auto", which leaves a summary to the model, is the only
    `summary`."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(Part):
    """A response format, flat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(SamplingBody):
    """Body of /v1/responses: OpenAI's fields, then vLLM's and those of chats."""

    not_supported = unsupported.RESPONSES

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    stop_in_reasoning: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens come with their log-probabilities."""
        return bool(self.top_logprobs) or WITH_LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatBody:
        """The same as a chat. ApiError for items, tools and choices that no chat has."""
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise refused(f"include must hold nothing but {' and '.join(INCLUDABLE)}, got {name!r}", "include")
        same = (*SamplingBody.model_fields, "parallel_tool_calls", "top_logprobs")
        same += ("chat_template_kwargs", "include_reasoning", "thinking_token_budget", "stop_in_reasoning")
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        fields |= {
            "messages": chat_messages(self.input, self.instructions),
            "tools": chat_tools(self.tools),
            "tool_choice": chat_tool_choice(self.tool_choice),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "response_format": _response_format(self.text.format if self.text is not None else None),
        }
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise from_validation_error(error) from None


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type, "schema": form.schema_}
    inner = {"name": form.name, "description": form.description, "strict": form.strict}
    return {"type": form.type, "json_schema": {**inner, "schema": form.schema_} if form.schema_ is not None else None}


NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chats -> what they are called here."""


def in_our_words(error: ApiError) -> ApiError:
    """The refusal of a chat, as one of a response."""
    message = re.sub("|".join(rf"\b{name}\b" for name in NAMES), lambda found: NAMES[found[0]], error.message)
    first, dot, rest = (error.param or "").partition(".")
    param = NAMES.get(first, first) + dot + rest
    return ApiError(error.status, message, param=param or None, code=error.code, headers=error.headers)
