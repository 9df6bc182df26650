"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from minipaged.server.errors import refused
from minipaged.server.http import EventStream, encode, event, read_body, while_connected
from minipaged.server.logprobs import chat_logprobs
from minipaged.server.protocol import ChatBody, ChatMessage, Tool, parse
from minipaged.server.sampling import checked_logprobs, sampling_params
from minipaged.server.service import Delta, Service, note, stream_events, usage
from minipaged.text.detokenizer import ChatText
from minipaged.text.reasoning import CLOSE, OPEN, ReasoningSplitter, Thinking, thinking_after
from minipaged.text.tool_calls import CLOSE as CALL_CLOSE
from minipaged.text.tool_calls import OPEN as CALL_OPEN
from minipaged.text.tool_calls import ToolCall, ToolCallParser

if TYPE_CHECKING:
    from minipaged.engine import CompletionOutput, Logprob, RequestOutput
    from minipaged.engine import Request as EngineRequest


THINKING_TAGS, CALL_TAGS = (OPEN, CLOSE), (CALL_OPEN, CALL_CLOSE)


async def create(service: Service, request: Request) -> Response:
    """Answer one POST: everything that can be refused is refused before the first byte of a stream."""
    body = await read_body(request, service.settings.max_body_bytes, service.settings.body_timeout)
    call = await while_connected(request.receive, service.in_worker(lambda: _Call(service, body)))
    notes = request.state.notes
    batch = service.submit([call.request])
    if call.body.stream:
        events = stream_events(batch, call.chunks, call.usage_chunk if call.include_usage else None, notes)
        return EventStream(events, batch.close)
    (output,) = await while_connected(request.receive, batch.results())
    answer = call.answer(output)
    note(notes, [output], answer["usage"])
    return Response(encode(answer), media_type="application/json")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text only, in one string per message."""
    plain = []
    for number, message in enumerate(messages):
        fields = message.model_dump(exclude_none=True)
        if message.content is None and not (
            message.role == "assistant" and (message.tool_calls or message.reasoning_content)
        ):
            raise refused(f"messages[{number}] must have content", "messages")
        fields["content"] = _text_of(number, message.content)
        plain.append(fields)
    return plain


def _text_of(number: int, content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str):
            raise refused(
                f"messages[{number}].content: only parts of type text are supported, got type {part.get('type')!r}",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as they came, for the template."""
    return [tool.given for tool in tools] if tools else None


class _ChildText:
    """From one child's text to reasoning, content and calls."""

    def __init__(self, thinking: Thinking, *, with_tools: bool) -> None:
        self._splitter = ReasoningSplitter(thinking)
        self._parser = ToolCallParser() if with_tools else None
        self.num_calls = 0

    def feed(self, text: str, *, end: bool) -> dict[str, Any]:
        """The delta that a piece of text makes, tool calls numbered; `end` also gives out what was held back."""
        reasoning, content = self._splitter.feed(text)
        if end:
            more_reasoning, more_content = self._splitter.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        pieces: list[str | ToolCall] = [content]
        if self._parser is not None:
            pieces = self._parser.feed(content)
            if end:
                pieces += self._parser.finish()
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        if said:
            delta["content"] = said
        calls = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                calls.append({"index": self.num_calls, **piece.as_json()})
                self.num_calls += 1
        if calls:
            delta["tool_calls"] = calls
        return delta


