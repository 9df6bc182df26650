"""CASES section 1, what concerns the block manager alone."""

from __future__ import annotations

import random

import pytest
from kv_model import Harness, random_operation

from minipaged.kv import KVBlockManager


def run(manager: KVBlockManager, seq_id: int, tokens: list[int], new_tokens: int = 0) -> int:
    """A whole request that generates `new_tokens` zeros (the last one's K/V is never written); its cached tokens."""
    state = manager.create_sequence_from_prefix(seq_id, tokens)
    cached = state.sequence_length
    manager.append_tokens(seq_id, len(tokens) - cached)
    manager.commit_tokens(seq_id, tokens[cached:])
    for _ in range(new_tokens - 1):
        manager.append_token(seq_id)
        manager.commit_tokens(seq_id, [0])
    manager.check_invariants()
    return cached


def test_c04_no_double_free_after_copy_on_write() -> None:
    """C04: beams share blocks 0 and 1; A copies its last block; both finish; the group is aborted."""
    manager = KVBlockManager(6, 4)
    manager.create_sequence(0)
    manager.append_tokens(0, 6)
    manager.fork_sequence(0, 1)
    manager.append_token(0)
    assert manager.take_block_copies() == [(1, 2)]
    for seq_id in (0, 1):
        manager.release_sequence(seq_id)
        manager.check_invariants()
    for seq_id in (0, 1):
        with pytest.raises(KeyError) as error:
            manager.release_sequence(seq_id)
        assert error.value.args == (seq_id,)
        assert f"sequence {seq_id} is not live" in str(error.value)
    assert sorted(manager.free_blocks) == list(range(6))
    assert sorted(manager.allocate_block() for _ in range(6)) == list(range(6))


def test_c05_blocks_come_back_after_requests() -> None:
    """C05: 8 blocks, 20 different 12-token requests one after another, then one that needs all 8."""
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    for number in range(20):
        run(manager, number, [100 * number + i for i in range(12)])
        manager.release_sequence(number)
        assert manager.num_free_blocks + manager.num_idle_blocks == 8
    assert manager.num_idle_blocks == 8
    run(manager, 20, list(range(5000, 5032)))
    assert manager.num_available_blocks == 0
    manager.release_sequence(20)
    assert manager.num_available_blocks == 8


def test_c06_three_requests_share_a_two_block_prefix() -> None:
    """C06: shared blocks count once; in use peaks at 5, and at idle is 0."""
    manager = KVBlockManager(16, 4, enable_prefix_caching=True)
    prefix = list(range(8))
    peak = 0
    for seq_id in range(3):
        cached = run(manager, seq_id, [*prefix, 100 + seq_id, 200 + seq_id])
        assert cached == (8 if seq_id else 0)
        peak = max(peak, manager.num_blocks_in_use)
    assert peak == 5
    assert (manager.num_shared_blocks, manager.num_saved_blocks) == (2, 4)
    for seq_id in (1, 0, 2):
        manager.release_sequence(seq_id)
        manager.check_invariants()
    assert manager.num_blocks_in_use == 0
    assert (manager.num_idle_blocks, manager.num_free_blocks) == (2, 14)


def test_c06_ten_thousand_random_operations() -> None:
    """C06: 10,000 random operations on 16 blocks, all invariants and the naive model after each."""
    totals = [0, 0, 0]
    for seed, (block_size, policy) in enumerate([(4, "lru"), (3, "lfu"), (1, "lru"), (2, "lfu")]):
        rng = random.Random(seed)
        harness = Harness(16, block_size, policy)
        for _ in range(2500):
            random_operation(harness, rng)
            harness.check()
        totals[0] += harness.evictions
        totals[1] += harness.hits
        totals[2] += harness.copies
        for seq_id in list(harness.seqs):
            harness.release(seq_id)
        while harness.held:
            harness.free_block(0)
        harness.check()
        assert harness.manager.num_available_blocks == 16
    assert min(totals) > 50, "the fuzz reaches evictions, hits and copies"


