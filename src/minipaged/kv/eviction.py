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
import logging
from heapq import heapify, heappop, heappush
from reprlib import repr as short_repr
from traceback import format_exception_only
from typing import Any, Protocol
from weakref import WeakValueDictionary

from minipaged.arguments import as_int

logger = logging.getLogger(__name__)


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


class GuardedPolicy:
    """A user's policy for as long as it works. At its first error, which is logged, LRU takes over for good.

    An error is an exception, or an answer of `evict` that is none of the candidates. The pool never notices: a policy
    only orders what may go, so any other order is right as well.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._released: dict[int, int] = {}  # candidate -> what `add` said of it: all that LRU needs to take over
        self.description = type(policy).__name__

    def insert(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._ask("insert", block)

    def hit(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._ask("hit", block)

    def add(self, block: int, released: int) -> None:
        """See `EvictionPolicy`."""
        self._released[block] = released
        self._ask("add", block, released)

    def remove(self, block: int) -> None:
        """See `EvictionPolicy`."""
        del self._released[block]
        self._ask("remove", block)

    def forget_candidates(self) -> None:
        """`remove` all of them."""
        for block in list(self._released):
            self.remove(block)

    def evict(self) -> int:
        """See `EvictionPolicy`."""
        answer = self._ask("evict")
        block = as_int(answer)
        if block not in self._released:
            self._take_over(
                f"evict() returned {short_repr(answer)}, which is not one of the {len(self._released)} candidates"
            )
            block = self._policy.evict()
        del self._released[block]
        return block

    def _ask(self, method: str, *arguments: int) -> Any:
        try:
            return getattr(self._policy, method)(*arguments)
        except Exception as error:
            self._take_over(f"{method}() raised {format_exception_only(error)[-1].strip()}", error)
            return self._policy.evict() if method == "evict" else None

    def _take_over(self, what: str, error: Exception | None = None) -> None:
        name = type(self._policy).__name__
        logger.error("eviction_policy %s failed, lru serves from now on: %s", name, what, exc_info=error)
        self.description = f"lru ({name} failed: {what})"
        self._policy = LeastRecentlyUsed()
        for block, released in self._released.items():
            self._policy.add(block, released)


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A fresh built-in policy by name, or the object itself behind a `GuardedPolicy`.

    ValueError for an unknown name, TypeError for what is no policy.
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
    return GuardedPolicy(policy)


def renewed(policy: EvictionPolicy) -> EvictionPolicy:
    """The policy without any candidate."""
    if not isinstance(policy, GuardedPolicy):
        return type(policy)()
    policy.forget_candidates()
    return policy


def describe(policy: EvictionPolicy) -> str:
    """The name of the policy that serves, and of one that failed before it."""
    if isinstance(policy, GuardedPolicy):
        return policy.description
    return next(name for name, kind in _BUILT_IN.items() if type(policy) is kind)


_MANAGER_OF: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""By the policy's id, which is its own while a living manager holds it; a policy need be neither hashable nor weakly
referable."""


def claim(policy: str | EvictionPolicy, manager: object) -> None:
    """A policy object serves `manager` from now on. ValueError if another one that is still alive has it."""
    if isinstance(policy, str):
        return
    if id(policy) in _MANAGER_OF:
        gc.collect()  # an engine that nobody has any more may still hold it
    if id(policy) in _MANAGER_OF:
        raise ValueError(
            f"eviction_policy {policy!r} belongs to another KVBlockManager: a policy knows the blocks of one pool, "
            "give each its own object"
        )
    _MANAGER_OF[id(policy)] = manager
