from __future__ import annotations

import numpy as np
import pytest

from minipaged.kv import KVBlockManager


def cached_chain(manager: KVBlockManager, seq_id: int, tokens: list[int], salt: str | None = None) -> list[int]:
    """Compute `tokens` in a sequence that stays alive; its table."""
    state = manager.create_sequence_from_prefix(seq_id, tokens, salt=salt)
    rest = tokens[state.sequence_length :]
    manager.append_tokens(seq_id, len(rest))
    manager.commit_tokens(seq_id, rest)
    manager.check_invariants()
    return state.block_table


def test_nothing_is_found_before_it_is_committed() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    manager.create_sequence(0)
    manager.append_tokens(0, 9)
    assert manager.match_prefix(list(range(9))) == 0
    manager.commit_tokens(0, range(7))
    assert manager.match_prefix(list(range(9))) == 4
    manager.commit_tokens(0, [7])
    assert manager.match_prefix(list(range(9))) == 8


def test_commit_beyond_the_length_changes_nothing() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    manager.create_sequence(0)
    manager.append_tokens(0, 5)
    manager.commit_tokens(0, [0, 1])
    with pytest.raises(ValueError, match="sequence 0 has 5 tokens with a slot, 2 of them committed: 4 more cannot be"):
        manager.commit_tokens(0, [2, 3, 4, 5])
    assert manager.match_prefix(range(5)) == 0
    manager.commit_tokens(0, [2, 3, 4])
    assert manager.match_prefix(range(5)) == 4


def test_equal_blocks_after_different_histories_are_different() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    cached_chain(manager, 0, [1, 1, 1, 1, 5, 5, 5, 5])
    cached_chain(manager, 1, [2, 2, 2, 2, 6, 6, 6, 6])
    assert manager.match_prefix([1, 1, 1, 1, 6, 6, 6, 6, 0]) == 4
    assert manager.match_prefix([5, 5, 5, 5, 0]) == 0
    assert manager.match_prefix([2, 2, 2, 2, 6, 6, 6, 6, 0]) == 8


def test_ids_that_differ_in_high_bits_only_are_different() -> None:
    manager = KVBlockManager(8, 1, enable_prefix_caching=True)
    cached_chain(manager, 0, [1, 2])
    assert manager.match_prefix([1 + 2**32, 0]) == 0
    assert manager.match_prefix([1, 2 + 2**32, 0]) == 1
    assert manager.match_prefix([-1, 0]) == 0


def test_salts_isolate_tenants() -> None:
    manager = KVBlockManager(16, 4, enable_prefix_caching=True)
    tokens = list(range(9))
    cached_chain(manager, 0, tokens, salt="a")
    assert (
        manager.match_prefix(tokens)
        == manager.match_prefix(tokens, salt="b")
        == manager.match_prefix(tokens, salt="")
        == 0
    )
    assert manager.match_prefix(tokens, salt="a") == 8
    manager.create_sequence(1, salt="b")
    manager.append_tokens(1, 9)
    manager.commit_tokens(1, tokens)
    assert manager.match_prefix(tokens, salt="b") == 8
    assert manager.match_prefix(tokens) == 0
    manager.fork_sequence(1, 2)
    manager.append_tokens(2, 3)
    manager.commit_tokens(2, [9, 10, 11])
    assert manager.match_prefix([*range(12), 0], salt="b") == 12, "a fork keeps its parent's salt"
    with pytest.raises(TypeError, match="salt must be a string or None, got 0"):
        manager.match_prefix(tokens, salt=0)  # type: ignore[arg-type]


def test_the_switch_is_off_by_default() -> None:
    manager = KVBlockManager(8, 4)
    cached_chain(manager, 0, list(range(9)))
    assert manager.match_prefix(list(range(9))) == 0
    manager.release_sequence(0)
    assert (manager.num_free_blocks, manager.num_idle_blocks) == (8, 0)


def test_a_hit_shares_blocks_in_use_and_idle_ones() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    table = list(cached_chain(manager, 0, list(range(9))))
    assert manager.create_sequence_from_prefix(1, range(9)).block_table == table[:2]
    assert [manager.ref_count(b) for b in table] == [2, 2, 1]
    manager.release_sequence(0)
    manager.release_sequence(1)
    assert manager.num_idle_blocks == 2
    state = manager.create_sequence_from_prefix(2, range(9))
    assert (state.block_table, state.sequence_length, manager.num_idle_blocks) == (table[:2], 8, 0)
    manager.append_tokens(2, 20)
    assert state.block_table[:2] == table[:2]
    manager.check_invariants()


