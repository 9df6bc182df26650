"""Load on any OpenAI-compatible server: requests at given times, and what their clients see."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipaged.bench.load_client import LoadClient, Sample
from minipaged.bench.traffic import Planned

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LoadOptions:
    """model: None = the first that the server names. concurrency: most requests in flight, None = no limit; one that
    has to wait for its turn is sent late, and its time starts when it is sent.

    chat: /v1/chat/completions with text prompts. ignore_eos: ask for exactly the planned number of tokens (an extension
    of vLLM's that others ignore). seconds: send nothing after so long. ttft_slo, tpot_slo: seconds; a request within
    both counts as good.
    """

    model: str | None = None
    concurrency: int | None = None
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    seconds: float | None = None
    ttft_slo: float | None = None
    tpot_slo: float | None = None


async def run_load(
    client: LoadClient,
    planned: Sequence[Planned],
    options: LoadOptions,
    on_done: Callable[[Sample], None] = lambda sample: None,
) -> dict[str, Any]:
    """Send every request at its time, wait for all, and report. OSError if the server is not there at all."""
    model = options.model or str((await client.get("/v1/models"))["data"][0]["id"])
    seats = asyncio.Semaphore(options.concurrency or len(planned))
    start = time.perf_counter()

    async def one(request: Planned) -> Sample | None:
        await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
        async with seats:
            if options.seconds is not None and time.perf_counter() - start > options.seconds:
                return None
            path = "/v1/chat/completions" if options.chat else "/v1/completions"
            sample = await client.complete(path, _body(request, model, options))
            on_done(sample)
            return sample

    samples = [s for s in await asyncio.gather(*(one(request) for request in planned)) if s is not None]
    duration = max([s.ended for s in samples], default=start) - start
    return {"model": model, "planned": len(planned), **summarise(samples, duration, options)}


def _body(request: Planned, model: str, options: LoadOptions) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": request.prompt}
    if options.chat:
        prompt = {"messages": [{"role": "user", "content": request.prompt}]}
    return {
        "model": model,
        **prompt,
        "max_tokens": request.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignore_eos else {}),
    }


def summarise(samples: Sequence[Sample], duration: float, options: LoadOptions) -> dict[str, Any]:
    """Rates over the whole duration; milliseconds at p50, p90, p99 over the requests that ended well. output_tokens /
    token_events is 1 where inter-token latency is what it says.
    """
    good = [sample for sample in samples if sample.error is None]
    output_tokens = sum(sample.output_tokens for sample in good)
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    within = [s for s in good if _within(s.ttft, options.ttft_slo) and _within(s.tpot, options.tpot_slo)]
    per_second = 1 / duration if duration > 0 else 0.0
    has_slo = options.ttft_slo is not None or options.tpot_slo is not None
    return {
        "requests": len(samples),
        "completed": len(good),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None).most_common(5)),
        "duration_s": duration,
        "requests_per_s": len(good) * per_second,
        "output_tok_s": output_tokens * per_second,
        "total_tok_s": (output_tokens + prompt_tokens) * per_second,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "token_events": sum(len(sample.times) for sample in good),
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "ttft_ms": percentiles([sample.ttft for sample in good]),
        "tpot_ms": percentiles([sample.tpot for sample in good if sample.tpot is not None]),
        "itl_ms": percentiles([gap for sample in good for gap in sample.gaps]),
        "e2e_ms": percentiles([sample.e2e for sample in good]),
        "slo": {
            "ttft_ms": None if options.ttft_slo is None else options.ttft_slo * 1e3,
            "tpot_ms": None if options.tpot_slo is None else options.tpot_slo * 1e3,
        },
        "goodput_per_s": len(within) * per_second if has_slo else None,
        "good_share": len(within) / len(samples) if has_slo and samples else None,
    }


def _within(seconds: float | None, limit: float | None) -> bool:
    return limit is None or seconds is None or seconds <= limit


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and the largest in milliseconds; None without values."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    found = {"mean": float(values.mean())}
    found |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    found["max"] = float(values.max())
    assert all(math.isfinite(value) for value in found.values())
    return found
