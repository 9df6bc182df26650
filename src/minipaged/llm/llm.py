"""`LLM`: the engine for programs that want text and nothing else."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from minipaged.arguments import check_keywords
from minipaged.engine.engine import Engine
from minipaged.llm.interrupts import Interrupts
from minipaged.llm.loading import LoadedEngine, load_engine
from minipaged.llm.options import EngineOptions, takes_options
from minipaged.outputs import CompletionOutput, RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.text.detokenizer import ChatText

if TYPE_CHECKING:
    from minipaged.engine.request import Request
    from minipaged.llm.progress import ProgressBar
    from minipaged.model.source import ModelSource
    from minipaged.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@takes_options
class LLM:
    """A model with its engine. Use as a context manager, or call `close` to give the memory back.

    model: None = the bundled demo model; a folder with config.json and safetensors; or a Hub id (with `revision`).
    (Inside minipaged also a `ModelSource`.)
    tokenizer: another folder or Hub id to take the tokenizer from, or a `Tokenizer`. Without one, prompts are token ids
    and `text` is "".
    dtype: "auto" (the checkpoint's type where the processor is fast at it), "float32", "bfloat16", "float16".
    device: "auto", "cpu", "cuda". backend: "cpu", "torch", "triton", "flashinfer", "reference"; None = the best.
    block_size: tokens per KV block.
    num_blocks: blocks in the pool; None = as many as `kv_cache_memory` (bytes) holds, and if that is None too, a
    quarter of the memory that the weights leave free (on a GPU: up to `gpu_memory_utilization` of all of it).
    max_model_len: longest prompt + output in tokens; None = the model's, or what the pool holds if that is less (with a
    warning).
    max_num_seqs: sequences that hold blocks at once.
    max_num_batched_tokens: tokens computed per step, None = 512 (GPU: 8192).
    enable_prefix_caching: reuse the K/V of common beginnings. eviction_policy: "lru", "lfu" or an `EvictionPolicy`.
    scheduling_policy: "fcfs" or "priority". seed: for requests that bring none of their own.
    threads: compute threads of the process; None = what affinity and the control group's quota allow, or fewer if
    OMP_NUM_THREADS says so. Only the first value counts.
    check_invariants: check the block manager after every step (slow). kv_journal: a file for its events, one JSON
    object per line.

    ValueError names the option that is wrong, TypeError an unknown keyword; see also `errors`. One object may be used
    from several threads; their calls share the batch.
    """

    def __init__(self, model: str | Path | ModelSource | None = None, **options: Any) -> None:
        given = EngineOptions.from_keywords("LLM", {"model": model, **options})
        self._loaded: LoadedEngine | None = load_engine(given)
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        # Of each request that somebody here waits for: its latest output, once.
        self._news: dict[str, RequestOutput | None] = {}

    # ---- text

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, which run together; one output per prompt, in their order.

        prompts: a string, token ids, or a list of either.
        sampling_params: for all, or one per prompt; None = the model's defaults.
        use_tqdm: a progress bar on stderr.

        ValueError for any prompt that cannot run (RequestTooLargeError if it is too long): then none of them has run.
        An exception, Ctrl-C included, ends all of them and frees their blocks.
        """
        requests = [self._prepare(prompt, params) for prompt, params in _paired(_listed(prompts), sampling_params)]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, as `generate` does for prompts.

        chat_template_kwargs: variables for the model's template, such as {"enable_thinking": False}. template_options:
        the other keywords of `ChatTemplate.render` (tools, add_generation_prompt, continue_final_message, ...).
        ValueError if the model has no tokenizer or no chat template; TypeError for a keyword that is neither of these
        nor a variable of the template.
        """
        self._check_template_options("chat", template_options)
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        options = {**template_options, **(chat_template_kwargs or {})}
        texts = [self.render_chat(conversation, **options) for conversation in conversations]
        requests = [self._prepare(text, params, chat=True) for text, params in _paired(texts, sampling_params)]
        return self._run(requests, use_tqdm)

    def stream(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt and yield what is new at each step: text, token_ids and logprobs hold only that.

        The last output has `finished` True and whatever was still to come; what fails meanwhile ends it with the reason
        "error". Leaving the loop, or Ctrl-C, ends the request and frees its blocks at once. ValueError as in
        `generate`, raised by this call itself. Several streams may be read in turns.
        """
        return self._stream(self._prepare(prompt, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """As `chat` for one conversation, yielding as `stream` does."""
        self._check_template_options("stream_chat", template_options)
        text = self.render_chat(messages, **template_options, **(chat_template_kwargs or {}))
        return self._stream(self._prepare(text, sampling_params, chat=True))

    def render_chat(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The prompt that the model's chat template makes of a conversation. ValueError if there is no tokenizer or no
        template.
        """
        loaded = self._open()
        if loaded.tokenizer is None:
            raise ValueError(f"{loaded.source.name} has no tokenizer, so it cannot chat: give token ids to generate()")
        if loaded.chat_template is None:
            raise ValueError(
                f"{loaded.source.name} has no chat template, so it cannot chat: give a prompt to generate()"
            )
        return loaded.chat_template.render(messages, **options)

    # ---- what there is

    @property
    def engine(self) -> Engine:
        """The engine, to be stepped by hand (not while another thread is in `generate`)."""
        return self._open().engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None if the model has none."""
        return self._open().tokenizer

    @property
    def loaded(self) -> LoadedEngine:
        """Model, caches, pool size, folder: the parts behind the engine."""
        return self._open()

    def summary(self) -> str:
        """What runs here, in a few lines."""
        return self._open().summary()

    # ---- the end

    def close(self) -> None:
        """End every request and let go of weights and pool. A second call does nothing; any other use is a
        RuntimeError.
        """
        with Interrupts():
            with self._lock:
                loaded, self._loaded = self._loaded, None
                self._news.clear()
            if loaded is not None:
                loaded.engine.drop_all()
                for hook in loaded.close_hooks:
                    hook()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _open(self) -> LoadedEngine:
        if self._loaded is None:
            raise RuntimeError("this LLM is closed")
        return self._loaded

    def _check_template_options(self, caller: str, options: Mapping[str, Any]) -> None:
        template = self._open().chat_template
        if template is not None:
            own = ["messages", "sampling_params", *(["use_tqdm"] if caller == "chat" else []), "chat_template_kwargs"]
            known = [*template.options(options.get("template")), *own, *SamplingParams.__dataclass_fields__]
            for name in SamplingParams.__dataclass_fields__.keys() & options.keys():
                raise TypeError(f"{caller}() takes {name} in sampling_params: SamplingParams({name}=...)")
            check_keywords(caller, options, known, f"help(LLM.{caller}); chat_template_kwargs takes any variable")

    def _prepare(self, prompt: Any, params: SamplingParams | None, *, chat: bool = False) -> Request:
        loaded, text, rules = self._open(), None, None
        if chat and loaded.tokenizer is not None:
            text, prompt = prompt, loaded.tokenizer.encode(prompt, add_special_tokens=False)
            rules = ChatText(end_token_ids=loaded.tokenizer.end_of_turn)
        request_id = f"{next(self._numbers)}"
        return loaded.engine.prepare(request_id, prompt, params or SamplingParams(), prompt_text=text, chat=rules)

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        live = _Live(self, requests)
        with _progress(len(requests), use_tqdm) as bar, Interrupts() as interrupts, closing(live), live:
            while len(results) < len(requests):
                for request in requests:
                    output = None if request.request_id in results else self._take(request)
                    if output is not None and output.finished:
                        results[request.request_id] = output
                        if bar is not None:
                            bar.update(output)
                interrupts.deliver()
                if len(results) < len(requests):
                    self._step()
        return [results[request.request_id] for request in requests]

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        given = [CompletionOutput(index) for index in range(request.params.n)]
        live = _Live(self, [request])
        with closing(live), live:
            while True:
                with Interrupts():
                    output = self._take(request)
                    if output is None:
                        self._step()
                        continue
                yield _difference(output, given)
                if output.finished:
                    return
                given = output.outputs

    def _take(self, request: Request) -> RequestOutput | None:
        with self._lock:
            if request.request_id not in self._news:
                raise RuntimeError("this LLM was closed while a request was running")
            output, self._news[request.request_id] = self._news[request.request_id], None
            if output is None and request.finished:  # Ctrl-C in another thread's step lost what it would have said
                return request.output()
            return output

    def _step(self) -> None:
        """One step of the engine; everybody's outputs go where they wait for them."""
        with self._lock:
            engine = self._open().engine
            if engine.has_unfinished():
                for output in engine.step():
                    if output.request_id in self._news:
                        self._news[output.request_id] = output


class _Live:
    """Requests from their start to their end, or to the end of interest in them.

    Used as `with closing(live), live`: an exception that keeps `__exit__` from its work leaves `close` to do it.
    """

    def __init__(self, llm: LLM, requests: Iterable[Request]) -> None:
        self.llm, self.requests = llm, list(requests)

    def __enter__(self) -> None:
        with Interrupts(), self.llm._lock:
            engine = self.llm._open().engine
            for request in self.requests:
                engine.submit(request)
                self.llm._news[request.request_id] = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody waits for them any more: those that are not over end."""
        with Interrupts(), self.llm._lock:
            for request in self.requests:
                self.llm._news.pop(request.request_id, None)
                if self.llm._loaded is not None:
                    self.llm._loaded.engine.drop(request)


def _progress(total: int, wanted: bool) -> AbstractContextManager[ProgressBar | None]:
    """What shows how far `total` prompts are; the bar is loaded only where it is wanted."""
    if not wanted or not total:
        return nullcontext()
    from minipaged.llm.progress import ProgressBar

    return ProgressBar(total)


def _difference(output: RequestOutput, given: list[CompletionOutput]) -> RequestOutput:
    """`output` without what was in `given` already; `output` itself stays as it is."""
    new = [
        replace(
            now,
            text=now.text[len(before.text) :],
            token_ids=now.token_ids[len(before.token_ids) :],
            logprobs=None if now.logprobs is None else now.logprobs[len(before.logprobs or ()) :],
        )
        for now, before in zip(output.outputs, given, strict=True)
    ]
    return replace(output, outputs=new)


def _listed(prompts: Any) -> list[Any]:
    """One prompt as a list of one. A list of integers is a single prompt."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
        return [prompts]  # the engine says what is wrong with all but a string
    prompts = list(prompts)
    return [prompts] if prompts and not isinstance(prompts[0], str) and all(map(_is_token, prompts)) else prompts


def _is_token(item: object) -> bool:
    """A number, of whatever kind: the engine says so if it is no token id."""
    return isinstance(item, Number) or (hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0)


def _paired(prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[tuple[Any, Any]]:
    """Each prompt with its sampling parameters."""
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    if isinstance(params, Mapping) or not isinstance(params, Sequence):
        raise TypeError(f"sampling_params must be a SamplingParams or a list with one per prompt, got {params!r}")
    if len(params) != len(prompts):
        raise ValueError(
            f"sampling_params: {len(params)} of them for {len(prompts)} prompts; give one for all or one for each"
        )
    return list(zip(prompts, params, strict=True))
