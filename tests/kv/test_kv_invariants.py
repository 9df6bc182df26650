"""Each rule of `check_invariants` notices its own corruption, and says block and rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minipaged.kv import InvariantError, KVBlockManager, SequenceState
from minipaged.kv.prefix_index import Entry


def busy_manager() -> KVBlockManager:
    """Every kind of block, block size 4.

    0 shared and cached, 1 shared and partial, 2 destination of a copy from 1, 3 and 4 idle, 5 held, 6 and 7 free.
    Sequences: 0 = [0, 1], 1 = [0, 2], 2 = [0, 1] with 6, 7, 6 tokens.
    """
    manager = KVBlockManager(8, 4, enable_prefix_caching=True, free_order=[0, 1, 3, 4, 2, 5, 6, 7])
    manager.create_sequence(0)
    manager.append_tokens(0, 6)
    manager.commit_tokens(0, range(6))
    manager.create_sequence(9)
    manager.append_tokens(9, 8)
    manager.commit_tokens(9, range(50, 58))
    manager.release_sequence(9)
    manager.fork_sequence(0, 1)
    manager.fork_sequence(0, 2)
    manager.append_token(1)
    assert manager.allocate_block() == 5
    manager.check_invariants()
    return manager


def entry(manager: KVBlockManager, block: int) -> Entry:
    found = manager._pool.entry_of[block]
    assert found is not None
    return found


def set_length(m: KVBlockManager, length: int) -> None:
    m.sequences[0].sequence_length = length


def move_to_free(m: KVBlockManager, block: int) -> None:
    del m._pool.idle[block]
    m._pool.queue.append(block)


def cache_partial_block(m: KVBlockManager) -> None:
    m._pool.cache(entry(m, 0), None, b"rubbish", 1)


def cache_at_the_wrong_depth(m: KVBlockManager) -> None:
    m._pool._forget(entry(m, 0))
    m._pool.cache(entry(m, 4), None, b"rubbish", 0)


def orphan(m: KVBlockManager) -> None:
    entry(m, 3).children.clear()


def copy_chain(m: KVBlockManager) -> None:
    m._pool.copies.source_of[1] = 5
    m._pool.copies.sources[5] = 1


CORRUPTIONS: dict[str, tuple[Callable[[KVBlockManager], object], str]] = {
    "state under another id": (
        lambda m: setattr(m.sequences[0], "sequence_id", 4),
        "sequence 0 is filed under another id",
    ),
    "length without a block": (
        lambda m: set_length(m, 9),
        r"sequence 0 has 9 tokens and 2 blocks \[0, 1\].* = 3 blocks",
    ),
    "block without tokens": (lambda m: set_length(m, 4), "sequence 0 has 4 tokens and 2 blocks"),
    "negative length": (lambda m: set_length(m, -1), "sequence 0 has -1 tokens"),
    "block outside the pool": (
        lambda m: m.sequences[0].block_table.__setitem__(1, 8),
        "block 8 in the table of sequence 0",
    ),
    "negative block": (lambda m: m.sequences[0].block_table.__setitem__(1, -1), "block -1 in the table of sequence 0"),
    "block twice in a table": (
        lambda m: m.sequences[0].block_table.__setitem__(1, 0),
        "block 0 occurs 2 times in the table",
    ),
    "free block in a table": (
        lambda m: m.sequences[0].block_table.__setitem__(1, 6),
        "block 1 has ref_count 2, but 1 own",
    ),
    "foreign table": (
        lambda m: m.sequences.update({5: SequenceState(5, 2, [2])}),
        "block 2 has ref_count 1, but 2 own",
    ),
    "count too high": (lambda m: m._pool.ref_count.__setitem__(2, 2), "block 2 has ref_count 2, but 1 owners"),
    "reference total": (lambda m: setattr(m._pool, "references", 3), "3 references are counted, 7 exist"),
    "shared total": (lambda m: setattr(m._pool, "shared", 3), "3 shared blocks are counted, 2 exist"),
    "free twice": (lambda m: m._pool.queue.append(7), "block 7 is 2 times in the free queue"),
    "free and in use": (lambda m: m._pool.queue.append(0), "block 0 is free and in use; rule: exactly one"),
    "free and idle": (lambda m: m._pool.queue.append(3), "block 3 is free and idle; rule: exactly one"),
    "lost": (lambda m: m._pool.queue.remove(7), "block 7 is in no state"),
    "free and cached": (lambda m: move_to_free(m, 3), "block 3 is free and has a cache entry"),
    "idle and not cached": (lambda m: m._pool.entry_of.__setitem__(4, None), "block 4 is idle and has no cache entry"),
    "free outside the pool": (lambda m: m._pool.queue.append(8), "block 8 is free or idle and outside the pool of 8"),
    "sharers disagree": (
        lambda m: set_length(m, 7),
        "block 1 is logical block 1 with 6 tokens|block 1 .* rule: sharers agree",
    ),
    "held and in a table": (
        lambda m: (m._pool.held.add(0), m._pool.held.remove(5)),
        "block 5 has ref_count 1, but 0|block 0 has ref",
    ),
    "partial and cached": (cache_partial_block, "block 1 is cached with 2 of 4 tokens; rule: only full blocks"),
    "token total": (lambda m: setattr(m, "_num_tokens", 3), "3 tokens are counted in blocks in use, 9 exist"),
    "entry of another block": (lambda m: setattr(entry(m, 4), "block", 7), "block 4 has the cache entry of block 7"),
    "entry not in the index": (
        lambda m: m._pool.index._entries.pop(entry(m, 0).key),
        "block 0 has a cache entry that the",
    ),
    "entry without its parent": (orphan, "block 4 is cached below an entry that is gone"),
    "stale entry": (
        lambda m: m._pool.index.insert(None, None, b"x", 6),
        "the index has 4 entries, 3 blocks are cached",
    ),
    "cached at another depth": (cache_at_the_wrong_depth, "block 0 is logical block 0 .* but cached as number 2"),
    "candidate with a child": (
        lambda m: m._pool.candidates.add(3),
        "block 3 is a candidate for eviction and has a cached",
    ),
    "leaf that is no candidate": (lambda m: m._pool.candidates.clear(), "block 4 is idle, no candidate; rule"),
    "candidate in use": (lambda m: m._pool.candidates.add(0), "block 0 is a candidate, not idle; rule"),
    "committed beyond": (
        lambda m: setattr(m.sequences[0].commit, "committed", 7),
        "sequence 0 has 7 committed tokens of 6",
    ),
    "pending tokens": (lambda m: m.sequences[0].commit.pending.append(3), "sequence 0 remembers 3 tokens .* rule: 2"),
    "copy to a free block": (
        lambda m: m._pool.copies.add(1, 6),
        "block 6 is the destination of a pending copy and not in use",
    ),
    "copy chain": (copy_chain, "block 1 is destination and source"),
    "copy sources": (lambda m: m._pool.copies.sources.clear(), "pending copies {2: 1} do not match their sources"),
    "unreported in use": (
        lambda m: m._pool.unreported.update({0: None}),
        "block 0 waits to be reported free and is not free",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_named(name: str) -> None:
    manager = busy_manager()
    corrupt, message = CORRUPTIONS[name]
    corrupt(manager)
    with pytest.raises(InvariantError, match=message):
        manager.check_invariants()
    assert not manager.invariants_ok()


def test_held_block_in_a_table() -> None:
    manager = busy_manager()
    manager._pool.held.add(2)
    manager._pool.ref_count[2] += 1
    manager._pool.references += 1
    manager._pool.shared += 1
    with pytest.raises(InvariantError, match="block 2 is held by a caller and in the table of sequence 1"):
        manager.check_invariants()


def test_a_sound_manager_passes_at_every_moment() -> None:
    manager = busy_manager()
    for operation in (
        manager.take_block_copies,
        lambda: manager.release_sequence(0),
        manager.reset_prefix_cache,
        lambda: manager.append_tokens(2, 10),
        lambda: manager.free_block(5),
        lambda: manager.release_sequence(1),
    ):
        operation()
        manager.check_invariants()
        assert manager.invariants_ok()
