"""The engine: requests in, one mixed batch per step, cumulative outputs back.

    add_request / abort  --inbox-->  step():  empty the inbox
    (any thread)                              schedule        -> StepPlan    (scheduler: who, which tokens, which slots)
                                              runner.execute  -> StepResult  (forward pass + sampling)
                                              commit, append, fork, finish   (what the result means)
                                              outputs of the requests that advanced or ended

Ownership: `add_request` and `abort` touch nothing but the inbox and the set of live ids. Everything else belongs to the
thread that has its turn (`_alone`).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from minipaged.engine.config import EngineConfig, EngineStats
from minipaged.engine.repair import restart
from minipaged.engine.request import Request, Sequence, Status
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.validation import fit, tokenize
from minipaged.kv.address import longest_request
from minipaged.kv.prefix_index import check_salt
from minipaged.outputs import RequestMetrics, RequestOutput
from minipaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minipaged.engine.plan import RowResult, Runner, ScheduledSequence, StepPlan
    from minipaged.kv import KVBlockManager
    from minipaged.outputs import FinishReason
    from minipaged.text.detokenizer import ChatText
    from minipaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over a paged KV cache. One step = one forward pass over a mixed batch.

    runner: computes a `StepPlan`; the engine knows nothing else of model, device or sampler. Its `release` is optional.
    block_manager: the pool this engine schedules on; it must belong to this engine alone.
    tokenizer: None = prompts are token ids, texts are "" and string prompts or stop strings are a ValueError.
    clock: seconds, monotonic; only for `RequestMetrics`, no decision depends on it.
    """

    def __init__(
        self,
        runner: Runner,
        block_manager: KVBlockManager,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.block_manager = block_manager
        self.config = config
        self.tokenizer = tokenizer
        self.clock = clock
        self.max_model_len = config.max_model_len or self.room_for(0)
        self._release: Callable[[list[int]], None] = getattr(runner, "release", lambda sequence_ids: None)
        self._sequence_ids = itertools.count()
        self.scheduler = Scheduler(block_manager, config, self._sequence_ids, self._release)
        self.batch_invariant = config.batch_invariant
        """Logits are bit-identical whatever else is in the batch."""
        self.num_steps = 0
        self.num_computed_tokens = 0
        """Tokens that went through the model since the start, prompt tokens and recomputed ones included."""
        self.failed_steps, self.failure = 0, ""
        """Forward passes in a row that raised, and what the last one that did said."""
        self._recomputed_tokens = 0
        self._process = os.getpid()
        self._serials = itertools.count()
        self._inbox: deque[Request] = deque()  # submitted, or to be aborted, since the last step
        self._live: dict[str, Request] = {}  # until its end has been reported
        self._touched: dict[Request, None] = {}  # to be reported
        # Reentrant, both: the garbage collector may close a forgotten stream while this thread holds them.
        self._intake = threading.RLock()
        self._turn = threading.RLock()
        self._inside = 0  # the thread that has its turn
        self._cut_short = False  # the last turn never came to its end: only `_live` can be trusted

    # ---- requests, from any thread

    def add_request(
        self,
        request_id: str,
        prompt: str | Iterable[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; it is considered from the next step on.

        RequestTooLargeError (a ValueError) if it can never fit; ValueError for a live id, an empty prompt, token ids
        outside the vocabulary, or text without a tokenizer. Nothing has happened then.
        """
        self.submit(self.prepare(request_id, prompt, sampling_params, cache_salt=cache_salt))

    def abort(self, request_id: str) -> None:
        """End a request, whatever its state; the next step reports it with reason "abort". Unknown ids: no effect."""
        request = self._live.get(request_id)
        if request is not None:
            request.aborted = True
            self._inbox.append(request)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._live)

    def prepare(
        self,
        request_id: str,
        prompt: str | Iterable[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str | None = None,
        prompt_text: str | None = None,
        chat: ChatText | None = None,
    ) -> Request:
        """Check a request and build it without any effect on the engine (see `add_request`); `submit` queues it.

        prompt_text: what token ids were made from, to be shown in the output. chat: how the text of a chat differs.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process} and this is a fork of it, {os.getpid()}, without its "
                "compute threads: create the LLM in the process that uses it (multiprocessing: start method 'spawn')"
            )
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {sampling_params!r}")
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        check_salt(cache_salt)
        text, token_ids = tokenize(prompt, self.tokenizer, self.config.vocab_size)
        room = self.room_for(len(token_ids))
        params = fit(len(token_ids), sampling_params, room, self.config, self.block_manager)
        if chat is not None:
            params = params.with_ends(chat.end_token_ids)
        serial = next(self._serials)
        seed = params.seed if params.seed is not None else random.Random(f"{self.config.seed}/{serial}").getrandbits(64)
        return Request(
            request_id,
            prompt_text if text is None else text,
            token_ids,
            params,
            seed,
            itertools.islice(self._sequence_ids, params.n),
            (self.scheduler.virtual_arrival(params.priority, self.num_steps), serial),
            self.tokenizer,
            cache_salt,
            RequestMetrics(self.clock()),
            chat,
        )

    def submit(self, request: Request) -> None:
        """Queue a prepared request. ValueError if its id is alive."""
        with self._intake:
            if request.request_id in self._live:
                raise ValueError(f"request id {request.request_id!r} is alive: wait for its end, or choose another one")
            self._inbox.append(request)
            self._live[request.request_id] = request

    def room_for(self, prompt_len: int) -> int:
        """How many tokens a request may generate after a prompt of so many; 0 or less: none."""
        pool_len = longest_request(self.block_manager.num_physical_blocks, self.block_manager.block_size)
        return min(self.config.max_model_len or pool_len, pool_len) - prompt_len

    # ---- the step

    def step(self) -> list[RequestOutput]:
        """Compute one mixed batch; one cumulative output per request that got tokens or ended.

        An exception in the runner ends this step's requests with reason "error" and leaves the rest untouched. Any
        other one, and what is no `Exception` (Ctrl-C), passes through: whatever it left half done, the next call finds
        an empty pool, and all live requests start again from their tokens. A second thread waits for its turn.
        """
        return self._alone(self._step)

    def _alone(self, action: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Run what changes the engine's state: one thread at a time, and after a repair if the last time was cut off.

        (Entering and leaving a lock by `with` is the one thing that Ctrl-C cannot come between.)
        """
        with self._turn:
            if self._inside:
                raise RuntimeError(
                    "a callback of a running step, such as a token_mask, used the engine: callbacks must not generate"
                )
            try:
                self._inside = threading.get_ident()
                if self._cut_short:
                    self._repair()
                self._cut_short = True
                outputs = action()
                self._cut_short = False
            finally:
                self._inside = 0
        return outputs

    def _repair(self) -> None:
        """Nothing is known but which requests live and what their tokens are: start from there, with a new pool."""
        logger.info("a step was cut short: the KV pool is emptied, and what runs is computed again")
        self.block_manager.reset()
        self.scheduler.reset()
        for request in list(self._live.values()):
            self._release([sequence.sequence_id for sequence in request.sequences])
            try:
                restart(request)
            except Exception as error:
                self._fail(request, error, trace=True)
            self._touched[request] = None
            self._inbox.append(request)

    def _step(self) -> list[RequestOutput]:
        self._empty_inbox()
        plan = self.scheduler.schedule()
        if plan.rows:
            self._execute(plan)
        elif self.scheduler.waiting and not self.scheduler.running:
            self._fail_stuck()
        self.num_steps += 1
        if self.config.check_invariants:
            self.block_manager.check_invariants()
        return self._report()

    def _empty_inbox(self) -> None:
        while self._inbox:
            with self._intake:
                request = self._inbox.popleft()
            if self._live.get(request.request_id) is not request or request.finished:
                continue
            if request.aborted:
                self._end(request, "abort")
            for sequence in request.sequences:
                if sequence.status is Status.NEW and sequence.samples_with:
                    self.scheduler.add(sequence)

    def _report(self) -> list[RequestOutput]:
        """The outputs of all that were touched; those that are over are forgotten with it."""
        outputs = [request.output() for request in self._touched]
        for request in self._touched:
            if request.finished:
                self._live.pop(request.request_id, None)
        self._touched = {}
        return outputs

    def _execute(self, plan: StepPlan) -> None:
        scheduled = self.clock()
        for row in plan.rows:
            metrics = row.sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = scheduled
        try:
            result = self.runner.execute(plan)
            if len(result.rows) != len(plan.rows):
                raise RuntimeError(f"the runner returned {len(result.rows)} results for {len(plan.rows)} rows")
        except Exception as error:
            logger.exception("the forward pass of step %d failed", self.num_steps)
            self.failed_steps, self.failure = self.failed_steps + 1, f"{type(error).__name__}: {error}"
            for row in plan.rows:
                self._fail(row.sequence.request, error)
            return
        self.failed_steps = 0
        self.num_computed_tokens += plan.num_tokens
        now = self.clock()
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = row.sequence.request
            if request.finished:
                continue  # a sibling failed a moment ago
            try:
                self._apply(row, row_result, now)
            except Exception as error:
                self._fail(request, error, trace=True)

    def _apply(self, row: ScheduledSequence, result: RowResult, now: float) -> None:
        """What one row's result means: computed tokens become findable, drawn ones are appended, siblings forked."""
        sequence, request = row.sequence, row.sequence.request
        for sample in result.samples:
            if sample.error is not None:  # before the commit: what was computed in this step cannot be trusted
                self._fail(request, sample.error)
                return
        self._mark_computed(sequence, row.start, row.start + row.num_tokens)
        if row.prompt_logprobs:
            request.add_prompt_logprobs(result.prompt_logprobs)
        if not row.sample_for:
            return
        self._touched[request] = None
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        for parent, fork in request.advance(row, result):
            self.scheduler.fork(parent, fork)
        for sibling in row.sample_for:
            if sibling.finish_reason is not None:
                self.scheduler.remove(sibling)
        if request.finished:
            request.metrics.finished_time = now

    def _mark_computed(self, sequence: Sequence, start: int, computed: int) -> None:
        """The K/V of the first `computed` tokens is in memory: count what was computed twice, publish full blocks."""
        if start < sequence.computed_before:
            again = min(computed, sequence.computed_before) - start
            sequence.request.metrics.num_recomputed_tokens += again
            self._recomputed_tokens += again
        sequence.num_computed = computed
        manager, size = self.block_manager, self.block_manager.block_size
        if manager.enable_prefix_caching and computed // size > start // size:
            committed = manager.sequences[sequence.sequence_id].commit.committed
            manager.commit_tokens(sequence.sequence_id, sequence.token_ids[committed : computed - computed % size])

    def _fail(self, request: Request, error: str | Exception, *, trace: bool = False) -> None:
        """End a request with the reason "error" and say so in the log, once; `trace` adds the error's traceback."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if not request.finished:  # each of its n rows may fail
            shown = trace and isinstance(error, Exception) and error
            logger.error("request %r failed: %s", request.request_id, message, exc_info=shown)
        self._end(request, "error", message)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End every sequence that is not over yet, in whatever state it is, and give its blocks back."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish(reason, error)
            self.scheduler.remove(sequence)
        request.metrics.finished_time = self.clock()
        self._touched[request] = None

    def _fail_stuck(self) -> None:
        """Nothing runs, and the head still does not fit, which submission checked: somebody else holds blocks."""
        manager, sequence = self.block_manager, self.scheduler.waiting[0]
        self._fail(
            sequence.request,
            f"{sequence.blocks_wanted} blocks are needed, and only {manager.num_available_blocks} of "
            f"{manager.num_physical_blocks} are available although no request runs: "
            "something else holds blocks of this engine's manager",
        )

    # ---- ending requests at once

    def drop(self, request: Request) -> None:
        """End a submitted request now, without an output; nothing happens if it is over.

        In the middle of a step (from a callback, or when the garbage collector closes a forgotten stream) its plan
        stays as it is, and the request ends with the next step.
        """
        if self._live.get(request.request_id) is request:
            self.abort(request.request_id)  # first, so that it ends even if this call never does
            if self._inside != threading.get_ident():
                self._alone(lambda: self._drop(request))

    def _drop(self, request: Request) -> list[RequestOutput]:
        if not request.finished:
            self._end(request, "abort")
        self._touched.pop(request, None)
        self._live.pop(request.request_id, None)
        return []

    def drop_all(self, error: str | None = None) -> list[RequestOutput]:
        """End every live request, with the reason "error" if one is given, else "abort"; returns their last outputs."""
        return self._alone(lambda: self._drop_all(error))

    def _drop_all(self, error: str | None) -> list[RequestOutput]:
        for request in list(self._live.values()):
            if not request.finished:
                self._end(request, "abort" if error is None else "error", error)
        return self._report()

    # ---- numbers

    def stats(self) -> EngineStats:
        """A snapshot. Exact between steps; from another thread during a step, of a moment in it."""
        manager, scheduler = self.block_manager, self.scheduler
        queued = [request for request in list(self._live.values()) if request.sequences[0].status is Status.NEW]
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(queued),
            preemptions=scheduler.num_preemptions,
            recomputed_tokens=self._recomputed_tokens,
            blocks_total=manager.num_physical_blocks,
            blocks_free=manager.num_free_blocks,
            blocks_idle=manager.num_idle_blocks,
            blocks_in_use=manager.num_blocks_in_use,
            blocks_shared=manager.num_shared_blocks,
            blocks_saved=manager.num_saved_blocks,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            internal_fragmentation_tokens=manager.internal_fragmentation_tokens(),
            eviction_policy=manager.eviction_policy,
        )
