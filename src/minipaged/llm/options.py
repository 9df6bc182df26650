"""`EngineOptions`: what `LLM` and `AsyncLLM` are asked for, checked before anything is loaded."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minipaged.arguments import as_int, check_keywords
from minipaged.engine.config import EngineConfig, SchedulingPolicy

if TYPE_CHECKING:
    import torch

    from minipaged.kv import EvictionPolicy
    from minipaged.model.source import ModelSource
    from minipaged.text.tokenizer import Tokenizer

C = TypeVar("C", bound=type)
_SIZES = {  # name -> whether it may be None
    "block_size": False,
    "max_num_seqs": False,
    "max_num_batched_tokens": True,
    "num_blocks": True,
    "kv_cache_memory": True,
    "max_model_len": True,
    "threads": True,
}
_LARGEST_SIZE = 1 << 62


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The keywords of `LLM` and `AsyncLLM`; see `LLM` for what they mean.

    ValueError on creation names the option that cannot be right whatever the model; integers of any kind (numpy's)
    become ints.
    """

    model: str | Path | ModelSource | None = None
    tokenizer: str | Path | Tokenizer | None = None
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    backend: str | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    eviction_policy: str | EvictionPolicy = "lru"
    scheduling_policy: SchedulingPolicy = "fcfs"
    seed: int = 0
    threads: int | None = None
    check_invariants: bool = False
    kv_journal: str | Path | None = None

    def __post_init__(self) -> None:
        for name, optional in _SIZES.items():
            self._check_size(name, optional)
        seed = as_int(self.seed)
        if seed is None:
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        object.__setattr__(self, "seed", seed)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}")
        for name in ("model", "tokenizer", "kv_journal"):
            value = getattr(self, name)
            if isinstance(value, str | Path) and not str(value).strip("\0"):
                raise ValueError(f"{name} must be a name or left out, got {value!r}")
            if isinstance(value, bytes | int | float):
                raise ValueError(f"{name} must be a string or left out, got {value!r}")
        for name in ("enable_prefix_caching", "check_invariants"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        EngineConfig(scheduling_policy=self.scheduling_policy)

    @classmethod
    def from_keywords(cls, caller: str, keywords: dict[str, Any]) -> EngineOptions:
        """The options of a call of `caller`; a keyword that is none of them is a TypeError, as in any call."""
        known = [field.name for field in fields(cls)]
        check_keywords(caller, keywords, known, "help(minipaged.LLM)")
        return cls(**keywords)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Of whatever takes these options: the model first, in any way, all others by keyword."""
        kinds = {"model": inspect.Parameter.POSITIONAL_OR_KEYWORD}
        return inspect.Signature(
            [
                inspect.Parameter(
                    field.name,
                    kinds.get(field.name, inspect.Parameter.KEYWORD_ONLY),
                    default=field.default,
                    annotation=field.type,
                )
                for field in fields(cls)
            ]
        )

    def _check_size(self, name: str, optional: bool) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        size = as_int(value)
        if size is None or size < 1:
            raise ValueError(
                f"{name} must be an integer of at least 1{' or left out' if optional else ''}, got {value!r}"
            )
        if size > _LARGEST_SIZE:
            raise ValueError(f"{name} = {value} is more than any memory holds: lower it")
        object.__setattr__(self, name, size)  # frozen: only while being created


def takes_options(cls: C) -> C:
    """A class whose `__init__` takes these options as `model` and keywords: `help` and editors see each of them."""
    cls.__signature__ = EngineOptions.signature()  # type: ignore[attr-defined]
    return cls
