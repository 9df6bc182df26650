"""What the routes share: the engine, its tokenizer and template, worker threads, and the requests of one HTTP call."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from minipaged.errors import RequestTooLargeError
from minipaged.llm import EngineDeadError
from minipaged.server.admission import Admission
from minipaged.server.errors import ApiError, from_value_error, refused
from minipaged.server.guided import GrammarMask, Guide
from minipaged.server.metrics import Metrics
from minipaged.server.protocol import CompletionBody
from minipaged.server.thinking_budget import ThinkingBudget

if TYPE_CHECKING:
    from minipaged.engine import CompletionOutput, Request, RequestOutput, SamplingParams
    from minipaged.llm import AsyncLLM, OutputStream
    from minipaged.server.protocol import GenerationBody
    from minipaged.server.settings import ServerSettings
    from minipaged.text.chat_template import ChatTemplate
    from minipaged.text.detokenizer import ChatText
    from minipaged.text.tokenizer import Tokenizer

T = TypeVar("T")


class Service:
    """One server's state. Nothing of it computes on the event loop: parsing, templates, tokenising and grammars run in
    `in_worker`, in the order in which they came.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, chat_template: ChatTemplate | None) -> None:
        self.llm = llm
        self.settings = settings
        self.chat_template = chat_template
        self.admission = Admission(settings.max_queued_requests, llm.engine.config.max_num_seqs)
        self.metrics = Metrics(llm)
        self._workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minipaged-text")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, or None for one that takes token ids only."""
        return self.llm.engine.tokenizer

    def need_tokenizer(self) -> Tokenizer:
        """400 for a model without one."""
        if self.tokenizer is None:
            raise refused("this model has no tokenizer: give prompts as token ids to /v1/completions")
        return self.tokenizer

    @property
    def longest(self) -> int:
        """Most tokens that a prompt and its output can have together: `max_model_len`, or less if the pool is small."""
        return self.llm.engine.room_for(0)

    def encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the prompt that came in `field`. A 400 at once for one so long that it need not be tokenised to
        know that it can never fit: tokenising megabytes takes seconds, in which everybody else would wait."""
        tokenizer, limit = self.need_tokenizer(), self.longest
        least = tokenizer.min_num_tokens(text)
        if least >= limit:
            raise refused(
                f"context length exceeded: at least {least} prompt tokens ({len(text)} characters) + 1 new one > "
                f"{limit}, the most that max_model_len and the pool allow; shorten the prompt or raise them",
                field,
                "context_length_exceeded",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run `work` in the worker thread; its ValueErrors are the client's and become 400."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        except ValueError as error:
            raise from_value_error(error) from None

    def check_model(self, name: str | None) -> str:
        """The name to answer with; 404 for a model that is not served."""
        names = self.settings.served_model_names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(404, f"the model {name!r} is not served here, only {names[0]!r}", code="model_not_found")
        return name

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None,
        documents: Sequence[dict[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt text that the chat template makes of a conversation; ValueError for what it cannot take."""
        template = self.chat_template
        self.need_tokenizer()
        if template is None:
            raise refused("this model has no chat template: use /v1/completions")
        if not messages:
            raise refused("messages must hold at least one message, got none", "messages")
        if tools and "tool_use" not in template.templates and "tools" not in template.templates.get("default", ""):
            raise refused("tools must be left out: this model's chat template does not know them", "tools")
        if documents and "documents" not in "".join(template.templates.values()):
            raise refused("documents must be left out: this model's chat template does not know them", "documents")
        for name in template_kwargs or ():
            if name in RENDER_ARGUMENTS:
                raise refused(f"chat_template_kwargs must not hold {name!r}: it has a field of its own or none")
        return template.render(
            messages,
            tools=tools or None,
            documents=documents or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )

    @cached_property
    def guide(self) -> Guide:
        """Maker of grammars for this model. 400 for a model without a tokenizer."""
        config = self.llm.engine.config
        defaults = config.generation_defaults
        ends = defaults.eos_token_ids if defaults is not None else ()
        return Guide(self.need_tokenizer(), ends, config.vocab_size)

    def prepare(
        self,
        token_ids: list[int],
        params: SamplingParams,
        body: GenerationBody,
        *,
        prompt_text: str | None,
        chat: ChatText | None = None,
    ) -> Request:
        """Check one request of a call without any effect. ValueError for what can never run."""
        if params.priority and self.llm.engine.config.scheduling_policy != "priority":
            raise refused("priority needs a server started with --scheduling-policy priority", "priority")
        if body.cache_salt == "":
            raise refused("cache_salt must not be empty", "cache_salt")
        self.admission.check_size(1, params.n)
        # The engine's ids are its own: whatever a client calls its request, two of them can never be mixed up.
        try:
            return self.llm.prepare(token_ids, params, cache_salt=body.cache_salt, prompt_text=prompt_text, chat=chat)
        except RequestTooLargeError as error:
            raise self._too_large(error, len(token_ids), params, body) from None

    def _too_large(
        self, error: RequestTooLargeError, prompt_len: int, params: SamplingParams, body: GenerationBody
    ) -> ApiError:
        """The 400 that names what would have to become smaller."""
        if params.n > self.llm.engine.config.max_num_seqs:
            return refused(str(error), "n")
        if self.llm.engine.room_for(prompt_len) < 1:
            field = "prompt" if isinstance(body, CompletionBody) else "messages"
        else:
            field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        return refused(str(error), field, "context_length_exceeded")

    def include_usage(self, body: GenerationBody) -> bool:
        """Whether a stream is to end with the usage. 400 for stream_options without a stream."""
        options = body.stream_options
        if options is not None and not body.stream:
            raise refused("stream_options needs stream to be true", "stream_options")
        return options is not None and bool(options.include_usage)

    @staticmethod
    def new_id() -> str:
        """For an answer whose client has not chosen one."""
        return uuid.uuid4().hex

    def submit(self, requests: Sequence[Request]) -> Batch:
        """Queue all of them or none. ApiError 429 if the queue is full, 503 if the engine is dead."""
        try:
            self.admission.check(requests)
        except ApiError as error:
            if error.status == 429:
                self.metrics.rejected.inc()
            raise
        batch = Batch(self, requests)
        for request in requests:
            self.metrics.requests.queued(request.params)
        return batch

    def close(self) -> None:
        """Let the worker thread end."""
        self._workers.shutdown(wait=False, cancel_futures=True)