def test_forks_commit_their_own_continuations() -> None:
    manager = KVBlockManager(12, 4, enable_prefix_caching=True)
    cached_chain(manager, 0, list(range(6)))
    manager.fork_sequence(0, 1)
    for seq_id, tokens in ((0, [6, 7]), (1, [60, 70])):
        manager.append_tokens(seq_id, 2)
        manager.commit_tokens(seq_id, tokens)
    assert manager.match_prefix([*range(8), 0]) == 8
    assert manager.match_prefix([*range(6), 60, 70, 0]) == 8
    assert manager.match_prefix([*range(6), 6, 70, 0]) == 4
    manager.check_invariants()


def test_sharers_of_a_block_must_commit_the_same_tokens() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    manager.create_sequence(0)
    manager.append_tokens(0, 8)
    manager.fork_sequence(0, 1)
    manager.commit_tokens(0, range(8))
    with pytest.raises(ValueError, match="block 1 of sequence 1 was committed with other tokens"):
        manager.commit_tokens(1, [0, 1, 2, 3, 4, 5, 6, 99])
    cached_chain(manager, 2, [0, 1, 2, 3, 4, 5, 6, 99])
    with pytest.raises(ValueError, match="block 1 of sequence 1 was committed with other tokens"):
        manager.commit_tokens(1, [0, 1, 2, 3, 4, 5, 6, 99])  # cached, but not in this block
    manager.commit_tokens(1, range(8))
    manager.check_invariants()
    assert manager.match_prefix([*range(8), 0]) == 8


def test_what_follows_a_duplicate_is_found_below_the_cached_block() -> None:
    manager = KVBlockManager(12, 4, enable_prefix_caching=True)
    for seq_id in (0, 1):
        manager.create_sequence(seq_id)
        manager.append_tokens(seq_id, 4 + 8 * seq_id)
    manager.commit_tokens(0, range(4))
    manager.commit_tokens(1, range(12))
    assert manager.match_prefix(range(13)) == 12
    assert manager.create_sequence_from_prefix(2, range(13)).block_table == [
        manager.sequences[0].block_table[0],
        *manager.sequences[1].block_table[1:],
    ]
    manager.check_invariants()


def duplicate_below_idle(num_blocks: int) -> KVBlockManager:
    """Cached P, idle; its cached child belongs to sequence 1, which has a private duplicate of P in its table."""
    manager = KVBlockManager(num_blocks, 4, enable_prefix_caching=True)
    for seq_id in (0, 1):
        manager.create_sequence(seq_id)
        manager.append_tokens(seq_id, 4 + 8 * seq_id)
    manager.commit_tokens(0, range(4))
    manager.commit_tokens(1, range(8))
    manager.release_sequence(0)
    assert (manager.num_free_blocks, manager.num_idle_blocks) == (num_blocks - 4, 1)
    return manager


def test_every_available_block_can_be_allocated_though_an_idle_one_has_a_child_in_use() -> None:
    manager = duplicate_below_idle(4)
    assert manager.num_available_blocks == 1
    table = list(manager.sequences[1].block_table)
    assert manager.allocate_block() == 0
    manager.check_invariants()
    assert manager.sequences[1].block_table == table
    assert manager.match_prefix([*range(8), 0]) == 0
    manager.commit_tokens(1, range(8, 12))
    assert manager.match_prefix([*range(12), 0]) == 0, "nothing is found below a history that is gone"
    manager.check_invariants()
    manager.release_sequence(1)
    assert (manager.num_free_blocks, manager.num_idle_blocks) == (3, 0)
    manager.check_invariants()


def test_a_live_chain_whose_parent_entry_was_evicted_adds_nothing() -> None:
    manager = KVBlockManager(4, 4, enable_prefix_caching=True)
    for seq_id in (0, 1):
        manager.create_sequence(seq_id)
        manager.append_tokens(seq_id, 4 + 4 * seq_id)
        manager.commit_tokens(seq_id, range(4))
    manager.release_sequence(0)
    assert manager.match_prefix(range(5)) == 4
    manager.allocate_block()
    manager.free_block(manager.allocate_block())  # evicts the entry that sequence 1 is below
    assert manager.match_prefix(range(5)) == 0
    manager.commit_tokens(1, range(4, 8))
    assert manager.match_prefix(range(9)) == 0
    manager.check_invariants()
    cached_chain(manager, 2, list(range(4)))  # the same content again, under a new entry
    manager.append_tokens(1, 0)
    assert manager.match_prefix(range(9)) == 4
    manager.check_invariants()


def test_reset_forgets_all_and_live_sequences_keep_their_blocks() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    tokens = list(range(13))
    table = list(cached_chain(manager, 0, tokens))
    cached_chain(manager, 1, [50, 51, 52, 53, 54])
    manager.create_sequence(2)
    manager.release_sequence(1)
    assert manager.num_idle_blocks == 1
    manager.reset_prefix_cache()
    assert (manager.num_idle_blocks, manager.num_free_blocks) == (0, 4)
    assert manager.match_prefix(tokens) == 0
    assert manager.sequences[0].block_table == table
    manager.append_tokens(0, 3)
    manager.commit_tokens(0, [13, 14, 15])
    manager.append_tokens(2, 4)
    manager.commit_tokens(2, range(4))
    manager.check_invariants()
    assert manager.match_prefix([*range(16), 0]) == 4, "only what sequence 2 computed after the reset"
    manager.release_sequence(0)
    assert manager.num_idle_blocks == 0


