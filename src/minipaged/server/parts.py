"""The objects inside a body. Types are strict; a key that nobody knows is refused where it could only be a mistake."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from minipaged.server.errors import refused


class Part(BaseModel):
    """Base of the objects that hold nothing but what is declared."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(BaseModel):
    """include_usage: a last event with the usage. continuous_usage_stats: also the usage so far in every event."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Part):
    """The inner object of a json_schema response format; `schema` is the schema itself. It is always enforced, `strict`
    or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """text, json_object (any object, or one that follows `schema`) or json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    def schema_of_text(self) -> Any:
        """The JSON schema that the text has to follow, None for any text. 400 for one too many or too few."""
        if self.json_schema is not None and (self.schema_ is not None or self.type != "json_schema"):
            raise refused("response_format must hold one schema, where its type says", "response_format")
        if self.type == "text":
            if self.schema_ is not None:
                raise refused("response_format of type text takes no schema", "response_format")
            return None
        if self.json_schema is not None:
            return self.json_schema.schema_
        if self.schema_ is None and self.type == "json_schema":
            raise refused("response_format of type json_schema needs json_schema", "response_format")
        return {"type": "object"} if self.schema_ is None else self.schema_


class StructuredOutputs(Part):
    """vLLM's object: one of json, regex, choice, grammar, json_object. JSON is always written without optional white
    space, so that `disable_any_whitespace` is satisfied whatever it is.
    """

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None


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
    def _remembering(cls, data: Any, validate: ModelWrapValidatorHandler[Tool]) -> Tool:
        return validate(data).came_as(data)

    def came_as(self, data: Any) -> Tool:
        """Itself, with what it was made from."""
        self._given = data if isinstance(data, dict) else self.model_dump(exclude_unset=True)
        return self

    @property
    def given(self) -> dict[str, Any]:
        """As it came, in the client's order: what a template prints is the prompt."""
        return self._given


class ChatMessage(BaseModel):
    """One message of a conversation. Roles as OpenAI's; `reasoning` or `reasoning_content` is what the server gave out
    before.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None
