"""A model, ready to use: `LLM` for programs that wait, `AsyncLLM` for those that serve, and how both are put together.

`options` holds their keywords, `loading` builds engine, pool and runner from them, `memory` sizes the pool. Every name
loads on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipaged._lazy import lazy_exports

if TYPE_CHECKING:
    from minipaged.llm.async_llm import AsyncLLM, EngineDeadError, OutputStream
    from minipaged.llm.llm import LLM
    from minipaged.llm.options import EngineOptions

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineDeadError": "async_llm",
    "EngineOptions": "options",
    "OutputStream": "async_llm",
}

__all__ = ["LLM", "AsyncLLM", "EngineDeadError", "EngineOptions", "OutputStream"]

__getattr__, __dir__ = lazy_exports(__name__, {name: f"{__name__}.{module}" for name, module in _HOME.items()})
