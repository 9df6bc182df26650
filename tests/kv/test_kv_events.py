from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

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


# ---- listeners that read the manager, and listeners that raise


def busy(listener: Callable[[BlockEvent], None]) -> KVBlockManager:
    """Six blocks of 4: a cached and idle [0, 1], sequences 0 and 1 that share [2, 3], block 3 half full; a held one."""
    manager = KVBlockManager(6, 4, enable_prefix_caching=True, listener=listener)
    manager.create_sequence(9)
    manager.append_tokens(9, 8)
    manager.commit_tokens(9, range(8))
    manager.release_sequence(9)
    manager.create_sequence(0)
    manager.append_tokens(0, 6)
    manager.fork_sequence(0, 1)
    manager.allocate_block()
    return manager


OPERATIONS: dict[str, Callable[[KVBlockManager], object]] = {
    "append_token": lambda m: m.append_token(0),
    "append_tokens": lambda m: m.append_tokens(0, 10),
    "slot_mapping_for_append": lambda m: m.slot_mapping_for_append([0, 1]),
    "fork_sequence": lambda m: m.fork_sequence(0, 2),
    "release_sequence": lambda m: [m.release_sequence(0), m.release_sequence(1)],
    "allocate_block": lambda m: m.allocate_block(),
    "free_block": lambda m: m.free_block(4),
    "commit_tokens": lambda m: m.commit_tokens(0, [5, 6, 7, 8, 9]),
    "create_sequence_from_prefix": lambda m: m.create_sequence_from_prefix(2, range(9)),
    "reset_prefix_cache": lambda m: m.reset_prefix_cache(),
}


def picture(manager: KVBlockManager) -> object:
    return (
        manager.sequences,
        manager.free_blocks,
        manager.num_idle_blocks,
        [manager.ref_count(block) for block in range(manager.num_physical_blocks)],
        [manager.match_prefix(tokens) for tokens in (range(9), [5, 6, 7, 8, 9])],
        manager.take_block_copies(),
        manager.internal_fragmentation_tokens(),
    )


class Raising:
    """A listener that follows events from `armed` on, and raises at each of them."""

    def __init__(self) -> None:
        self.armed = False
        self.heard: list[BlockEvent] = []

    def __call__(self, event: BlockEvent) -> None:
        if self.armed:
            self.heard.append(event)
            raise RuntimeError(f"failure {len(self.heard)}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_listener_hears_of_what_is_complete(name: str) -> None:
    """Whatever it reads, it reads the state after the operation."""
    pictures: list[object] = []
    armed = False

    def read(event: BlockEvent) -> None:
        if armed:
            manager.check_invariants()
            pictures.append((deepcopy(manager.sequences), manager.free_blocks, manager.num_idle_blocks))

    manager = busy(read)
    armed = True
    if name == "release_sequence":
        manager.release_sequence(0)
        pictures.clear()
        manager.release_sequence(1)
    else:
        OPERATIONS[name](manager)
    assert pictures
    assert all(seen == (manager.sequences, manager.free_blocks, manager.num_idle_blocks) for seen in pictures)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_listener_that_raises_changes_nothing_about_the_change(name: str) -> None:
    """It gets every event, its first exception comes out, and the manager is as with a listener that is quiet."""
    quiet: list[BlockEvent] = []
    expected = busy(quiet.append)
    quiet.clear()
    raising = Raising()
    manager = busy(raising)
    raising.armed = True
    if name == "release_sequence":  # only the second release has an event: the blocks are shared
        for one in (expected, manager):
            one.release_sequence(0)
        expected.release_sequence(1)
        with pytest.raises(RuntimeError, match="failure 1"):
            manager.release_sequence(1)
    else:
        OPERATIONS[name](expected)
        with pytest.raises(RuntimeError, match="failure 1"):
            OPERATIONS[name](manager)
    raising.armed = False
    assert raising.heard == quiet
    assert quiet
    manager.check_invariants()
    assert picture(manager) == picture(expected)


def test_copies_are_not_lost_when_a_listener_raises() -> None:
    raising = Raising()
    manager = KVBlockManager(8, 4, listener=raising)
    for sequence in (5, 0, 10):  # blocks 0, 1 and 2
        manager.create_sequence(sequence)
        manager.append_tokens(sequence, 2)
    manager.fork_sequence(0, 1)
    manager.append_token(1)
    manager.release_sequence(0)
    assert manager.take_block_copies() == [(1, 3)]
    manager.release_sequence(5)
    manager.fork_sequence(10, 11)
    manager.append_token(11)  # into block 0; block 1 is still to be reported free, now that its copy has run
    raising.armed = True
    with pytest.raises(RuntimeError, match="failure 1"):
        manager.take_block_copies()
    assert raising.heard == [BlockEvent("free", 1)]
    manager.check_invariants()
    assert manager.take_block_copies() == [(2, 0)]
