"""From a conversation to a request of the engine: template, tools, thoughts, grammar."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minipaged.server.answer_text import AnswerText
from minipaged.server.constraints import OF_THE_ANSWER, constraint_of
from minipaged.server.errors import refused
from minipaged.server.parts import ChatMessage, Tool
from minipaged.server.protocol import ChatBody
from minipaged.server.sampling import checked_logprobs, prompt_alternatives, sampling_params
from minipaged.server.thinking_budget import ThinkingBudget
from minipaged.server.tool_choice import ToolChoice, tool_choice
from minipaged.text.detokenizer import ChatText
from minipaged.text.reasoning import CLOSE, OPEN, Thinking, thinking_after
from minipaged.text.tool_calls import CLOSE as CALL_CLOSE
from minipaged.text.tool_calls import OPEN as CALL_OPEN

if TYPE_CHECKING:
    from minipaged.engine import Request as EngineRequest
    from minipaged.server.guided import TokenMask
    from minipaged.server.service import Service

THINKING_TAGS, CALL_TAGS = (OPEN, CLOSE), (CALL_OPEN, CALL_CLOSE)
NO_THINKING = ("none", "minimal")  # values of reasoning_effort


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text only, in one string per message."""
    plain = []
    for number, message in enumerate(messages):
        fields = message.model_dump(exclude_none=True)
        content = message.content
        if content is None:
            content = fields.pop("refusal", None)
        if content is None and not (
            message.role == "assistant" and (message.tool_calls or message.reasoning_content or message.reasoning)
        ):
            raise refused(f"messages[{number}] must have content", "messages")
        fields["content"] = _text_of(number, content)
        plain.append(fields)
    return plain


def _text_of(number: int, content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type")
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise refused(
                f"messages[{number}].content: only parts of type text are supported, got type {kind!r}", "messages"
            )
        texts.append(text)
    return "\n".join(texts)


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as they came, for the template."""
    return [tool.given for tool in tools] if tools else None


class ChatRequest:
    """What one chat asks for: the engine's `request`, and how its text is to be read."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        """Runs in a worker. ApiError or ValueError for what is refused."""
        self.body = body
        self._service = service
        self.k = self._alternatives(service.settings.max_logprobs)
        self.choice: ToolChoice = tool_choice(body.tool_choice, template_tools(body.tools) or [])
        self.parallel = body.parallel_tool_calls is not False
        self.tokenizer = service.need_tokenizer()
        self.thinking = Thinking.OFF
        self.request = self._prepare()

    @cached_property
    def prompt_k(self) -> int | None:
        """How many alternatives per token of the prompt are asked for, None for nothing."""
        return prompt_alternatives(self.body, self._service.settings.max_logprobs)

    def new_text(self) -> AnswerText:
        """For the text of one child."""
        return AnswerText(self.thinking, with_tools=bool(self.choice.tools), parallel=self.parallel)

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """As OpenAI's: a call that was asked for by its name ends with "stop"."""
        return "tool_calls" if reason == "stop" and num_calls and not self.choice.named else reason

    def _alternatives(self, limit: int) -> int | None:
        k = checked_logprobs("top_logprobs", self.body.top_logprobs, limit)
        if k and not self.body.logprobs:
            raise refused("top_logprobs needs logprobs to be true", "top_logprobs")
        return (k or 0) if self.body.logprobs else None

    def _max_tokens(self) -> int | None:
        old, new = self.body.max_tokens, self.body.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refused(f"max_tokens = {old} and max_completion_tokens = {new} contradict each other: give one")
        return new if new is not None else old

    def _template_kwargs(self) -> dict[str, Any]:
        """The template's variables; those that are given there win over `reasoning_effort`."""
        effort, given = self.body.reasoning_effort, self.body.chat_template_kwargs or {}
        if effort is None:
            return given
        return {"reasoning_effort": effort, "enable_thinking": effort not in NO_THINKING, **given}

    def _prepare(self) -> EngineRequest:
        body, service = self.body, self._service
        kwargs = self._template_kwargs()
        continued = bool(body.continue_final_message)
        messages = template_messages(body.messages)
        text = service.render(
            messages,
            tools=self.choice.tools,
            documents=body.documents,
            template_kwargs=kwargs,
            add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continued,
        )
        self.thinking = thinking_after(
            text,
            enable_thinking=kwargs.get("enable_thinking"),
            continued=messages[-1]["content"] if continued else None,
        )
        if body.reasoning_effort in NO_THINKING and self.thinking is Thinking.OPENED and not continued:
            raise refused(
                f"reasoning_effort must not be {body.reasoning_effort!r} here: the model's chat template always opens "
                "a thought; see thinking_token_budget",
                "reasoning_effort",
            )
        token_ids = service.encode(text, "messages", add_special_tokens=bool(body.add_special_tokens))
        params = sampling_params(
            body,
            max_tokens=self._max_tokens(),
            logprobs=self.k,
            prompt_logprobs=self.prompt_k,
            token_mask=self._token_mask(),
        )
        return service.prepare(token_ids, params, body, prompt_text=text, chat=self._chat_text())

    def _token_mask(self) -> TokenMask | None:
        """Forced calls, or the grammar that was asked for, and the end of a thought that takes too long."""
        body, guide, mask = self.body, self._service.guide, None
        budget, thought_is_open = body.thinking_token_budget, self.thinking is Thinking.OPENED
        if self.choice.forced:
            constraint = constraint_of(body)
            if constraint is not None and constraint.field != OF_THE_ANSWER:
                raise refused(f"{constraint.field} and a forced call exclude each other: give one", constraint.field)
            if body.ignore_eos or body.min_tokens:
                raise refused("a forced call excludes ignore_eos and min_tokens: it says where the text ends")
            mask = guide.mask_for_tools(
                self.choice.tools, self.choice.forced, parallel=self.parallel, thought_is_open=thought_is_open
            )
        elif constraint_of(body) is not None:
            mask = guide.mask_for(
                body, thought_is_open=thought_is_open, tools=self.choice.tools, parallel=self.parallel
            )
        if budget is None or budget == -1 or self.thinking is Thinking.OFF:
            return mask
        if budget < 0:
            raise refused(
                f"thinking_token_budget must be at least 0, or -1 for none, got {budget}", "thinking_token_budget"
            )
        vocab_size = self._service.llm.engine.config.vocab_size or self.tokenizer.vocab_size
        return ThinkingBudget(budget, self.thinking, self.tokenizer, vocab_size, mask)

    def _chat_text(self) -> ChatText:
        """Tags that are special tokens have to reach the parsers; stop strings are about what the client sees as the
        answer."""
        tags = (
            *(THINKING_TAGS if self.thinking is not Thinking.OFF else ()),
            *(CALL_TAGS if self.choice.tools else ()),
        )
        ids = (self.tokenizer.token_to_id(tag) for tag in tags)
        everywhere = bool(self.body.stop_in_reasoning)
        return ChatText(
            visible=frozenset(token_id for token_id in ids if token_id is not None),
            thinking=None if everywhere else self.thinking,
            end_token_ids=self.tokenizer.end_of_turn,
        )
