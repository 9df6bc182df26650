"""The engine: requests in, one mixed batch per step, cumulative outputs back.

`engine` holds the loop, `scheduler` who runs next, `plan` the seam to the runner that computes. Every name loads on
first access; none of the names here needs torch, except `AsyncLLM` once it loads a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipaged._lazy import lazy_exports

if TYPE_CHECKING:
    from minipaged.engine.config import EngineConfig, EngineStats
    from minipaged.engine.engine import Engine
    from minipaged.engine.plan import RowResult, Runner, SampledToken, ScheduledSequence, StepPlan, StepResult
    from minipaged.engine.request import Request, Sequence
    from minipaged.errors import RequestTooLargeError
    from minipaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from minipaged.sampling_params import SamplingParams

_HOME = {
    "AsyncLLM": "minipaged.llm.async_llm",
    "CompletionOutput": "minipaged.outputs",
    "Engine": "minipaged.engine.engine",
    "EngineConfig": "minipaged.engine.config",
    "EngineDeadError": "minipaged.llm.async_llm",
    "EngineStats": "minipaged.engine.config",
    "Logprob": "minipaged.outputs",
    "OutputStream": "minipaged.llm.async_llm",
    "Request": "minipaged.engine.request",
    "RequestMetrics": "minipaged.outputs",
    "RequestOutput": "minipaged.outputs",
    "RequestTooLargeError": "minipaged.errors",
    "RowResult": "minipaged.engine.plan",
    "Runner": "minipaged.engine.plan",
    "SampledToken": "minipaged.engine.plan",
    "SamplingParams": "minipaged.sampling_params",
    "ScheduledSequence": "minipaged.engine.plan",
    "Sequence": "minipaged.engine.request",
    "StepPlan": "minipaged.engine.plan",
    "StepResult": "minipaged.engine.plan",
}

__all__ = [
    "AsyncLLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "Logprob",
    "OutputStream",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLargeError",
    "RowResult",
    "Runner",
    "SampledToken",
    "SamplingParams",
    "ScheduledSequence",
    "Sequence",
    "StepPlan",
    "StepResult",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOME)
