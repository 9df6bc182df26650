"""Rendering a conversation with a model's Jinja chat template, as Hugging Face's `apply_chat_template` does."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.errors import CheckpointError

if TYPE_CHECKING:
    import jinja2

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One model's templates, usually a single one called "default".

    Templates come with checkpoints and are not trusted: they run in Jinja's immutable sandbox and see plain data only.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: variables such as `eos_token` that a template may use."""
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_folder(cls, folder: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """chat_template.jinja and additional_chat_templates/*.jinja, else the entry in tokenizer_config.json (a string,
        or a list of named ones); None if the folder has none."""
        folder = Path(folder)
        templates: dict[str, str] = {}
        if (folder / "chat_template.jinja").is_file():
            templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        path = folder / "tokenizer_config.json"
        if not templates and path.is_file():
            entry = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(entry, str):
                templates["default"] = entry
            elif isinstance(entry, list) and all(
                isinstance(e, dict) and {"name", "template"} <= e.keys() for e in entry
            ):
                templates = {e["name"]: e["template"] for e in entry}
            elif entry is not None:
                raise CheckpointError(f"{path}: chat_template must be a string or a list of named templates")
        return cls(templates, special_tokens) if templates else None

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        messages: dicts with "role" and "content" (or dataclasses, pydantic models); keys whose value is None are
        dropped. A content that is a list of text parts is joined with newlines for a template that reads strings
        only; Qwen3's would leave it out. tools: JSON schemas. template: the name of a template, or a template's text;
        None = "tool_use" with tools if there is one, else "default". continue_final_message: the text ends where the
        last message's content does, for the model to go on with it; it excludes `add_generation_prompt`. variables:
        whatever else the template reads, such as Qwen3's `enable_thinking`. ValueError for an empty conversation, a
        template that does not exist, and whatever goes wrong in the template, with its message.
        """
        import jinja2

        chat = [_plain_message(message) for message in messages]
        if not chat:
            raise ValueError("messages must hold at least one message, got none")
        for name, given in (("tools", tools), ("documents", documents)):
            if given is not None and not all(isinstance(item, Mapping) for item in given):
                raise ValueError(f"{name} must be a list of dicts (JSON schemas for tools), got {given!r}")
        source = self._source(template, with_tools=tools is not None)
        if "developer" not in source:  # OpenAI's newer name of the role, which such a template drops without a word
            for message in chat:
                if message.get("role") == "developer":
                    message["role"] = "system"
        if not _READS_PARTS.search(source):
            for message in chat:
                _join_parts(message)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt exclude each other: set one to False"
                )
            _tag_end(chat[-1])
        try:
            text = self._template(source).render(
                {
                    **self.special_tokens,
                    **_plain(variables),
                    "messages": chat,
                    "tools": _plain(tools),
                    "documents": _plain(documents),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template failed: {error.message or type(error).__name__}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return _cut_at_tag(text) if continue_final_message else text

    def options(self, template: str | None = None) -> list[str]:
        """Keywords that `render` has a use for: its own, and the variables of the templates here and of `template`."""
        from jinja2 import TemplateError, meta

        variables = {"enable_thinking"}  # of many templates: no mistake where one does not read it
        for source in [*self.templates.values(), template or ""]:
            try:
                variables |= meta.find_undeclared_variables(self._environment.parse(source))
            except TemplateError:
                continue  # `render` says what is wrong with it, if it is the one to be used
        own = ("tools", "documents", "add_generation_prompt", "continue_final_message", "template")
        return [*own, *sorted(variables - {"messages", *own})]

    def _source(self, name: str | None, *, with_tools: bool) -> str:
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.templates else "default"
            if name not in self.templates:
                raise ValueError(f"the model has no default chat template: name one of {sorted(self.templates)}")
        if name not in self.templates and "{" not in name:
            raise ValueError(f"the model has no chat template {name!r}, only {sorted(self.templates)}")
        return self.templates.get(name, name)

    def _template(self, source: str) -> jinja2.Template:
        if source not in self._compiled:
            self._compiled[source] = self._environment.from_string(source)
        return self._compiled[source]

    @cached_property
    def _environment(self) -> jinja2.Environment:
        return _environment()


def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [jinja2.nodes.Scope(body, lineno=line)]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _plain(value: Any) -> Any:
    """JSON-like data, rebuilt: the sandbox need not know any other type's methods, and the caller's objects cannot be
    changed."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's or other subclass's value, without its methods
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic
        return _plain(value.model_dump())
    if callable(getattr(value, "item", None)):  # a numpy scalar
        return _plain(value.item())
    raise ValueError(f"chat templates take JSON-like values only, got {type(value).__name__}: {value!r:.80}")


def _plain_message(message: Any) -> dict[str, Any]:
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got the item {message!r:.80}")
    plain = {key: value for key, value in plain.items() if value is not None}
    for call in plain["tool_calls"] if isinstance(plain.get("tool_calls"), list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"])
    # Servers and templates name a message's reasoning differently; the first name is the one that templates read.
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _arguments(given: Any) -> Any:
    """Arguments of an earlier call, which clients send as JSON text and templates walk through, as an object. What is
    no object stays as it is.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        parsed = json.loads(given, strict=False) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


# A template that loops over a message's content, as those of models for images and text do.
_READS_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+(\w+\.)?(\w+\[\s*['"])?content\b""")


def _join_parts(message: dict[str, Any]) -> None:
    """Make the content a string. ValueError if it is anything but text or parts of text."""
    content = message.get("content", "")
    if isinstance(content, str):
        return
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not isinstance(content, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            'a message\'s content must be a string or a list of {"type": "text", "text": ...} for this model, '
            f"got {content!r:.80}"
        )
    message["content"] = "\n".join(map(str, texts))


_END_TAG = "\ue000end of the final message\ue000"  # private-use characters: no text holds them by chance


def _tag_end(message: dict[str, Any]) -> None:
    """Mark where the content ends, with a space behind the mark that shows whether the template strips contents."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = f"{content}{_END_TAG} "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] = f"{part['text']}{_END_TAG} "
            return
    raise ValueError("continue_final_message needs text in the last message's content, found none")


def _cut_at_tag(text: str) -> str:
    before, tag, after = text.rpartition(_END_TAG)
    if not tag:
        raise ValueError("continue_final_message: the chat template leaves out the end of the last message")
    return before if after.startswith(" ") else before.rstrip()