def test_prefix_keys_give_what_token_ids_give() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    keys = manager.prefix_keys(range(9))
    assert (len(keys), keys.num_tokens, len(keys.blocks)) == (9, 9, 2)
    assert manager.match_prefix(keys) == 0
    cached_chain(manager, 0, list(range(9)))
    assert manager.match_prefix(keys) == manager.match_prefix(range(9)) == 8
    manager.release_sequence(0)
    held = [manager.allocate_block() for _ in range(7)]  # evicts the second block
    assert manager.match_prefix(keys) == manager.match_prefix(range(9)) == 4
    manager.free_block(held.pop())
    assert manager.create_sequence_from_prefix(1, keys).sequence_length == 4
    manager.append_tokens(1, 4)
    manager.commit_tokens(1, range(4, 8))
    assert manager.match_prefix(keys) == 8
    manager.release_sequence(1)
    manager.reset_prefix_cache()
    assert manager.match_prefix(keys) == 0


def test_prefix_keys_grow_and_leave_a_token_to_compute() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    cached_chain(manager, 0, list(range(8)))
    keys = manager.prefix_keys([], salt=None)
    for token in range(8):
        assert manager.match_prefix(keys) == max(token - 1, 0) // 4 * 4
        keys.extend([token])
    assert manager.match_prefix(keys) == 4
    keys.extend([8])
    assert manager.match_prefix(keys) == 8
    assert keys.blocks == manager.prefix_keys(range(9)).blocks
    assert keys.fingerprints == manager.prefix_keys(range(9)).fingerprints


def test_fingerprints_name_whole_histories_and_salts() -> None:
    manager = KVBlockManager(8, 2, enable_prefix_caching=True)
    one, same, other = (manager.prefix_keys(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [9, 9, 3, 4]))
    assert one.fingerprints == same.fingerprints
    assert not set(one.fingerprints) & set(other.fingerprints)
    assert not set(one.fingerprints) & set(manager.prefix_keys([1, 2, 3, 4], salt="a").fingerprints)


def test_prefix_keys_carry_their_salt_and_belong_to_one_manager() -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    cached_chain(manager, 0, list(range(9)), salt="a")
    keys = manager.prefix_keys(range(9), salt="a")
    assert manager.match_prefix(keys) == manager.match_prefix(keys, salt="a") == 8
    with pytest.raises(ValueError, match="salt 'b' contradicts the salt 'a'"):
        manager.match_prefix(keys, salt="b")
    with pytest.raises(ValueError, match="another block manager"):
        KVBlockManager(8, 4, enable_prefix_caching=True).match_prefix(keys)
    state = manager.create_sequence_from_prefix(1, keys)
    assert state.sequence_length == 8
    manager.append_tokens(1, 4)
    manager.commit_tokens(1, range(8, 12))
    assert manager.match_prefix(range(13), salt="a") == 12


@pytest.mark.parametrize("make", [list, tuple, np.array, iter], ids=lambda make: make.__name__)
def test_token_ids_come_in_any_container(make) -> None:
    manager = KVBlockManager(8, 4, enable_prefix_caching=True)
    manager.create_sequence(0)
    manager.append_tokens(0, 9)
    manager.commit_tokens(0, make(list(range(9))))
    assert manager.match_prefix(list(range(9))) == 8


@pytest.mark.parametrize("bad", ["some text", [1.0, 2.0], [1, None], [2**70], 5, None])
def test_token_ids_that_are_no_integers_change_nothing(bad) -> None:
    manager = KVBlockManager(8, 2, enable_prefix_caching=True)
    manager.create_sequence(0)
    manager.append_tokens(0, 8)
    for call in (
        lambda: manager.commit_tokens(0, bad),
        lambda: manager.match_prefix(bad),
        lambda: manager.create_sequence_from_prefix(1, bad),
    ):
        with pytest.raises((TypeError, OverflowError)):
            call()
    assert list(manager.sequences) == [0]
    manager.check_invariants()


@pytest.mark.parametrize("tokens", [[], [1]])
def test_prompts_too_short_to_be_found(tokens: list[int]) -> None:
    manager = KVBlockManager(8, 1, enable_prefix_caching=True)
    cached_chain(manager, 0, [1, 2, 3])
    assert manager.match_prefix(tokens) == 0
    assert manager.create_sequence_from_prefix(1, tokens).block_table == []
