"""What a body may hold. Types are strict ("5" is not a number); unknown fields are ignored, null means "not given".

Ranges are checked once, in `SamplingParams`. Fields that others know and that would change the answer, but are not
implemented, are refused: `unsupported`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from minipaged.server import unsupported
from minipaged.server.errors import from_validation_error, refused
from minipaged.server.parts import ChatMessage, ResponseFormat, StreamOptions, StructuredOutputs, Tool

M = TypeVar("M", bound="Body")

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    not_supported: ClassVar[dict[str, str]] = {}

    model: str | None = None

    def refuse_unsupported(self) -> None:
        """400 for a known field that is not implemented and asks for something."""
        given = self.__pydantic_extra__ or {}
        for name, advice in self.not_supported.items():
            if name in given and unsupported.asks_for_something(name, given[name]):
                raise refused(f"{name} is not supported: {advice}", name)


def parse(model: type[M], body: bytes) -> M:
    """A body as `model`. ApiError 400 that names the first field that is wrong or not supported, or says why it is not
    JSON.
    """
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
    parsed.refuse_unsupported()
    return parsed


class SamplingBody(Body):
    """What everything that generates has in common: OpenAI's sampling fields, then vLLM's and others'."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None


class GenerationBody(SamplingBody):
    """What completions and chats have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    not_supported = unsupported.COMPLETIONS

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ]
            }
        ),
    ] = None
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """One or several prompts, as strings or token ids. 400 for anything else, an empty one included."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_int, prompt))):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise refused("prompt must be a string, token ids, or a non-empty list of either", "prompt")
        for number, item in enumerate(prompt):
            if not isinstance(item, str) and not (isinstance(item, list) and all(map(_is_int, item))):
                raise refused(f"prompt[{number}] must be a string or a list of token ids", "prompt")
            if not item:
                raise refused("prompt must not be empty: at least one token is needed", "prompt")
            if type(item) is not type(prompt[0]):
                raise refused("prompt must be a list of strings or a list of token id lists, not of both", "prompt")
        return prompt


def _is_int(value: object) -> bool:
    return type(value) is int


class TemplateBody(Body):
    """What goes into the chat template."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(GenerationBody, TemplateBody):
    """Body of /v1/chat/completions."""

    not_supported = unsupported.CHAT

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    stop_in_reasoning: bool | None = None


class TokenizeBody(Body):
    """Body of /tokenize: a prompt, or messages that the chat template turns into one."""

    not_supported = unsupported.TOKENIZE

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Body of /detokenize."""

    tokens: list[int]
