"""`reset`: a pool as on its first day, whatever was going on, and whatever was cut off in the middle of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from minipaged.kv import BlockEvent, KVBlockManager, RankedPolicy


class Own(RankedPolicy):
    """A policy of a user's, in the order of LRU: also what serves if it was interrupted and fails afterwards."""

    def rank(self, block: int, released: int) -> int:
        return released


def manager_of(policy: str) -> tuple[KVBlockManager, list[BlockEvent]]:
    events: list[BlockEvent] = []
    chosen = Own() if policy == "own" else policy
    manager = KVBlockManager(
        7,
        2,
        enable_prefix_caching=True,
        free_order=[6, 0, 5, 1, 4, 2, 3],
        eviction_policy=chosen,
        listener=events.append,
    )
    return manager, events


def work(manager: KVBlockManager) -> list[object]:
    """Every kind of change: forks, copies that are never taken, hits, commits, evictions, a block of the caller's."""
    seen: list[object] = []
    for number in range(6):
        tokens = [number % 2, 1, 2, number // 2, number]
        cached = manager.create_sequence_from_prefix(number, tokens).sequence_length
        seen += [cached, manager.append_tokens(number, len(tokens) - cached)]
        manager.commit_tokens(number, tokens[cached:])
        manager.fork_sequence(number, 10 + number)
        seen += [manager.append_token(10 + number), manager.take_block_copies() if number % 2 else None]
        manager.release_sequence(number)
        if number == 2:
            seen.append(manager.allocate_block())
        if number != 5:
            manager.release_sequence(10 + number)
    return seen


def interrupted(work: Callable[[], Any], at: int) -> bool:
    """Run it with a KeyboardInterrupt at the `at`th call or return of a Python function; False if it has fewer."""
    left = at

    def hook(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        if event in ("call", "return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(hook)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("policy", ["lru", "lfu", "own"])
def test_after_an_interruption_anywhere_a_reset_pool_is_a_new_pool(policy: str) -> None:
    fresh, expected_events = manager_of(policy)
    expected = work(fresh)
    kinds = {event.kind for event in expected_events}
    assert kinds == {"allocate", "share", "copy", "commit", "evict", "free"}
    at = 0
    while True:
        at += 1
        manager, events = manager_of(policy)
        if not interrupted(lambda manager=manager: work(manager), at):  # type: ignore[misc]
            break
        events.clear()
        manager.reset()
        assert events == [BlockEvent("free", block) for block in (6, 0, 5, 1, 4, 2, 3)]
        manager.check_invariants()
        assert manager.sequences == {}
        assert manager.free_blocks == (6, 0, 5, 1, 4, 2, 3)
        events.clear()
        assert work(manager) == expected, at
        assert events == expected_events, at
        manager.check_invariants()
    assert at > 300


def test_keys_of_before_are_refused() -> None:
    manager, _ = manager_of("lru")
    keys = manager.prefix_keys([1, 2, 3])
    manager.reset()
    with pytest.raises(ValueError, match="of before a reset"):
        manager.match_prefix(keys)
