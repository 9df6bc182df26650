"""The metadata plane: which physical block holds which tokens of which sequence. Needs no torch until tensors are
asked for.

`PagedKVCache`, the memory that these blocks describe, loads torch and therefore only on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipaged._lazy import lazy_exports
from minipaged.errors import InvariantError, OutOfBlocksError, UnknownSequenceError
from minipaged.kv import address
from minipaged.kv.block_manager import KVBlockManager, SequenceState
from minipaged.kv.events import BlockEvent, FanOut
from minipaged.kv.eviction import EvictionPolicy, LeastFrequentlyUsed, LeastRecentlyUsed, RankedPolicy
from minipaged.kv.prefix_index import PrefixKeys

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache

__all__ = [
    "BlockEvent",
    "EvictionPolicy",
    "FanOut",
    "InvariantError",
    "KVBlockManager",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "OutOfBlocksError",
    "PagedKVCache",
    "PrefixKeys",
    "RankedPolicy",
    "SequenceState",
    "UnknownSequenceError",
    "address",
]

__getattr__, __dir__ = lazy_exports(__name__, {"PagedKVCache": "minipaged.kv.paged_cache"})
