from __future__ import annotations

import doctest
import random
from typing import Any

import pytest
from kv_model import Harness, random_operation

from minipaged.kv import KVBlockManager, RankedPolicy, eviction


def evicted_order(manager: KVBlockManager, count: int) -> list[int]:
    """The order in which `count` idle blocks go (the free queue must be empty)."""
    return [manager.allocate_block() for _ in range(count)]


def cache(manager: KVBlockManager, seq_id: int, tokens: list[int]) -> list[int]:
    """Compute `tokens` through the prefix cache; the sequence stays alive. Its table."""
    state = manager.create_sequence_from_prefix(seq_id, tokens)
    rest = tokens[state.sequence_length :]
    manager.append_tokens(seq_id, len(rest))
    manager.commit_tokens(seq_id, rest)
    return list(state.block_table)


def test_free_blocks_go_before_cached_ones() -> None:
    manager = KVBlockManager(4, 1, enable_prefix_caching=True)
    cache(manager, 0, [1, 2])
    manager.release_sequence(0)
    assert evicted_order(manager, 4) == [2, 3, 1, 0]


def test_lru_takes_the_least_recently_released_chain_first_and_its_end_first() -> None:
    manager = KVBlockManager(6, 1, enable_prefix_caching=True)
    x = cache(manager, 0, [1, 2, 3])
    y = cache(manager, 1, [4, 5, 6])
    manager.release_sequence(1)
    manager.release_sequence(0)
    assert evicted_order(manager, 6) == [*reversed(y), *reversed(x)]
    manager.check_invariants()


def test_lru_ranks_a_shared_prefix_by_its_last_release() -> None:
    """The tail of X was released before Y, its head (shared) after Y: the head outlives Y."""
    manager = KVBlockManager(5, 1, enable_prefix_caching=True)
    x = cache(manager, 0, [1, 2, 3])
    manager.create_sequence_from_prefix(9, [1, 2, 3])
    y = cache(manager, 1, [4, 5])
    for seq_id in (0, 1, 9):
        manager.release_sequence(seq_id)
    assert evicted_order(manager, 5) == [x[2], y[1], y[0], x[1], x[0]]


def test_a_hit_renews_a_block() -> None:
    manager = KVBlockManager(4, 1, enable_prefix_caching=True)
    x, y = cache(manager, 0, [1, 2]), cache(manager, 1, [3, 4])
    for seq_id in (0, 1):
        manager.release_sequence(seq_id)
    manager.create_sequence_from_prefix(2, [1, 2, 0])
    manager.release_sequence(2)
    assert evicted_order(manager, 4) == [y[1], y[0], x[1], x[0]]


def test_lfu_keeps_what_was_hit_most_often() -> None:
    manager = KVBlockManager(4, 1, enable_prefix_caching=True, eviction_policy="lfu")
    x, y = cache(manager, 0, [1, 2]), cache(manager, 1, [3, 4])
    manager.release_sequence(0)
    for seq_id in (2, 3):
        manager.create_sequence_from_prefix(seq_id, [1, 2, 0])
        manager.release_sequence(seq_id)
    manager.release_sequence(1)  # most recently released, never hit
    assert evicted_order(manager, 4) == [y[1], y[0], x[1], x[0]]


def test_lfu_forgets_the_fame_of_a_former_content() -> None:
    manager = KVBlockManager(2, 1, enable_prefix_caching=True, eviction_policy="lfu")
    cache(manager, 0, [1])
    manager.release_sequence(0)
    for _ in range(5):
        manager.create_sequence_from_prefix(1, [1, 0])
        manager.release_sequence(1)
    held = evicted_order(manager, 2)
    for block in held:
        manager.free_block(block)
    blocks = cache(manager, 2, [7]) + cache(manager, 3, [8])
    manager.release_sequence(2)
    manager.release_sequence(3)
    assert evicted_order(manager, 2) == blocks


def test_only_idle_blocks_without_a_cached_child_are_candidates() -> None:
    seen: list[tuple[str, int]] = []

    class Recorder(RankedPolicy):
        def rank(self, block: int, released: int) -> int:
            return -released  # most recently released first

        def add(self, block: int, released: int) -> None:
            seen.append(("add", block))
            super().add(block, released)

        def remove(self, block: int) -> None:
            seen.append(("remove", block))
            super().remove(block)

    manager = KVBlockManager(4, 1, enable_prefix_caching=True, eviction_policy=Recorder())
    cache(manager, 0, [1, 2, 3])
    manager.release_sequence(0)
    assert seen == [("add", 2)]
    assert manager.allocate_block() == 3
    assert manager.allocate_block() == 2
    assert seen == [("add", 2), ("add", 1)]
    manager.create_sequence_from_prefix(1, [1, 2, 0])
    assert seen[2:] == [("remove", 1)]


