"""Runs a workload through the engine, step by step, and keeps a timestamp per step and per token."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minipaged.bench.limits import Limits, StepWork
from minipaged.bench.workloads import BenchRequest

if TYPE_CHECKING:
    from minipaged.engine.engine import Engine
    from minipaged.engine.plan import Runner, StepPlan, StepResult

WARM_UP = (128, 8)  # prompt and output tokens, at most, of the request that runs before anything is measured
_serials = itertools.count()


@dataclass(slots=True)
class Step:
    """One `Engine.step`: seconds of the whole, seconds of the forward pass and sampling in it, what was computed."""

    seconds: float
    runner_seconds: float
    work: StepWork
    prefill: bool  # some sequence computed a part of its prompt


@dataclass(slots=True)
class Run:
    """One pass over a workload. token_times: for each request, when each of its tokens was handed out, in seconds
    after the requests were added.
    """

    seconds: float
    prompt_tokens: int
    token_times: list[list[float]]
    steps: list[Step]
    preemptions: int
    cached_tokens: int

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(map(len, self.token_times))

    @property
    def output_tok_s(self) -> float:
        """Generated tokens of all requests per second of the whole run."""
        return self.output_tokens / self.seconds

    @property
    def ttft_s(self) -> float:
        """Time to first token, median over the requests: seconds."""
        return statistics.median(times[0] for times in self.token_times)

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second until the last request has its first token."""
        return self.prompt_tokens / max(times[0] for times in self.token_times)

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second and request after its first token, median over the requests with at least two."""
        rates = [(len(t) - 1) / (t[-1] - t[0]) for t in self.token_times if len(t) > 1]
        return statistics.median(rates) if rates else 0.0

    @property
    def decode_steps(self) -> list[Step]:
        """Steps in which every sequence computed one generated token."""
        return [step for step in self.steps if not step.prefill]

    def bytes_per_step(self, limits: Limits) -> float:
        """Bytes that a decode step had to read, mean over them."""
        steps = self.decode_steps
        return sum(limits.step_bytes(s.work) for s in steps) / len(steps) if steps else 0.0

    def share_of_bandwidth(self, limits: Limits, bandwidth: float) -> float:
        """Of the decode steps: bytes they had to read * steps per second / bandwidth (see `limits`)."""
        seconds = sum(s.seconds for s in self.decode_steps)
        return self.bytes_per_step(limits) * len(self.decode_steps) / seconds / bandwidth if seconds else 0.0

    def share_of_limit(self, limits: Limits, bandwidth: float, peak: float) -> float:
        """Of the whole run: the sum of what each step takes at least, by memory or by arithmetic, over the time it
        took.
        """
        return sum(limits.step_seconds(s.work, bandwidth, peak) for s in self.steps) / self.seconds

    def share_of_peak(self, limits: Limits, peak: float) -> float:
        """Of the steps with prefill: operations per second over those of matrix products in the cache."""
        steps = [step for step in self.steps if step.prefill]
        return sum(limits.step_flops(s.work) for s in steps) / sum(s.seconds for s in steps) / peak

    @property
    def share_outside_runner(self) -> float:
        """Of the whole run: time in scheduler, bookkeeping and outputs."""
        return 1 - sum(s.runner_seconds for s in self.steps) / self.seconds


@dataclass(slots=True)
class StepRecorder:
    """Stands before a runner and notes what each step computes and for how long. `last` is None before the first."""

    runner: Runner
    clock: Callable[[], float] = time.perf_counter
    last: tuple[StepWork, bool, float] | None = field(default=None, init=False)

    def execute(self, plan: StepPlan) -> StepResult:
        """Pass on, and set `last`: (work, prefill, seconds)."""
        start = self.clock()
        result = self.runner.execute(plan)
        seconds = self.clock() - start
        work = StepWork.of(
            ((row.start, row.num_tokens) for row in plan.rows), sum(bool(r.sample_for) for r in plan.rows)
        )
        prefill = any(row.start < row.sequence.num_prompt_tokens for row in plan.rows)
        self.last = work, prefill, seconds
        return result

    def release(self, sequence_ids: Sequence[int]) -> None:
        """Pass on."""
        self.runner.release(sequence_ids)


def run_requests(
    engine: Engine,
    requests: Sequence[BenchRequest],
    *,
    on_step: Callable[[Step], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Add all requests at once and step until they are done. RuntimeError if one does not get all its tokens.

    on_step: called after every step. Greedy, end-of-sequence ignored, no text. The prefix cache is emptied before:
    every run starts from the same state.
    """
    from minipaged.sampling_params import SamplingParams

    engine.block_manager.reset_prefix_cache()
    recorder = StepRecorder(engine.runner, clock)
    stats = engine.stats()
    ids = [f"bench-{next(_serials)}" for _ in requests]
    times: dict[str, list[float]] = {request_id: [] for request_id in ids}
    steps: list[Step] = []
    engine.runner = recorder
    try:
        begin = now = clock()
        for request_id, request in zip(ids, requests, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                repetition_penalty=1.0,
            )
            engine.add_request(request_id, request.prompt, params)
        while engine.has_unfinished():
            outputs = engine.step()
            before, now = now, clock()
            for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason not in (None, "length"):
                    raise RuntimeError(
                        f"request {output.request_id} ended by {completion.finish_reason!r}: {completion.error}"
                    )
                seen = times[output.request_id]
                seen += [now - begin] * (len(completion.token_ids) - len(seen))
            if recorder.last is not None:
                work, prefill, seconds = recorder.last
                steps.append(Step(now - before, seconds, work, prefill))
                if on_step is not None:
                    on_step(steps[-1])
    except BaseException:
        _drop(engine, ids)
        raise
    finally:
        engine.runner = recorder.runner
    for request_id, request in zip(ids, requests, strict=True):
        if len(times[request_id]) != request.output_tokens:
            raise RuntimeError(f"{request_id} got {len(times[request_id])} of {request.output_tokens} tokens")
    after = engine.stats()
    return Run(
        seconds=now - begin,
        prompt_tokens=sum(len(request.prompt) for request in requests),
        token_times=list(times.values()),
        steps=steps,
        preemptions=after.preemptions - stats.preemptions,
        cached_tokens=after.prefix_hit_tokens - stats.prefix_hit_tokens,
    )


def warm_up(engine: Engine, requests: Sequence[BenchRequest]) -> None:
    """Run the beginning of the first request, so that buffers exist and code is loaded."""
    prompt, output = WARM_UP
    first = requests[0]
    run_requests(engine, [BenchRequest(first.prompt[:prompt], min(output, first.output_tokens))])


def _drop(engine: Engine, ids: Iterable[str]) -> None:
    for request_id in ids:
        engine.abort(request_id)
    engine.step()
