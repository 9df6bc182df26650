from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.kv import KVBlockManager, address


@given(pos=st.integers(0, 10**9), block=st.integers(0, 10**9), bs=st.integers(1, 300))
def test_slot_and_split_slot_are_inverse(pos: int, block: int, bs: int) -> None:
    offset = address.block_offset(pos, bs)
    assert address.logical_block(pos, bs) * bs + offset == pos
    assert address.split_slot(address.slot(block, offset, bs), bs) == (block, offset)


@given(length=st.integers(0, 10**6), bs=st.integers(1, 300))
def test_blocks_of_a_length_hold_it_and_waste_less_than_a_block(length: int, bs: int) -> None:
    blocks = address.num_logical_blocks(length, bs)
    assert blocks * bs - length == address.last_block_waste(length, bs)
    assert 0 <= address.last_block_waste(length, bs) < bs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: address.logical_block(-1, 4), "token position must be at least 0, got -1"),
        (lambda: address.block_offset(3, 0), "block size must be at least 1, got 0"),
        (lambda: address.slot(1, 4, 4), "offset 4 is outside a block of 4 slots"),
        (lambda: address.slot(-1, 0, 4), "physical block must be at least 0"),
        (lambda: address.split_slot(-1, 4), "slot must be at least 0, got -1"),
        (lambda: address.num_logical_blocks(-3, 4), "sequence length must be at least 0, got -3"),
        (lambda: address.last_block_waste(3, -4), "block size must be at least 1, got -4"),
        (lambda: address.kv_head_of(0, 6, 4), "6 query heads cannot be shared evenly by 4"),
        (lambda: address.kv_head_of(0, 2, 4), "2 query heads cannot be shared evenly by 4"),
        (lambda: address.kv_head_of(8, 8, 4), r"query head 8 is outside 0\.\.7"),
        (lambda: address.kv_head_of(0, 4, 0), "key-value heads must be at least 1"),
        (lambda: address.kv_cache_bytes(28, -1, 8, 128, 2), "tokens must be at least 0, got -1"),
        (lambda: address.reserved_utilisation(5, 4), r"length 5 is outside 0\.\.4"),
        (lambda: address.reserved_utilisation(0, 0), "reserved length must be at least 1"),
    ],
)
def test_bad_arguments_name_the_value(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (6, 2), (8, 2), (28, 4), (32, 8), (4, 4), (4, 1)])
def test_c23_each_kv_head_serves_consecutive_query_heads(hq: int, hkv: int) -> None:
    assert [address.kv_head_of(q, hq, hkv) for q in range(hq)] == [h for h in range(hkv) for _ in range(hq // hkv)]


def test_c01_last_token_of_an_exactly_full_block() -> None:
    """C01: table [10, 11], 8 tokens: token 7 is slot 47, not 43; token 8 first takes a new block."""
    manager = KVBlockManager(13, 4, free_order=[10, 11, *range(10), 12])
    manager.create_sequence(0)
    assert manager.append_tokens(0, 8)[-1] == manager.slot_of(0, 7) == 47
    assert manager.slot_of(0, 3) == 43
    assert manager.blocks_needed(0, 1) == 1
    assert manager.append_token(0) == 0
    assert manager.sequences[0].block_table == [10, 11, 0]


@pytest.mark.parametrize("bs", [1, 3, 4, 16])
def test_c01_slots_are_injective_for_every_length(bs: int) -> None:
    """C01: for every length the slots are distinct and the last block holds 1..bs tokens."""
    manager = KVBlockManager(-(-67 // bs), bs, free_order=list(reversed(range(-(-67 // bs)))))
    manager.create_sequence(0)
    slots: list[int] = []
    for length in range(1, 68):
        slots.append(manager.append_token(0))
        table = manager.sequences[0].block_table
        assert len(set(slots)) == length
        assert 1 <= length - (len(table) - 1) * bs <= bs
        assert [manager.slot_of(0, pos) for pos in range(length)] == slots


@pytest.mark.parametrize("bs", [1, 4, 16])
def test_the_last_token_of_a_request_needs_no_slot(bs: int) -> None:
    for blocks in range(1, 6):
        longest = address.longest_request(blocks, bs)
        assert address.request_blocks(longest, bs) == blocks
        assert address.request_blocks(longest + 1, bs) == blocks + 1
        assert address.request_blocks(longest - bs + 1, bs) == blocks
    assert address.request_blocks(0, bs) == address.request_blocks(1, bs) == 0