def test_c07_no_stale_entry_after_a_block_is_reused() -> None:
    """C07: 2 blocks, X, Y, X again: nothing of the first X may be found."""
    manager = KVBlockManager(2, 4, enable_prefix_caching=True)
    for number, tokens in enumerate([[1, 2, 3, 4, 5], [9, 9, 9, 9, 9], [1, 2, 3, 4, 5]]):
        assert run(manager, number, tokens, new_tokens=2) == 0
        manager.release_sequence(number)


@pytest.mark.parametrize(
    ("length", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12), (17, 16)]
)
def test_c08_a_full_hit_leaves_one_token_to_compute(length: int, expected: int) -> None:
    """C08: cached = floor((L - 1) / 4) * 4; and the last full block is still findable by a longer prompt."""
    manager = KVBlockManager(16, 4, enable_prefix_caching=True)
    tokens = [1000 * length + i for i in range(length)]
    assert run(manager, 0, tokens) == 0
    manager.release_sequence(0)
    assert manager.match_prefix(tokens) == expected
    assert run(manager, 1, tokens) == expected
    manager.release_sequence(1)
    assert manager.match_prefix([*tokens, 7]) == length // 4 * 4


def test_c11_duplicate_prefix_blocks_stay_private() -> None:
    """C11: B computed the same 9 tokens as A in flight; its blocks are its own until it ends and go back uncached."""
    manager = KVBlockManager(12, 4, enable_prefix_caching=True)
    tokens = list(range(9))
    for seq_id in (0, 1):
        manager.create_sequence_from_prefix(seq_id, tokens)
        manager.append_tokens(seq_id, 9)
    manager.commit_tokens(0, tokens)
    manager.commit_tokens(1, tokens)
    table = list(manager.sequences[1].block_table)
    assert not set(table) & set(manager.sequences[0].block_table)
    manager.release_sequence(0)
    assert (manager.num_idle_blocks, manager.num_free_blocks) == (2, 7)
    manager.create_sequence(2)
    manager.append_tokens(2, 4 * 9)
    assert not set(table) & set(manager.sequences[2].block_table)
    manager.append_token(1)
    manager.check_invariants()
    assert manager.sequences[1].block_table[:3] == table
    manager.release_sequence(1)
    assert manager.num_idle_blocks == 0, "A's copy was evicted for C, B's never was cached"
    manager.check_invariants()


@pytest.mark.parametrize("chunks", [[16], [8, 8], [8, 5, 3], [5, 5, 5, 1], [3, 5, 8], [1] * 16])
def test_c12_chunks_index_the_same_blocks(chunks: list[int]) -> None:
    """C12: a 16-token prompt as one chunk or several; a repeat hits 12 tokens each time."""
    manager = KVBlockManager(16, 4, enable_prefix_caching=True)
    tokens = list(range(16))
    manager.create_sequence_from_prefix(0, tokens)
    done = 0
    for chunk in chunks:
        manager.append_tokens(0, chunk)
        manager.commit_tokens(0, tokens[done : done + chunk])
        done += chunk
        assert manager.match_prefix([*tokens[:done], 99]) == done // 4 * 4, "findable when full, not earlier"
    assert manager.match_prefix(tokens) == 12
    assert manager.create_sequence_from_prefix(1, tokens).block_table == manager.sequences[0].block_table[:3]


def test_c13_the_last_owner_writes_in_place() -> None:
    """C13: block size 4, a 6-token prompt forked into 3: exactly 2 copies."""
    manager = KVBlockManager(8, 4)
    manager.create_sequence(0)
    manager.append_tokens(0, 6)
    manager.fork_sequence(0, 1)
    manager.fork_sequence(0, 2)
    assert [manager.blocks_needed(seq_id, 1) for seq_id in range(3)] == [1, 1, 1]
    slots = manager.slot_mapping_for_append([0, 1, 2]).tolist()
    pairs = manager.take_block_copies()
    assert pairs == [(1, 2), (1, 3)]
    assert slots == [2 * 4 + 2, 3 * 4 + 2, 1 * 4 + 2]
    assert [manager.sequences[seq_id].block_table for seq_id in range(3)] == [[0, 2], [0, 3], [0, 1]]
    assert manager.take_block_copies() == []
    manager.check_invariants()