@pytest.mark.parametrize("answer", [0, 7, -1, None, "0", [1], 1.0, True])
def test_a_policy_that_names_a_non_candidate_is_replaced(answer: Any) -> None:
    class Wrong(RankedPolicy):
        def rank(self, block: int, released: int) -> int:
            return released

        def evict(self) -> int:
            return answer  # type: ignore[no-any-return]

    manager = KVBlockManager(2, 1, enable_prefix_caching=True, eviction_policy=Wrong())
    cache(manager, 0, [1, 2])
    manager.release_sequence(0)
    assert manager.allocate_block() == 1  # the deepest of the chain, as LRU takes it
    assert f"evict() returned {answer!r}, which is not one of the 1 candidates" in manager.eviction_policy
    assert manager.num_idle_blocks == 1
    manager.check_invariants()


@pytest.mark.parametrize("fails_after", range(28))
def test_whenever_a_policy_fails_the_order_from_then_on_is_lrus(fails_after: int) -> None:
    """Random fillings of the pool under a policy that orders as LRU does until it fails, and under LRU itself."""

    class Failing(RankedPolicy):
        calls = 0

        def rank(self, block: int, released: int) -> int:
            return released

        def __getattribute__(self, name: str) -> Any:
            if name in ("insert", "hit", "add", "remove", "evict"):
                self.calls += 1
                if self.calls > 5 + fails_after:  # the manager looks at each of the five once
                    raise LookupError(name)
            return super().__getattribute__(name)

    failing = Failing()
    managers = []
    for policy in ("lru", failing):
        manager = KVBlockManager(8, 1, enable_prefix_caching=True, eviction_policy=policy)
        rng = random.Random(fails_after)
        taken = []
        for sequence in range(12):
            tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 4))]
            cache(manager, sequence, tokens)
            taken.append(manager.sequences[sequence].block_table)
            manager.release_sequence(sequence)
            manager.check_invariants()
        managers.append((taken, manager.num_idle_blocks))
    assert managers[0] == managers[1]
    assert failing.calls > 5 + fails_after


@pytest.mark.parametrize("policy", [object(), RankedPolicy, 3, None])
def test_what_is_no_policy_is_refused(policy) -> None:
    with pytest.raises(TypeError, match="eviction_policy must be a name or an EvictionPolicy"):
        KVBlockManager(2, 1, eviction_policy=policy)


def test_the_documented_third_policy() -> None:
    example = doctest.DocTestFinder().find(eviction, "eviction", globs={})[0]
    code = [line for ex in example.examples for line in ex.source.splitlines() if line.strip()]
    assert len(code) <= 20
    assert doctest.DocTestRunner().run(example).failed == 0
    names: dict[str, object] = {}
    exec("\n".join(ex.source for ex in example.examples), names)
    credit = names["Credit"]
    manager = KVBlockManager(4, 1, enable_prefix_caching=True, eviction_policy=credit(credit=1000))  # type: ignore[operator]
    x, y = cache(manager, 0, [1, 2]), cache(manager, 1, [3, 4])
    manager.release_sequence(0)
    manager.create_sequence_from_prefix(2, [1, 2, 0])
    manager.release_sequence(2)
    manager.release_sequence(1)
    assert evicted_order(manager, 4) == [y[1], y[0], x[1], x[0]]


def test_the_heap_of_a_policy_stays_as_small_as_its_candidates() -> None:
    manager = KVBlockManager(4, 1, enable_prefix_caching=True)
    cache(manager, 0, [1])
    manager.release_sequence(0)
    for _ in range(1000):
        manager.create_sequence_from_prefix(1, [1, 2])
        manager.release_sequence(1)
    assert len(manager._pool.policy._heap) <= 70  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_order_equals_a_full_sort_under_pressure(policy: str) -> None:
    """The harness compares every victim with the best-ranked idle leaf of a naive list."""
    rng = random.Random(7)
    harness = Harness(6, 1, policy)
    for _ in range(4000):
        random_operation(harness, rng, max_sequences=3)
        harness.check()
    assert harness.evictions > 100
    assert harness.hits > 50


def test_a_policy_object_belongs_to_one_manager() -> None:
    class Mine(RankedPolicy):
        __slots__ = ("_heap", "_ranks")

        def rank(self, block: int, released: int) -> int:
            return released

    policy = Mine()
    first = KVBlockManager(2, 1, eviction_policy=policy)
    with pytest.raises(ValueError, match="belongs to another KVBlockManager"):
        KVBlockManager(2, 1, eviction_policy=policy)
    first.myself = first  # type: ignore[attr-defined]  # a cycle, as in an engine
    del first
    KVBlockManager(2, 1, eviction_policy=policy)