class _Call:
    """One call: what was asked, the engine's request for it, and how to write the answer."""

    def __init__(self, service: Service, raw: bytes) -> None:
        """Runs in a worker. ApiError or ValueError for what is refused."""
        body = self.body = parse(ChatBody, raw)
        body.refuse_unsupported("chat")
        self.model = service.check_model(body.model)
        self.id = f"chatcmpl-{body.request_id or service.new_id()}"
        self.created = int(time.time())
        self.include_usage = service.include_usage(body)
        self.k = self._alternatives(service.settings.max_logprobs)
        self.tools = template_tools(body.tools) if self._tools_may_be_called() else None
        self.tokenizer = service.need_tokenizer()
        self.request = self._request(service)
        self._delta = Delta()
        self._texts: dict[int, _ChildText] = {}

    def _alternatives(self, limit: int) -> int | None:
        k = checked_logprobs("top_logprobs", self.body.top_logprobs, limit)
        if k is not None and not self.body.logprobs:
            raise refused("top_logprobs needs logprobs to be true", "top_logprobs")
        return (k or 0) if self.body.logprobs else None

    def _tools_may_be_called(self) -> bool:
        choice = self.body.tool_choice
        if choice not in (None, "auto", "none"):
            raise refused('tool_choice must be "auto" or "none": a call cannot be forced', "tool_choice")
        return choice != "none"

    def _max_tokens(self) -> int | None:
        old, new = self.body.max_tokens, self.body.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refused(f"max_tokens = {old} and max_completion_tokens = {new} contradict each other: give one")
        return new if new is not None else old

    def _request(self, service: Service) -> EngineRequest:
        body = self.body
        kwargs = body.chat_template_kwargs or {}
        continued = bool(body.continue_final_message)
        messages = template_messages(body.messages)
        text = service.render(
            messages,
            tools=self.tools,
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
        token_ids = service.encode(text, "messages", add_special_tokens=bool(body.add_special_tokens))
        params = sampling_params(
            body,
            max_tokens=self._max_tokens(),
            logprobs=self.k,
            token_mask=service.token_mask(body, thought_is_open=self.thinking is Thinking.OPENED),
        )
        return service.prepare(token_ids, params, body, prompt_text=text, chat=self._chat_text())

    def _chat_text(self) -> ChatText:
        """Tags that are special tokens have to reach the parsers; stop strings are about what the client sees as the
        answer."""
        tags = (*(THINKING_TAGS if self.thinking is not Thinking.OFF else ()), *(CALL_TAGS if self.tools else ()))
        ids = (self.tokenizer.token_to_id(tag) for tag in tags)
        everywhere = bool(self.body.stop_in_reasoning)
        return ChatText(
            visible=frozenset(token_id for token_id in ids if token_id is not None),
            thinking=None if everywhere else self.thinking,
            end_token_ids=self.tokenizer.end_of_turn,
        )

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for child in output.outputs:
            delta = self._text_state(child).feed(child.text, end=True)
            calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
            message = {
                "role": "assistant",
                "content": delta.get("content", None if calls else ""),
                "reasoning_content": delta.get("reasoning_content"),
                "refusal": None,
                **({"tool_calls": calls} if calls else {}),
            }
            choices.append({"index": child.index, "message": message, **self._ending(child, child.logprobs)})
        return {**self._head("chat.completion"), "choices": choices, "usage": usage([output])}

    def chunks(self, number: int, output: RequestOutput) -> Iterator[bytes]:
        """The events for what is new in an output."""
        for child, text, old_tokens in self._delta.of(number, output):
            first = child.index not in self._texts
            delta = self._text_state(child).feed(text, end=child.finished)
            if first:
                delta = {"role": "assistant", "content": "", **delta}
            new = None if child.logprobs is None else child.logprobs[old_tokens:]
            choice = {"index": child.index, "delta": delta, **self._ending(child, new)}
            chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
            if self.include_usage:
                options = self.body.stream_options
                chunk["usage"] = usage([output]) if options and options.continuous_usage_stats else None
            yield event(chunk)

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        """The last event, if the usage was asked for."""
        return event({**self._head("chat.completion.chunk"), "choices": [], "usage": total})

    def _text_state(self, child: CompletionOutput) -> _ChildText:
        return self._texts.setdefault(child.index, _ChildText(self.thinking, with_tools=self.tools is not None))

    def _ending(self, child: CompletionOutput, logprobs: Sequence[dict[int, Logprob]] | None) -> dict[str, Any]:
        reason: str | None = child.finish_reason
        if reason == "stop" and self._texts[child.index].num_calls:
            reason = "tool_calls"
        return {
            "logprobs": None if self.k is None else chat_logprobs(logprobs or (), self.k, self.tokenizer),
            "finish_reason": reason,
            "stop_reason": child.stop_reason,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
