"""minipaged: a small, fast inference engine for Qwen3 models around a paged KV cache.

Every public name loads on first access, so `import minipaged` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipaged._lazy import lazy_exports

if TYPE_CHECKING:
    from minipaged.engine.async_llm import AsyncLLM
    from minipaged.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from minipaged.engine.sampling_params import SamplingParams
    from minipaged.kv import KVBlockManager, PagedKVCache, SequenceState
    from minipaged.llm import LLM

__version__ = "0.1.0"

_HOME = {
    "LLM": "minipaged.llm",
    "AsyncLLM": "minipaged.engine.async_llm",
    "SamplingParams": "minipaged.engine.sampling_params",
    "RequestOutput": "minipaged.engine.outputs",
    "CompletionOutput": "minipaged.engine.outputs",
    "RequestMetrics": "minipaged.engine.outputs",
    "Logprob": "minipaged.engine.outputs",
    "KVBlockManager": "minipaged.kv",
    "SequenceState": "minipaged.kv",
    "PagedKVCache": "minipaged.kv",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "KVBlockManager",
    "Logprob",
    "PagedKVCache",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SequenceState",
    "__version__",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOME)
