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
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minipaged.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minipaged.engine.engine import Engine
    from minipaged.engine.outputs import RequestOutput
    from minipaged.engine.stats import EngineStats

logger = logging.getLogger(__name__)


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
        from minipaged.engine.loading import EngineOptions, load_engine

        loaded = load_engine(EngineOptions(model=model, **options))
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
        request = self.engine.prepare(
            f"async-{next(self._numbers)}" if request_id is None else request_id,
            prompt,
            sampling_params or SamplingParams(),
            cache_salt=cache_salt,
            prompt_text=prompt_text,
        )
        mailbox = Mailbox()
        with self._wake:
            self._check_alive()
            self.engine.submit(request)  # before the mailbox: it raises if the id is alive
            self._mailboxes[request.request_id] = mailbox
            self._wake.notify()
        finished = False
        try:
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abandon(request.request_id, mailbox)

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
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing or self.engine.has_unfinished())
                    if self._closing:
                        break
                self._deliver(self.engine.step())
        except BaseException as error:
            logger.exception("the engine's thread ends")
            self.error = error
        finally:
            self._end()

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
                hook()


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
