"""minipaged: a small, fast inference engine for Qwen3 models around a paged KV cache.

Every public name loads on first access, so `import minipaged` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipaged._lazy import lazy_exports

if TYPE_CHECKING:
    from minipaged.kv import KVBlockManager, PagedKVCache, SequenceState
    from minipaged.llm.async_llm import AsyncLLM
    from minipaged.llm.llm import LLM
    from minipaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from minipaged.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "minipaged.llm.llm",
    "AsyncLLM": "minipaged.llm.async_llm",
    "SamplingParams": "minipaged.sampling_params",
    "RequestOutput": "minipaged.outputs",
    "CompletionOutput": "minipaged.outputs",
    "RequestMetrics": "minipaged.outputs",
    "Logprob": "minipaged.outputs",
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