RENDER_ARGUMENTS = frozenset(
    ("messages", "tools", "documents", "template", "add_generation_prompt", "continue_final_message")
)


class Batch:
    """The submitted requests of one HTTP call, to be read to the end or closed."""

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._service = service
        self._streams: list[OutputStream] = []
        try:
            for request in requests:
                self._streams.append(service.llm.submit(request))
                service.admission.enter(request)
        except EngineDeadError as error:
            self.close()
            raise ApiError(503, str(error), code="engine_dead") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what has not ended. May be called again."""
        for stream in self._streams:
            stream.close()
            self._service.admission.leave(stream.request)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the request, its output), as they come; outputs are cumulative, each request ends with one that is
        finished.

        ApiError 500 when a request fails, wherever in the engine; 400 when it was its grammar that failed.
        """
        merged = _read(0, self._streams[0]) if len(self._streams) == 1 else _merge(self._streams)
        try:
            async with contextlib.aclosing(merged) as items:
                async for number, output in items:
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            raise _failure(output, completion, self._streams[number].request.params.token_mask)
                    yield number, output
        except EngineDeadError as error:
            raise ApiError(500, str(error), code="engine_dead") from None
        finally:
            self.close()

    async def results(self) -> list[RequestOutput]:
        """The last output of every request."""
        last: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for number, output in outputs:
                last[number] = output
        return [last[number] for number in range(len(self._streams))]


def _failure(output: RequestOutput, completion: CompletionOutput, mask: object) -> ApiError:
    if isinstance(mask, ThinkingBudget):
        mask = mask.inner
    if isinstance(mask, GrammarMask) and mask.failure is not None:
        tokens = max(len(child.token_ids) for child in output.outputs)
        return refused(f"{mask.field} cannot be followed beyond token {tokens}: {mask.failure}", mask.field)
    return ApiError(500, f"the engine failed: {completion.error}", code="engine_error")


async def _read(number: int, stream: OutputStream) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async for output in stream:
        yield number, output


async def _merge(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Whatever comes first from any of them."""
    waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, output = waiting.pop(task), task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[number]))] = number
                yield number, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class Delta:
    """What each child of each request has given out so far: from cumulative outputs to what is new."""

    def __init__(self) -> None:
        self._given: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, number: int, output: RequestOutput) -> Iterable[tuple[CompletionOutput, str, int]]:
        """(child, its new text, how many of its tokens are old) for each child that advanced or ended since."""
        for child in output.outputs:
            key = (number, child.index)
            characters, tokens = self._given.get(key, (0, 0))
            if characters < 0 or (len(child.token_ids) == tokens and not child.finished):
                continue
            self._given[key] = (-1, 0) if child.finished else (len(child.text), len(child.token_ids))
            yield child, child.text[characters:], tokens


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage object; a prompt counts once, whatever its n."""
    known = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in known)
    completion = sum(len(child.token_ids) for output in known for child in output.outputs)
    cached = sum(output.num_cached_tokens or 0 for output in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def stream_events(
    batch: Batch,
    chunks_of: Callable[[int, RequestOutput], Iterable[bytes]],
    usage_chunk: Callable[[dict[str, Any]], bytes] | None,
    notes: dict[str, Any],
) -> AsyncGenerator[bytes, None]:
    """The events of one streamed answer: `chunks_of` each output, and the usage at the end if it is wanted."""
    last: dict[int, RequestOutput] = {}
    outputs: AsyncIterator[tuple[int, RequestOutput]]
    async with contextlib.aclosing(batch.outputs()) as outputs:
        async for number, output in outputs:
            last[number] = output
            for chunk in chunks_of(number, output):
                yield chunk
    total = usage(last.values())
    note(notes, last.values(), total)
    if usage_chunk is not None:
        yield usage_chunk(total)


def note(notes: dict[str, Any], outputs: Iterable[RequestOutput], total: dict[str, Any]) -> None:
    """Numbers for the log line of the call."""
    notes["prompt_tokens"] = total["prompt_tokens"]
    notes["cached_tokens"] = total["prompt_tokens_details"]["cached_tokens"]
    notes["completion_tokens"] = total["completion_tokens"]
    notes["finish_reasons"] = [child.finish_reason for output in outputs for child in output.outputs]
