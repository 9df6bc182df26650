"""Which cached block goes first when the free queue is empty.

The manager decides what *may* go: idle blocks (cached, owned by nobody) whose cache entry has no cached child. A
policy only puts these candidates in order. Two are built in, "lru" and "lfu"; anything with the five methods of
`EvictionPolicy` can be passed to `KVBlockManager(eviction_policy=...)`. A third, which keeps popular prefixes but
forgets old fame (each hit is worth as much as having been released 1000 releases later):

    >>> from minipaged.kv import KVBlockManager, RankedPolicy
    >>> class Credit(RankedPolicy):
    ...     def __init__(self, credit=1000):
    ...         super().__init__()
    ...         self.credit, self.hits = credit, {}
    ...
    ...     def insert(self, block):
    ...         self.hits[block] = 0
    ...
    ...     def hit(self, block):
    ...         self.hits[block] += 1
    ...
    ...     def rank(self, block, released):
    ...         return released + self.credit * self.hits[block]
    >>> manager = KVBlockManager(8, 4, enable_prefix_caching=True, eviction_policy=Credit())
"""

from __future__ import annotations

import gc
from heapq import heapify, heappop, heappush
from typing import Any, Protocol
from weakref import WeakValueDictionary


class EvictionPolicy(Protocol):
    """An order of eviction candidates. Called by one manager, for its blocks only."""

    def insert(self, block: int) -> None:
        """`block` got a new cache entry: forget what was known of it. It is in use, no candidate yet."""

    def hit(self, block: int) -> None:
        """A new sequence found the cached `block` through its prefix. It is in use now."""

    def add(self, block: int, released: int) -> None:
        """`block` became a candidate. `released` counts releases of cached blocks: larger = let go more recently. It
        may lie in the past, when a block becomes a candidate because its last cached child was evicted.
        """

    def remove(self, block: int) -> None:
        """The candidate `block` is none any more: it was found by a prefix, or got a cached child."""

    def evict(self) -> int:
        """Choose a candidate, stop counting it as one and return it. Called only when there is at least one."""


class RankedPolicy:
    """Evicts the candidate with the lowest `rank`, fixed when it becomes a candidate. Subclasses define `rank`.

    A heap with lazy deletion: adding the most recently released block is O(1) for LRU, taking one is O(log candidates).
    """

    def __init__(self) -> None:
        self._ranks: dict[int, Any] = {}
        self._heap: list[tuple[Any, int]] = []

    def rank(self, block: int, released: int) -> Any:
        """Sort key of a candidate, the lowest goes first. Keys must be comparable with each other."""
        raise NotImplementedError(f"{type(self).__name__} must define rank(block, released)")

    def insert(self, block: int) -> None:
        """`block` got a new cache entry. Ignored here; a subclass may start to count."""

    def hit(self, block: int) -> None:
        """`block` was found through its prefix. Ignored here."""

    def add(self, block: int, released: int) -> None:
        """`block` became a candidate: fix its rank. O(log candidates)."""
        rank = self.rank(block, released)
        self._ranks[block] = rank
        heappush(self._heap, (rank, block))
        if len(self._heap) > 2 * len(self._ranks) + 64:  # mostly removed ones: bounds memory at amortised O(1)
            self._heap = [(rank, block) for block, rank in self._ranks.items()]
            heapify(self._heap)

    def remove(self, block: int) -> None:
        """`block` is no candidate any more. O(1); the heap forgets it later."""
        del self._ranks[block]

    def evict(self) -> int:
        """Take the candidate of the lowest rank; among equals, of the lowest id."""
        while True:
            rank, block = heappop(self._heap)
            if block in self._ranks and self._ranks[block] == rank:
                del self._ranks[block]
                return block


class LeastRecentlyUsed(RankedPolicy):
    """Least recently released first. A sequence is released tail first, so the deepest block of a chain goes first."""

    def rank(self, block: int, released: int) -> int:
        return released


class LeastFrequentlyUsed(RankedPolicy):
    """Fewest prefix hits since the block was cached first; ties as in LRU."""

    def __init__(self) -> None:
        super().__init__()
        self._hits: dict[int, int] = {}

    def insert(self, block: int) -> None:
        """Count from zero: the hits of its former content are forgotten."""
        self._hits[block] = 0

    def hit(self, block: int) -> None:
        """Count one."""
        self._hits[block] += 1

    def rank(self, block: int, released: int) -> tuple[int, int]:
        return self._hits[block], released


_BUILT_IN: dict[str, type[RankedPolicy]] = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A fresh built-in policy by name, or the object itself. ValueError for an unknown name, TypeError for what is no
    policy.
    """
    if isinstance(policy, str):
        if policy not in _BUILT_IN:
            raise ValueError(f"eviction_policy {policy!r} is unknown; choose one of {sorted(_BUILT_IN)}")
        return _BUILT_IN[policy]()
    missing = [
        name for name in ("insert", "hit", "add", "remove", "evict") if not callable(getattr(policy, name, None))
    ]
    if missing or isinstance(policy, type):
        what = "a class, pass an instance" if isinstance(policy, type) else f"without {', '.join(missing)}()"
        raise TypeError(f"eviction_policy must be a name or an EvictionPolicy, got {policy!r} ({what})")
    return policy


_MANAGER_OF: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""By the policy's id, which is its own while a living manager holds it; a policy need be neither hashable nor weakly
referable."""


def claim(policy: EvictionPolicy, manager: object) -> EvictionPolicy:
    """`policy` serves `manager` from now on; returns it. ValueError if another one that is still alive has it."""
    if id(policy) in _MANAGER_OF:
        gc.collect()  # an engine that nobody has any more may still hold it
    if id(policy) in _MANAGER_OF:
        raise ValueError(
            f"eviction_policy {policy!r} belongs to another KVBlockManager: a policy knows the blocks of one pool, "
            "give each its own object"
        )
    _MANAGER_OF[id(policy)] = manager
    return policy
