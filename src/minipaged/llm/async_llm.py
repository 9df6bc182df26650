"""`AsyncLLM`: the engine in a thread of its own, one async iterator per request.

    event loop(s)                          engine thread
    generate() --submit, wake-------------> loop: sleep until there is something to do
       await mailbox <--call_soon------------     step(), one call into each loop per step
    cancelled, closed --abort, wake-------> next step() frees its blocks

Outputs are cumulative, so a mailbox holds one output: a reader that is slower than the engine skips to the latest
and misses nothing, and no queue grows behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minipaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minipaged.engine.config import EngineStats
    from minipaged.engine.engine import Engine
    from minipaged.engine.request import Request
    from minipaged.outputs import RequestOutput
    from minipaged.text.detokenizer import ChatText

logger = logging.getLogger(__name__)

FAILED_STEPS_AT_MOST = 3  # in a row: then the fault is in the engine and not in a request


class EngineDeadError(RuntimeError):
    """The engine's thread has ended, through `close` or an error; nothing more will come of this `AsyncLLM`."""


class Mailbox:
    """The latest output of one request, for one reader on one event loop. All methods but `loop` run on that loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._latest: RequestOutput | BaseException | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput | BaseException) -> None:
        """Replace what has not been read yet."""
        self._latest = output
        self._news.set()

    async def get(self) -> RequestOutput:
        """Wait for an output newer than the last one read; raises what was put instead of one."""
        await self._news.wait()
        self._news.clear()
        latest = self._latest
        if isinstance(latest, BaseException):
            raise latest
        assert latest is not None
        return latest


class AsyncLLM:
    """Serves many requests at once from asyncio; the keywords are those of `LLM`. Close it, or use `async with`.

    The model loads in the constructor, which blocks: create it before the event loop has other work, or in a thread.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        from minipaged.llm.loading import load_engine
        from minipaged.llm.options import EngineOptions

        loaded = load_engine(EngineOptions.from_keywords("AsyncLLM", {"model": model, **options}))
        self._start(loaded.engine, loaded.close_hooks)
        self.loaded = loaded

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncLLM:
        """Around an engine that exists; from now on only this object's thread may step it."""
        self = cls.__new__(cls)
        self._start(engine, [])
        return self

    def _start(self, engine: Engine, close_hooks: Sequence[Callable[[], None]]) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._close_hooks = close_hooks
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._closing = False
        self._mailboxes: dict[str, Mailbox] = {}
        self._step_started: float | None = None
        self.step_listeners: list[Callable[[list[RequestOutput]], None]] = []
        """Called in the engine's thread with the outputs of each step, before anybody else sees them."""
        self._thread = threading.Thread(target=self._run, name="minipaged-engine", daemon=True)
        self._thread.start()

    # ---- requests, on an event loop

    async def generate(
        self,
        prompt: str | Iterable[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        prompt_text: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield cumulative outputs until one has `finished` True.

        request_id: must not be alive; None = one is chosen. Leaving the iterator early (cancellation, `aclose`, a
        `break` once the generator is collected) aborts the request. ValueError as in `Engine.add_request`, at the first
        iteration; EngineDeadError if the engine's thread has ended. prompt_text: as in `Engine.prepare`.
        """
        request = self.prepare(prompt, sampling_params, request_id, cache_salt=cache_salt, prompt_text=prompt_text)
        with self.submit(request) as outputs:
            async for output in outputs:
                yield output

    def prepare(
        self,
        prompt: str | Iterable[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        prompt_text: str | None = None,
        chat: ChatText | None = None,
    ) -> Request:
        """Tokenise and check a request without any effect on the engine; any thread. Arguments and errors of
        `generate`.
        """
        return self.engine.prepare(
            f"async-{next(self._numbers)}" if request_id is None else request_id,
            prompt,
            sampling_params or SamplingParams(),
            cache_salt=cache_salt,
            prompt_text=prompt_text,
            chat=chat,
        )

    def submit(self, request: Request) -> OutputStream:
        """Queue a prepared request, and read its outputs on the event loop that this is called on.

        ValueError if its id is alive, EngineDeadError if the engine's thread has ended; both at once.
        """
        mailbox = Mailbox()
        with self._wake:
            self._check_alive()
            self.engine.submit(request)  # before the mailbox: it raises if the id is alive
            self._mailboxes[request.request_id] = mailbox
            self._wake.notify()
        return OutputStream(self, request, mailbox)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with the reason "abort". Unknown ids: nothing happens."""
        self.engine.abort(request_id)
        with self._wake:
            self._wake.notify()

    # ---- the whole

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread is alive and takes requests."""
        return self._thread.is_alive() and not self._closing and self.error is None

    @property
    def step_seconds(self) -> float:
        """For how long the current step has been running; 0.0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def stats(self) -> EngineStats:
        """The engine's numbers, of this moment."""
        return self.engine.stats()

    def close(self) -> None:
        """Stop the engine's thread after its current step and wait for it. Iterators that still wait raise
        EngineDeadError.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)  # the step that runs now may take its time

    # ---- inside

    def _check_alive(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine has died: {type(self.error).__name__}: {self.error}") from self.error
        if self._closing:
            raise EngineDeadError("the engine is closed")

    def _abandon(self, request_id: str, mailbox: Mailbox) -> None:
        with self._wake:
            if self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
                self.engine.abort(request_id)
                self._wake.notify()

    def _run(self) -> None:
        """The engine's thread."""
        failed_steps = 0
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing or self.engine.has_unfinished())
                    if self._closing:
                        break
                self._step_started = time.monotonic()
                try:
                    outputs = self.engine.step()
                    failed_steps = 0
                except Exception as error:
                    failed_steps += 1
                    if failed_steps == FAILED_STEPS_AT_MOST:
                        raise
                    logger.exception("a step failed outside of the forward pass: every live request ends")
                    with self._wake:  # whoever is alive has a mailbox
                        outputs = self.engine.drop_all(f"{type(error).__name__}: {error}")
                finally:
                    self._step_started = None
                self._tell(outputs)
                self._deliver(outputs)
        except BaseException as error:
            logger.exception("the engine's thread ends")
            self.error = error
        finally:
            self._end()

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Whoever only watches cannot stop the engine."""
        for listener in self.step_listeners:
            try:
                listener(outputs)
            except Exception:
                logger.exception("a step listener failed")

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand a step's outputs over, with one call into each event loop."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, RequestOutput | BaseException]]] = {}
        with self._wake:
            for output in outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:
                    letters.setdefault(mailbox.loop, []).append((mailbox, output))
                    if output.finished:
                        del self._mailboxes[output.request_id]
        for loop, batch in letters.items():
            _post(loop, batch)

    def _end(self) -> None:
        """Nobody waits for ever: whoever still does gets an exception."""
        with self._wake:
            self._closing = True
            waiting, self._mailboxes = list(self._mailboxes.values()), {}
        reason = "closed" if self.error is None else f"dead: {type(self.error).__name__}: {self.error}"
        for mailbox in waiting:
            error = EngineDeadError(f"the engine is {reason}")
            error.__cause__ = self.error
            _post(mailbox.loop, [(mailbox, error)])
        try:
            self.engine.drop_all()
        finally:
            for hook in self._close_hooks:
                try:
                    hook()
                except Exception:  # nobody would see it: this is the end of a thread
                    logger.exception("closing the engine")


class OutputStream:
    """The outputs of one submitted request, cumulative, until one has `finished` True. Belongs to one event loop.

    Use it in a `with` block, or call `close`: a reader that leaves early thereby aborts the request.
    """

    def __init__(self, llm: AsyncLLM, request: Request, mailbox: Mailbox) -> None:
        self.request = request
        self._llm = llm
        self._mailbox = mailbox
        self._over = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        output = await self._mailbox.get()
        self._over = output.finished
        return output

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._over:
            self._over = True
            self._llm._abandon(self.request.request_id, self._mailbox)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _post(loop: asyncio.AbstractEventLoop, letters: Iterable[tuple[Mailbox, RequestOutput | BaseException]]) -> None:
    """Fill mailboxes on their own event loop; a loop that is closed has no readers any more."""

    def fill() -> None:
        for mailbox, letter in letters:
            mailbox.put(letter)

    try:
        loop.call_soon_threadsafe(fill)
    except RuntimeError:
        if not loop.is_closed():
            raise
