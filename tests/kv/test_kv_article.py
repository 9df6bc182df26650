"""The article's worked examples, each with its numbers."""

from __future__ import annotations

import pytest

from minipaged.kv import InvariantError, KVBlockManager, SequenceState, address


def two_sequences() -> KVBlockManager:
    """A = [5, 2] and B = [1, 7, 9], block_size 4."""
    manager = KVBlockManager(10, 4, free_order=[5, 2, 1, 7, 9, 0, 3, 4, 6, 8])
    manager.create_sequence(0)
    manager.append_tokens(0, 7)
    manager.create_sequence(1)
    manager.append_tokens(1, 10)
    assert manager.sequences[0].block_table == [5, 2]
    assert manager.sequences[1].block_table == [1, 7, 9]
    return manager


def test_token_6_of_table_5_2_9_1_is_slot_10() -> None:
    manager = KVBlockManager(10, 4, free_order=[5, 2, 9, 1, 0, 3, 4, 6, 7, 8])
    manager.create_sequence(0)
    slots = manager.append_tokens(0, 13)
    assert manager.sequences[0] == SequenceState(0, 13, [5, 2, 9, 1])
    assert address.logical_block(6, 4) == 1
    assert address.block_offset(6, 4) == 2
    assert address.slot(2, 2, 4) == 10
    assert manager.slot_of(0, 6) == slots[6] == 10


def test_token_8_takes_block_9_and_gets_slot_36() -> None:
    manager = KVBlockManager(10, 4, free_order=[5, 2, 9, 0, 1, 3, 4, 6, 7, 8])
    manager.create_sequence(0)
    manager.append_tokens(0, 8)
    assert manager.sequences[0].block_table == [5, 2]
    assert manager.append_token(0) == 36
    assert manager.sequences[0].block_table == [5, 2, 9]


def test_blocks_and_waste_of_lengths() -> None:
    assert address.num_logical_blocks(7, 4) == 2
    assert address.last_block_waste(10, 4) == 2
    assert address.last_block_waste(8, 4) == 0
    manager = KVBlockManager(4, 4)
    manager.create_sequence(0)
    manager.append_tokens(0, 8)
    assert manager.internal_fragmentation_tokens() == 0
    manager.append_tokens(0, 2)
    assert manager.internal_fragmentation_tokens() == 2


def test_a_released_block_is_reused_at_once_while_the_others_stay() -> None:
    manager = two_sequences()
    manager.release_sequence(0)
    manager.create_sequence(2)
    slot = manager.append_token(2)
    assert slot // 4 in (5, 2)
    assert manager.sequences[1].block_table == [1, 7, 9]
    manager.check_invariants()


def test_the_block_just_released_is_the_next_one() -> None:
    manager = KVBlockManager(4, 4)
    blocks = [manager.allocate_block() for _ in range(3)]
    manager.free_block(blocks[0])
    manager.free_block(blocks[2])
    assert manager.free_blocks == (2, 0, 3)
    assert manager.allocate_block() == blocks[2]


def test_a_third_table_with_block_2_is_only_legal_as_sharing() -> None:
    manager = two_sequences()
    manager.sequences[2] = SequenceState(2, 3, [2])
    with pytest.raises(InvariantError, match="block 2"):
        manager.check_invariants()
    assert not manager.invariants_ok()
    del manager.sequences[2]
    manager.fork_sequence(0, 2)
    assert manager.sequences[2].block_table == [5, 2]
    assert manager.ref_count(2) == 2
    assert manager.invariants_ok()


def test_create_allocates_nothing_and_release_returns_everything() -> None:
    manager = KVBlockManager(4, 4)
    assert manager.create_sequence(7) == SequenceState(7, 0, [])
    assert manager.free_blocks == (0, 1, 2, 3)
    manager.append_tokens(7, 9)
    assert manager.num_free_blocks == 1
    manager.release_sequence(7)
    assert manager.free_blocks == (0, 1, 2, 3)
    assert manager.sequences == {}


def test_gqa_maps_query_heads_0_1_to_0_and_2_3_to_1() -> None:
    assert [address.kv_head_of(q, 16, 8) for q in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_300_tokens_in_a_reserved_4096_use_7_3_percent() -> None:
    assert round(100 * address.reserved_utilisation(300, 4096), 1) == 7.3


def test_qwen3_0_6b_keeps_112_kib_per_token() -> None:
    assert address.kv_cache_bytes(layers=28, tokens=1, hkv=8, d=128, itemsize=2) == 112 * 1024
