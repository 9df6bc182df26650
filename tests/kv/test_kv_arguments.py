from __future__ import annotations

import numpy as np
import pytest
import torch

from minipaged.kv import KVBlockManager, OutOfBlocksError, UnknownSequenceError


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "num_physical_blocks must be at least 1, got 0"),
        ((-1, 4), ValueError, "num_physical_blocks must be at least 1, got -1"),
        ((4, 0), ValueError, "block_size must be at least 1, got 0"),
        ((4.0, 4), TypeError, "num_physical_blocks must be an integer, got 4.0"),
        ((4, True), TypeError, "block_size must be an integer, got True"),
        ((4, None), TypeError, "block_size must be an integer, got None"),
    ],
)
def test_sizes(arguments, error, message: str) -> None:
    with pytest.raises(error, match=message):
        KVBlockManager(*arguments)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 3], []])
def test_free_order_must_be_a_permutation(order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"free_order must name each block 0\.\.2 once"):
        KVBlockManager(3, 4, free_order=order)


def test_keyword_arguments() -> None:
    with pytest.raises(ValueError, match=r"eviction_policy 'mru' is unknown; choose one of \['lfu', 'lru'\]"):
        KVBlockManager(3, 4, eviction_policy="mru")
    with pytest.raises(TypeError, match="listener must be callable"):
        KVBlockManager(3, 4, listener=[])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="free_order must be an integer"):
        KVBlockManager(2, 4, free_order=[0.0, 1.0])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.append_token(7),
        lambda m: m.append_tokens(7, 1),
        lambda m: m.blocks_needed(7, 1),
        lambda m: m.slot_mapping_for_append([0, 7]),
        lambda m: m.slot_of(7, 0),
        lambda m: m.fork_sequence(7, 8),
        lambda m: m.release_sequence(7),
        lambda m: m.get_block_table_tensor([0, 7]),
        lambda m: m.get_seq_lens_tensor([7]),
        lambda m: m.commit_tokens(7, []),
    ],
)
def test_unknown_sequences_are_key_errors_with_the_id(call) -> None:
    manager = KVBlockManager(4, 4)
    manager.create_sequence(0)
    with pytest.raises(KeyError) as error:
        call(manager)
    assert isinstance(error.value, UnknownSequenceError)
    assert error.value.args == (7,)
    assert "sequence 7 is not live" in str(error.value)
    assert manager.sequences[0].sequence_length == 0
    assert manager.num_free_blocks == 4


def test_a_live_id_cannot_be_created_again() -> None:
    manager = KVBlockManager(4, 4)
    manager.create_sequence(3)
    manager.append_token(3)
    manager.create_sequence(4)
    for call in (
        lambda: manager.create_sequence(3),
        lambda: manager.create_sequence_from_prefix(3, [1, 2]),
        lambda: manager.fork_sequence(4, 3),
        lambda: manager.fork_sequence(3, 3),
    ):
        with pytest.raises(ValueError, match="sequence 3 lives already"):
            call()
    assert manager.sequences[3].sequence_length == 1
    with pytest.raises(TypeError, match="sequence_id must be an integer"):
        manager.create_sequence("3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sequence_id must be an integer"):
        manager.create_sequence(True)
    manager.check_invariants()


def test_counts_of_tokens() -> None:
    manager = KVBlockManager(4, 4)
    manager.create_sequence(0)
    assert manager.append_tokens(0, 0) == []
    assert manager.blocks_needed(0, 0) == 0
    for call in (manager.append_tokens, manager.blocks_needed):
        with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
            call(0, -1)
        for bad in (1.0, True, "1", None):
            with pytest.raises(TypeError, match="num_tokens must be an integer"):
                call(0, bad)
    assert manager.append_tokens(0, np.int64(2)) == [0, 1]
    assert type(manager.sequences[0].sequence_length) is int
    with pytest.raises(OutOfBlocksError, match=r"needs 4 blocks, but 3 are free and 0 idle of 4; .*num_blocks"):
        manager.append_tokens(0, 15)
    assert manager.sequences[0].sequence_length == 2
    assert manager.append_tokens(0, 14)[-1] == 15
    with pytest.raises(OutOfBlocksError):
        manager.append_token(0)


def test_slot_of_refuses_positions_without_a_token() -> None:
    manager = KVBlockManager(4, 4)
    manager.create_sequence(0)
    manager.append_tokens(0, 2)
    for pos in (-1, 2, 3):
        with pytest.raises(IndexError, match=f"sequence 0 has 2 tokens, none at position {pos}"):
            manager.slot_of(0, pos)


def test_only_held_blocks_can_be_freed() -> None:
    manager = KVBlockManager(3, 4)
    manager.create_sequence(0)
    manager.append_token(0)
    held = manager.allocate_block()
    assert (held, manager.ref_count(held)) == (1, 1)
    for block in (0, 2):
        with pytest.raises(ValueError, match=f"block {block} is not held by a caller"):
            manager.free_block(block)
    manager.free_block(held)
    with pytest.raises(ValueError, match="block 1 is not held by a caller"):
        manager.free_block(held)
    assert manager.free_blocks == (1, 2)
    for block in (-1, 3):
        with pytest.raises(ValueError, match=f"block {block} is outside the pool of 3 blocks"):
            manager.free_block(block)
        with pytest.raises(ValueError, match=f"block {block} is outside the pool of 3 blocks"):
            manager.ref_count(block)
    manager.allocate_block()
    manager.allocate_block()
    with pytest.raises(OutOfBlocksError, match="allocate_block needs 1 block, but 0 are free and 0 idle of 3"):
        manager.allocate_block()


def test_tensors_for_the_kernels() -> None:
    manager = KVBlockManager(8, 4)
    for seq_id, length in ((0, 9), (1, 0), (2, 4)):
        manager.create_sequence(seq_id)
        manager.append_tokens(seq_id, length)
    table = manager.get_block_table_tensor([0, 1, 2])
    assert table.dtype == torch.int32
    assert table.tolist() == [[0, 1, 2], [-1, -1, -1], [3, -1, -1]]
    assert manager.get_block_table_tensor([2, 0], pad=0).tolist() == [[3, 0, 0], [0, 1, 2]]
    assert manager.get_block_table_tensor([]).shape == (0, 0)
    assert manager.get_block_table_tensor([1]).shape == (1, 0)
    lengths = manager.get_seq_lens_tensor(torch.tensor([2, 0, 1]))
    assert (lengths.dtype, lengths.tolist()) == (torch.int32, [4, 9, 0])
    slots = manager.slot_mapping_for_append(np.array([2, 0]))
    assert (slots.dtype, slots.tolist()) == (torch.int64, [16, 9])
    assert manager.slot_mapping_for_append([]).shape == (0,)


def test_slot_mapping_is_all_or_nothing() -> None:
    manager = KVBlockManager(2, 4)
    for seq_id in range(3):
        manager.create_sequence(seq_id)
    with pytest.raises(ValueError, match="sequence 1 occurs twice in the batch"):
        manager.slot_mapping_for_append([0, 1, 1])
    with pytest.raises(OutOfBlocksError, match="3 sequences needs 3 blocks, but 2 are free"):
        manager.slot_mapping_for_append([0, 1, 2])
    assert [state.sequence_length for state in manager.sequences.values()] == [0, 0, 0]
    assert manager.slot_mapping_for_append([2, 0]).tolist() == [0, 4]
