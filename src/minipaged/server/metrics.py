"""Prometheus metrics. Names are vLLM's with the prefix `minipaged:`; some are this engine's own.

Gauges and the scheduler's counters are read from `Engine.stats` when somebody asks; the others are counted in the
engine's thread as each step's outputs come (`AsyncLLM.step_listeners`), so that no slow reader distorts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minipaged.server.request_metrics import ITL_BUCKETS, LATENCY_BUCKETS, RequestMetrics

if TYPE_CHECKING:
    from minipaged.engine import RequestOutput
    from minipaged.llm import AsyncLLM

PREFIX = "minipaged:"
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
SOURCES = ("local_compute", "local_cache_hit")
TOKENS_BUCKETS = tuple(1 << power for power in range(15))


@dataclass(slots=True)
class _Progress:
    tokens: int
    time: float


class Metrics:
    """One registry per server; nothing of it is the process's."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._engine = llm.engine
        self.registry = CollectorRegistry()
        self.registry.register(_EngineNumbers(llm))
        ProcessCollector(registry=self.registry)
        self.requests = RequestMetrics(self.registry, PREFIX, llm.engine.room_for(0))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.by_source = Counter(
            PREFIX + "prompt_tokens_by_source",
            "Prompt tokens by where they came from.",
            ["source"],
            registry=self.registry,
        )
        for source in SOURCES:
            self.by_source.labels(source)
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.success = Counter(
            PREFIX + "request_success", "Requests that ended.", ["finished_reason"], registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(reason)
        self.rejected = self._counter("requests_rejected", "Requests refused with 429 because the queue was full.")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token, queue included.", TTFT_BUCKETS
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", ITL_BUCKETS)
        self.tpot = self._histogram("time_per_output_token_seconds", "The former name of the same.", ITL_BUCKETS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to the first step that computes the request.", LATENCY_BUCKETS
        )
        self.iteration = self._histogram(
            "iteration_tokens_total", "Tokens that went through the model in one step.", TOKENS_BUCKETS
        )
        self._computed = llm.engine.num_computed_tokens
        self._progress: dict[str, _Progress] = {}
        llm.step_listeners.append(self.on_step)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def on_step(self, outputs: list[RequestOutput]) -> None:
        """Count one step; in the engine's thread."""
        computed, self._computed = self._engine.num_computed_tokens - self._computed, self._engine.num_computed_tokens
        if computed:
            self.iteration.observe(computed)
        now = self._engine.clock()
        for output in outputs:
            self._count(output, now)

    def _count(self, output: RequestOutput, now: float) -> None:
        times = output.metrics
        assert times is not None
        tokens = sum([len(child.token_ids) for child in output.outputs])
        before = self._progress.get(output.request_id)
        if before is None:
            before = self._progress[output.request_id] = _Progress(0, now)
            if times.first_scheduled_time is not None:
                self.queue_time.observe(times.first_scheduled_time - times.arrival_time)
            if tokens and times.first_token_time is not None:
                self._count_prompt(len(output.prompt_token_ids), output.num_cached_tokens or 0)
                self.ttft.observe(times.first_token_time - times.arrival_time)
        elif tokens > before.tokens:
            self.itl.observe(now - before.time)
            self.tpot.observe(now - before.time)
        if tokens > before.tokens:
            self.generation_tokens.inc(tokens - before.tokens)
            before.tokens, before.time = tokens, now
        if output.finished:
            del self._progress[output.request_id]
            reasons = {child.finish_reason for child in output.outputs}
            reason = next(r for r in ("error", "abort", "length", "stop") if r in reasons)
            self.success.labels(reason).inc()
            if reason in ("stop", "length"):
                self.requests.ended(output)

    def _count_prompt(self, tokens: int, cached: int) -> None:
        self.prompt_tokens.inc(tokens)
        self.cached_tokens.inc(cached)
        for source, number in zip(SOURCES, (tokens - cached, cached), strict=True):
            self.by_source.labels(source).inc(number)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)


class _EngineNumbers(Collector):
    """`Engine.stats` at the moment of the question."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats, engine = self._llm.stats(), self._llm.engine
        gauges = {
            "num_requests_running": ("Sequences that hold blocks.", stats.running),
            "num_requests_waiting": ("Requests that wait for their first step, or again.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", stats.blocks_in_use / stats.blocks_total),
            "kv_internal_fragmentation_tokens": (
                "Slots of blocks in use that hold no token.",
                stats.internal_fragmentation_tokens,
            ),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_query_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
            "num_preemptions": ("Sequences that lost their blocks to an older one.", stats.preemptions),
            "recomputed_tokens": ("Tokens computed again after a preemption.", stats.recomputed_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value)
        reasons = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_reason", "Requests that wait, by what for.", labels=["reason"]
        )
        reasons.add_metric(["capacity"], stats.waiting)  # nothing else ever defers one
        yield reasons
        manager = engine.block_manager
        cache = {
            "block_size": str(manager.block_size),
            "num_gpu_blocks": str(stats.blocks_total),  # vLLM's name, wherever the blocks are
            "enable_prefix_caching": str(manager.enable_prefix_caching),
        }
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The cache, in labels; always 1.", labels=list(cache))
        info.add_metric(list(cache.values()), 1)
        yield info
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "KV blocks by state.", labels=["state"])
        states = {
            "free": stats.blocks_free,
            "idle": stats.blocks_idle,
            "private": stats.blocks_in_use - stats.blocks_shared,
            "shared": stats.blocks_shared,
        }
        for state, count in states.items():
            blocks.add_metric([state], count)
        yield blocks
