from __future__ import annotations

import pytest

from minipaged.kv import BlockEvent, KVBlockManager


def recorded(num_blocks: int = 8, **options: object) -> tuple[KVBlockManager, list[tuple[object, ...]]]:
    events: list[tuple[object, ...]] = []

    def record(event: BlockEvent) -> None:
        events.append((event.kind, event.block, event.sequence, event.logical_index, event.source))

    return KVBlockManager(num_blocks, 4, listener=record, **options), events  # type: ignore[arg-type]


def test_life_of_a_sequence() -> None:
    manager, events = recorded()
    manager.create_sequence(3)
    manager.append_tokens(3, 5)
    manager.append_token(3)
    manager.release_sequence(3)
    assert events == [
        ("allocate", 0, 3, 0, None),
        ("allocate", 1, 3, 1, None),
        ("free", 1, 3, 1, None),
        ("free", 0, 3, 0, None),
    ]


def test_blocks_of_a_caller_have_no_sequence() -> None:
    manager, events = recorded()
    manager.free_block(manager.allocate_block())
    assert events == [("allocate", 0, None, None, None), ("free", 0, None, None, None)]


def test_fork_and_copy_on_write() -> None:
    manager, events = recorded()
    manager.create_sequence(0)
    manager.append_tokens(0, 6)
    manager.fork_sequence(0, 1)
    del events[:2]
    manager.append_tokens(1, 3)
    assert events == [
        ("share", 0, 1, 0, None),
        ("share", 1, 1, 1, None),
        ("copy", 2, 1, 1, 1),
        ("allocate", 3, 1, 2, None),
    ]
    assert manager.take_block_copies() == [(1, 2)]
    events.clear()
    manager.release_sequence(0)
    assert events == [("free", 1, 0, 1, None)], "block 0 only loses a reference"


def test_commit_hit_and_eviction() -> None:
    manager, events = recorded(3, enable_prefix_caching=True)
    manager.create_sequence(0)
    manager.append_tokens(0, 9)
    manager.commit_tokens(0, range(9))
    manager.release_sequence(0)
    assert events[3:] == [("commit", 0, 0, 0, None), ("commit", 1, 0, 1, None), ("free", 2, 0, 2, None)]
    events.clear()
    manager.create_sequence_from_prefix(1, range(5))
    manager.append_tokens(1, 5)
    assert events == [
        ("share", 0, 1, 0, None),
        ("allocate", 2, 1, 1, None),
        ("evict", 1, None, None, None),
        ("allocate", 1, 1, 2, None),
    ]
    events.clear()
    manager.release_sequence(1)
    manager.reset_prefix_cache()
    assert events == [
        ("free", 1, 1, 2, None),
        ("free", 2, 1, 1, None),
        ("evict", 0, None, None, None),
        ("free", 0, None, None, None),
    ]


def test_a_duplicate_is_not_committed() -> None:
    manager, events = recorded(enable_prefix_caching=True)
    for seq_id in (0, 1):
        manager.create_sequence(seq_id)
        manager.append_tokens(seq_id, 4)
        manager.commit_tokens(seq_id, range(4))
    assert [event for event in events if event[0] == "commit"] == [("commit", 0, 0, 0, None)]


def test_a_source_is_reported_free_only_after_its_copies_ran() -> None:
    """A listener may overwrite a block on `free` at once: not while a pending copy still has to read it."""
    manager, events = recorded()
    manager.create_sequence(0)
    manager.append_tokens(0, 2)
    manager.fork_sequence(0, 1)
    manager.append_token(1)
    events.clear()
    manager.release_sequence(0)
    assert (events, manager.free_blocks[0]) == ([], 0)
    manager.check_invariants()
    assert manager.take_block_copies() == [(0, 1)]
    assert events == [], "the caller runs the copies after this call"
    assert manager.take_block_copies() == []
    assert events == [("free", 0, None, None, None)]
    manager.take_block_copies()
    assert len(events) == 1


def test_a_source_with_a_new_owner_is_not_reported_free() -> None:
    manager, events = recorded()
    manager.create_sequence(0)
    manager.append_tokens(0, 2)
    manager.fork_sequence(0, 1)
    manager.append_token(1)
    manager.release_sequence(0)
    manager.create_sequence(2)
    assert manager.append_token(2) == 0
    events.clear()
    assert manager.take_block_copies() == [(0, 1)]
    manager.take_block_copies()
    assert events == []
    manager.release_sequence(2)
    assert events == [("free", 0, 2, 0, None)]


def test_events_are_immutable_values() -> None:
    event = BlockEvent("free", 3)
    assert event == BlockEvent("free", 3, None, None, None)
    with pytest.raises(AttributeError):
        event.block = 4  # type: ignore[misc]
