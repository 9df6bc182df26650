"""What a body may hold. Types are strict ("5" is not a number); unknown fields are ignored, null means "not given".

Ranges are checked once, in `SamplingParams`. Fields that OpenAI or vLLM know and that would change the answer, but are
not implemented, are refused: `NOT_SUPPORTED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from minipaged.server.errors import from_validation_error, refused

M = TypeVar("M", bound="Body")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "parallel_tool_calls": (True,),
}
NEUTRAL |= dict.fromkeys(("store", "use_beam_search", "return_token_ids", "logprobs_in_prompt"), (False,))
NEUTRAL |= {"length_penalty": (1, 1.0), "modalities": (["text"],), "service_tier": ("auto", "default")}
"""Values of unsupported fields that ask for nothing; null always does."""

_ANYWHERE = {
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "prompt_logprobs": "use echo with logprobs in /v1/completions",
    "truncate_prompt_tokens": "shorten the prompt",
    "structured_outputs": "use response_format or guided_regex",
    "use_beam_search": "use n",
    "beam_width": "use n",
    "length_penalty": "it needs beam search",
    "best_of": "use n",
    "return_token_ids": "use /tokenize",
}
NOT_SUPPORTED = {
    "completions": {**_ANYWHERE, "suffix": "leave it out"},
    "chat": {
        **_ANYWHERE,
        "audio": "text only",
        "chat_template": "the model's own template is used; see chat_template_kwargs",
        "echo": "use /v1/completions",
        "function_call": "use tools",
        "functions": "use tools",
        "modalities": 'only ["text"]',
        "parallel_tool_calls": "only true",
        "reasoning_effort": 'use chat_template_kwargs, e.g. {"enable_thinking": false}',
        "store": "nothing is stored",
        "verbosity": "leave it out",
        "web_search_options": "leave it out",
    },
}


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    def refuse_unsupported(self, kind: Literal["completions", "chat"]) -> None:
        """400 for a known field that is not implemented and asks for something."""
        given = self.__pydantic_extra__ or {}
        for name, advice in NOT_SUPPORTED[kind].items():
            value = given.get(name)
            if value is not None and value not in NEUTRAL.get(name, ()):
                raise refused(f"{name} is not supported: {advice}", name)


def parse(model: type[M], body: bytes) -> M:
    """A body as `model`. ApiError 400 that names the first field that is wrong, or says why it is not JSON."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from None


class StreamOptions(BaseModel):
    """include_usage: a last event with the usage. continuous_usage_stats: also the usage so far in every event."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(BaseModel):
    """The inner object of a json_schema response format; `schema` is the schema itself."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """text, json_object or json_schema."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationBody(Body):
    """What completions and chats have in common: OpenAI's sampling fields, then vLLM's."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

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


class ToolFunction(BaseModel):
    """A function that the model may call; parameters is a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """The only kind of tool there is."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: ToolFunction
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, validate: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = validate(data)
        tool._given = data if isinstance(data, dict) else tool.model_dump(exclude_unset=True)
        return tool

    @property
    def given(self) -> dict[str, Any]:
        """As it came, in the client's order: what a template prints is the prompt."""
        return self._given


class ChatMessage(BaseModel):
    """One message of a conversation. Roles as OpenAI's; `reasoning_content` is what the server gave out before."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


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

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    stop_in_reasoning: bool | None = None


class TokenizeBody(Body):
    """Body of /tokenize: a prompt, or messages that the chat template turns into one."""

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
