from __future__ import annotations

import pytest

from minipaged.kv import KVBlockManager, OutOfBlocksError


def forked(num_blocks: int, length: int, children: int, block_size: int = 4) -> KVBlockManager:
    manager = KVBlockManager(num_blocks, block_size)
    manager.create_sequence(0)
    manager.append_tokens(0, length)
    for child in range(1, children + 1):
        manager.fork_sequence(0, child)
    return manager


def is_simultaneous(pairs: list[tuple[int, int]]) -> bool:
    destinations = [destination for _, destination in pairs]
    return len(set(destinations)) == len(destinations) and not {source for source, _ in pairs} & set(destinations)


def test_a_full_last_block_is_shared_without_a_copy() -> None:
    manager = forked(8, 8, 2)
    assert [manager.append_token(seq_id) // 4 for seq_id in range(3)] == [2, 3, 4]
    assert manager.take_block_copies() == []
    assert manager.ref_count(0) == manager.ref_count(1) == 3
    assert (manager.num_shared_blocks, manager.num_saved_blocks) == (2, 4)


def test_blocks_needed_counts_the_copy_and_what_follows() -> None:
    manager = forked(8, 6, 1)
    assert manager.blocks_needed(0, 0) == 0
    assert manager.blocks_needed(0, 2) == 1
    assert manager.blocks_needed(0, 3) == 2
    manager.append_tokens(0, 3)
    assert manager.blocks_needed(1, 2) == 0, "the last owner writes in place"
    assert manager.blocks_needed(1, 3) == 1


def test_chain_of_forks_in_one_step_copies_from_the_one_source_in_memory() -> None:
    manager = forked(8, 5, 1)
    manager.append_token(1)  # copies block 1
    manager.fork_sequence(1, 2)
    manager.append_token(2)  # copies the copy
    manager.fork_sequence(2, 3)
    manager.append_token(3)
    pairs = manager.take_block_copies()
    assert pairs == [(1, 2), (1, 3), (1, 4)]
    assert is_simultaneous(pairs)
    manager.check_invariants()


def test_after_a_drain_a_former_destination_is_a_source() -> None:
    manager = forked(8, 6, 1)
    manager.append_token(1)
    assert manager.take_block_copies() == [(1, 2)]
    manager.fork_sequence(1, 2)
    manager.append_token(2)
    assert manager.take_block_copies() == [(2, 3)]


def test_release_drops_the_pairs_of_the_released_only() -> None:
    manager = forked(8, 6, 2)
    manager.append_token(1)
    manager.append_token(2)
    manager.release_sequence(1)
    assert manager.take_block_copies() == [(1, 3)]
    manager.check_invariants()


def test_a_pair_stays_while_a_fork_of_the_released_needs_it() -> None:
    manager = forked(8, 6, 1)
    manager.append_token(1)
    manager.fork_sequence(1, 2)
    manager.release_sequence(1)
    assert manager.take_block_copies() == [(1, 2)]
    manager.release_sequence(2)
    manager.check_invariants()


def test_a_destination_freed_and_taken_again_occurs_once() -> None:
    manager = forked(3, 6, 2)
    manager.append_token(1)
    manager.release_sequence(1)
    manager.append_token(2)
    assert manager.take_block_copies() == [(1, 2)]


def test_a_released_source_is_no_destination_until_its_copies_ran() -> None:
    """Blocks 0 (A's and B's) and 3 (C's and D's) are shared and partial. B copies 0, A goes: 0 is free, a source."""
    manager = KVBlockManager(4, 4, free_order=[0, 3, 1, 2])
    for first, second in ((0, 1), (2, 3)):
        manager.create_sequence(first)
        manager.append_tokens(first, 2)
        manager.fork_sequence(first, second)
    manager.append_token(1)
    manager.release_sequence(0)
    assert manager.free_blocks == (0, 2)
    manager.append_token(3)
    pairs = manager.take_block_copies()
    assert pairs == [(0, 1), (3, 2)]
    assert is_simultaneous(pairs)
    assert manager.free_blocks == (0,)


def test_blocks_needed_says_so_when_only_sources_are_left() -> None:
    manager = KVBlockManager(3, 4)
    for first, second in ((0, 1), (2, 3)):
        manager.create_sequence(first)
        manager.append_tokens(first, 2)
        manager.fork_sequence(first, second)
    manager.append_token(1)
    manager.release_sequence(0)
    assert manager.free_blocks == (0,)
    assert manager.blocks_needed(3, 1) > manager.num_available_blocks
    with pytest.raises(OutOfBlocksError):
        manager.append_token(3)
    with pytest.raises(OutOfBlocksError):
        manager.slot_mapping_for_append([2, 3])
    assert manager.blocks_needed(1, 3) == 1, "a new block may be the source of a copy: writes come after copies"
    assert manager.take_block_copies() == [(0, 2)]
    assert manager.blocks_needed(3, 1) == 1
    manager.append_token(3)
    assert manager.take_block_copies() == [(1, 0)]
    manager.check_invariants()


def test_a_batch_of_sharers_is_all_or_nothing() -> None:
    manager = forked(4, 6, 2)  # 2 free blocks: enough for 2 copies
    assert len(manager.slot_mapping_for_append([1, 0, 2])) == 3
    manager = forked(3, 6, 2)
    before = (manager.free_blocks, [list(s.block_table) for s in manager.sequences.values()])
    with pytest.raises(OutOfBlocksError, match="one token to each of 3 sequences needs 2 blocks, but 1 are free"):
        manager.slot_mapping_for_append([1, 0, 2])
    assert before == (manager.free_blocks, [list(s.block_table) for s in manager.sequences.values()])
    assert [s.sequence_length for s in manager.sequences.values()] == [6, 6, 6]
    assert len(manager.slot_mapping_for_append([1])) == 1
    manager.check_invariants()


def test_append_tokens_is_all_or_nothing_with_a_copy() -> None:
    manager = forked(3, 6, 1)
    with pytest.raises(OutOfBlocksError, match="appending 3 tokens to sequence 1 needs 2 blocks, but 1 are free and 0"):
        manager.append_tokens(1, 3)
    assert manager.take_block_copies() == []
    assert manager.sequences[1].block_table == [0, 1]
    assert manager.append_tokens(1, 2) == [10, 11]
    assert manager.take_block_copies() == [(1, 2)]


def test_shared_slots_count_once_as_fragmentation() -> None:
    manager = forked(8, 6, 2)
    assert manager.internal_fragmentation_tokens() == 2
    manager.append_token(1)
    assert manager.internal_fragmentation_tokens() == 2 + 1
    block = manager.allocate_block()
    assert manager.internal_fragmentation_tokens() == 2 + 1 + 4
    manager.free_block(block)
    for seq_id in range(3):
        manager.release_sequence(seq_id)
    assert manager.internal_fragmentation_tokens() == 0
