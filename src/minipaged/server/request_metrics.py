"""Histograms over whole requests: what they asked for, how large they were, where their time went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram

if TYPE_CHECKING:
    from minipaged.engine import RequestOutput, SamplingParams

N_BUCKETS = (1, 2, 5, 10, 20)
LATENCY_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)


def length_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `longest`."""
    steps = [mantissa * 10**exponent for exponent in range(len(str(longest))) for mantissa in (1, 2, 5)]
    return tuple(step for step in steps if step <= longest)


class RequestMetrics:
    """Each is observed once per request: parameters when it is queued, the rest when it has ended by itself."""

    def __init__(self, registry: CollectorRegistry, prefix: str, longest: int) -> None:
        """longest: most tokens that a request can have."""
        lengths = length_buckets(longest)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(prefix + name, text, buckets=buckets, registry=registry)

        self.params_n = histogram("request_params_n", "The parameter n.", N_BUCKETS)
        self.params_max_tokens = histogram("request_params_max_tokens", "The limit of new tokens.", lengths)
        self.prompt = histogram("request_prompt_tokens", "Tokens of the prompt.", lengths)
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Tokens of the prompt that were not found in the cache.", lengths
        )
        self.generated = histogram("request_generation_tokens", "Generated tokens, of all n texts.", lengths)
        self.longest = histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest of the n texts.", lengths
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS)
        self.inference = histogram("request_inference_time_seconds", "First step to end.", LATENCY_BUCKETS)
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.", LATENCY_BUCKETS)
        self.decode = histogram("request_decode_time_seconds", "First token to end.", LATENCY_BUCKETS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first one.", ITL_BUCKETS
        )

    def queued(self, params: SamplingParams) -> None:
        """A request has been taken. params: resolved."""
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

    def ended(self, output: RequestOutput) -> None:
        """A request has come to its end, with its last token or at its limit."""
        tokens = [len(child.token_ids) for child in output.outputs]
        self.prompt.observe(len(output.prompt_token_ids))
        self.computed.observe(len(output.prompt_token_ids) - (output.num_cached_tokens or 0))
        self.generated.observe(sum(tokens))
        self.longest.observe(max(tokens))
        times = output.metrics
        assert times is not None
        if times.finished_time is None or times.first_token_time is None or times.first_scheduled_time is None:
            return
        self.e2e.observe(times.finished_time - times.arrival_time)
        self.inference.observe(times.finished_time - times.first_scheduled_time)
        self.prefill.observe(times.first_token_time - times.first_scheduled_time)
        decode_time = times.finished_time - times.first_token_time
        self.decode.observe(decode_time)
        if max(tokens) > 1:
            self.per_token.observe(decode_time / (max(tokens) - 1))
