"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from minipaged.server.constraints import constraint_of
from minipaged.server.errors import refused
from minipaged.server.http import EventStream, encode, event, read_body, while_connected
from minipaged.server.logprobs import CompletionLogprobs, prompt_logprobs
from minipaged.server.protocol import CompletionBody, parse
from minipaged.server.sampling import checked_logprobs, prompt_alternatives, sampling_params
from minipaged.server.service import Delta, Service, note, stream_events, usage

if TYPE_CHECKING:
    from minipaged.engine import CompletionOutput, RequestOutput
    from minipaged.engine import Request as EngineRequest

DEFAULT_MAX_TOKENS = 16


async def create(service: Service, request: Request) -> Response:
    """Answer one POST: everything that can be refused is refused before the first byte of a stream."""
    body = await read_body(request, service.settings.max_body_bytes, service.settings.body_timeout)
    call = await while_connected(request.receive, service.in_worker(lambda: _Call(service, body)))
    notes = request.state.notes
    batch = service.submit(call.requests)
    if call.body.stream:
        events = stream_events(batch, call.chunks, call.usage_chunk if call.include_usage else None, notes)
        return EventStream(events, batch.close)
    outputs = await while_connected(request.receive, batch.results())
    answer = call.answer(outputs)
    note(notes, outputs, answer["usage"])
    return Response(encode(answer), media_type="application/json")


class _Call:
    """One call: what was asked, the engine's requests for it, and how to write the answer."""

    def __init__(self, service: Service, raw: bytes) -> None:
        """Runs in a worker. ApiError or ValueError for what is refused."""
        body = self.body = parse(CompletionBody, raw)
        self.model = service.check_model(body.model)
        self.id = f"cmpl-{body.request_id or service.new_id()}"
        self.created = int(time.time())
        self.include_usage = service.include_usage(body)
        self.tokenizer = service.tokenizer
        self.k = checked_logprobs("logprobs", body.logprobs, service.settings.max_logprobs)
        self.prompt_k = prompt_alternatives(body, service.settings.max_logprobs)
        self.n = 1 if body.n is None else body.n
        self.requests = self._requests(service)
        self.prompt_texts = [self._prompt_text(request) for request in self.requests] if body.echo else []
        self._delta = Delta()
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}

    def _requests(self, service: Service) -> list[EngineRequest]:
        body = self.body
        mask = None if constraint_of(body) is None else service.guide.mask_for(body, thought_is_open=False)
        scored = [k for k in (self.prompt_k, self.k if body.echo else None) if k is not None]
        requests: list[EngineRequest] = []
        prompts = body.prompts()
        service.admission.check_size(len(prompts), self.n)
        for prompt in prompts:
            text, token_ids = None, prompt
            if isinstance(prompt, str):
                special = body.add_special_tokens is not False
                text, token_ids = prompt, service.encode(prompt, "prompt", add_special_tokens=special)
            assert not isinstance(token_ids, str)
            max_tokens = body.max_tokens
            if max_tokens is None:
                max_tokens = max(1, min(DEFAULT_MAX_TOKENS, service.llm.engine.room_for(len(token_ids))))
            params = sampling_params(
                body,
                max_tokens=max_tokens,
                logprobs=self.k,
                prompt_logprobs=max(scored, default=None),
                token_mask=mask,
            )
            requests.append(service.prepare(token_ids, params, body, prompt_text=text))
        return requests

    def _prompt_text(self, request: EngineRequest) -> str:
        if request.prompt is not None:
            return request.prompt
        if self.tokenizer is None:
            raise refused("echo needs a tokenizer, which this model does not have", "echo")
        return self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=request.params.skip_special_tokens)

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(number, output, child, child.text, 0)
            for number, output in enumerate(outputs)
            for child in output.outputs
        ]
        return {**self._head(), "choices": choices, "usage": usage(outputs)}

    def chunks(self, number: int, output: RequestOutput) -> Iterator[bytes]:
        """The events for what is new in an output."""
        for child, text, old_tokens in self._delta.of(number, output):
            chunk = {**self._head(), "choices": [self._choice(number, output, child, text, old_tokens)]}
            if self.include_usage:
                options = self.body.stream_options
                chunk["usage"] = usage([output]) if options and options.continuous_usage_stats else None
            yield event(chunk)

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        """The last event, if the usage was asked for."""
        return event({**self._head(), "choices": [], "usage": total})

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _choice(
        self, number: int, output: RequestOutput, child: CompletionOutput, text: str, old_tokens: int
    ) -> dict[str, Any]:
        """A child's choice from token `old_tokens` on; its first one carries the echo."""
        first = (number, child.index) not in self._logprobs
        state = self._logprobs.get((number, child.index))
        if state is None:
            skip = self.body.skip_special_tokens is not False
            as_ids = bool(self.body.return_tokens_as_token_ids)
            state = CompletionLogprobs(self.tokenizer, self.k or 0, skip_special_tokens=skip, as_ids=as_ids)
            self._logprobs[number, child.index] = state
        echoed = bool(self.body.echo and first)
        logprobs = None
        if self.k is not None:
            token_ids, entries = child.token_ids[old_tokens:], [*(child.logprobs or ())][old_tokens:]
            if echoed:
                token_ids = output.prompt_token_ids + token_ids
                entries = [*(output.prompt_logprobs or ()), *entries]
            logprobs = state.add(token_ids, entries)
        choice = {
            "index": number * self.n + child.index,
            "text": (self.prompt_texts[number] if echoed else "") + text,
            "logprobs": logprobs,
            "finish_reason": child.finish_reason,
            "stop_reason": child.stop_reason,
        }
        if self.prompt_k is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.prompt_k)
        if self.body.return_token_ids:
            choice["token_ids"] = child.token_ids[old_tokens:]
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice
