"""PagedKVCache: layout, writes, copies and what it refuses (article sections 11 and 12; C13, C20)."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import write_kv_cache


def tokens(count: int, heads: int = 2, head_dim: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, count, heads, head_dim, generator=rng)
    return key, value


def test_layout_and_defaults() -> None:
    """Article section 11: [N, Hkv, Bs, D]; zeros; bfloat16."""
    cache = PagedKVCache(5, 2, 4, 8)
    assert cache.key_cache.shape == cache.value_cache.shape == (5, 2, 4, 8)
    assert cache.key_cache.dtype == torch.bfloat16
    assert not cache.key_cache.any()
    assert not cache.value_cache.any()
    assert cache.num_slots == 20
    assert cache.nbytes == 2 * 5 * 2 * 4 * 8 * 2
    assert "num_blocks=5" in repr(cache)


def test_a_token_lands_at_block_head_offset() -> None:
    """Article section 4.1: slot 10 at block size 4 is block 2, offset 2, in every head."""
    cache = PagedKVCache(5, 2, 4, 8, dtype=torch.float32)
    key, value = tokens(1)
    cache.write(key, value, torch.tensor([10]))
    assert torch.equal(cache.key_cache[2, :, 2], key[0])
    assert torch.equal(cache.value_cache[2, :, 2], value[0])
    assert int(cache.key_cache.count_nonzero()) == key.numel()


@pytest.mark.parametrize("backend", [None, "reference", "torch"])
def test_c20_minus_one_skips(backend: str | None) -> None:
    """C20: slots [5, -1, 7] in 4 blocks of 4: only 5 and 7 change; 15, where -1 would wrap to, does not."""
    cache = PagedKVCache(4, 2, 4, 8, dtype=torch.float32)
    cache.fill_(torch.nan)
    key, value = tokens(3)
    write_kv_cache(key, value, cache.key_cache, cache.value_cache, torch.tensor([5, -1, 7]), backend=backend)
    written = ~cache.key_cache.isnan().all(-1).all(1).flatten()
    assert written.nonzero().flatten().tolist() == [5, 7]
    assert torch.equal(cache.key_cache[1, :, 1], key[0])
    assert torch.equal(cache.value_cache[1, :, 3], value[2])


@pytest.mark.parametrize("slots", [[0, 16, 1], [0, 1, -2], [2**40, 0, 1]])
def test_c20_slots_outside_the_pool_change_nothing(slots: list[int]) -> None:
    cache = PagedKVCache(4, 2, 4, 8)
    wrong = next(s for s in slots if not -1 <= s < 16)
    with pytest.raises(IndexError, match=rf"slot {wrong} is outside the pool: valid slots are 0 to 15"):
        cache.write(*tokens(3), torch.tensor(slots))
    assert not cache.key_cache.any()
    assert not cache.value_cache.any()


def test_views_of_qkv_are_written_as_they_are() -> None:
    """`qkv[:, a:b].view(T, H, D)` is strided for T > 1; int32 slots and other float types are converted."""
    qkv = torch.randn(3, 8 * 8)
    key, value = qkv[:, 32:48].view(3, 2, 8), qkv[:, 48:].view(3, 2, 8)
    cache = PagedKVCache(4, 2, 4, 8)
    cache.write(key, value, torch.tensor([15, 0, 6], dtype=torch.int32))
    for index, slot in enumerate((15, 0, 6)):
        assert torch.equal(cache.key_cache[slot // 4, :, slot % 4], key[index].bfloat16())
        assert torch.equal(cache.value_cache[slot // 4, :, slot % 4], value[index].bfloat16())


def test_nothing_to_do() -> None:
    cache = PagedKVCache(4, 2, 4, 8)
    cache.write(*tokens(0), torch.empty(0, dtype=torch.int64))
    cache.write(*tokens(0), [])
    cache.write(*tokens(2), torch.tensor([-1, -1]))
    cache.copy_blocks([])
    key, value = cache.gather([], 0)
    assert key.shape == value.shape == (0, 2, 8)
    assert not cache.key_cache.any()


@pytest.mark.parametrize("layout", ["per layer", "interleaved", "permuted"])
def test_storage_is_used_in_place(layout: str) -> None:
    """`storage` may be views of one large tensor; writes, copies and reads go to it."""
    if layout == "per layer":
        views = torch.zeros(3, 2, 4, 2, 4, 8)[1].unbind(0)
    elif layout == "interleaved":
        views = torch.zeros(4, 2, 2, 4, 8).unbind(1)
    else:
        views = torch.zeros(2, 2, 8, 4, 4).permute(0, 3, 1, 4, 2).unbind(0)
    cache = PagedKVCache(4, 2, 4, 8, storage=(views[0], views[1]))
    assert cache.dtype == torch.float32
    key, value = tokens(4)
    cache.write(key, value, torch.arange(4, 8))
    cache.copy_blocks([(1, 3)])
    assert torch.equal(views[0][3].transpose(0, 1), key)
    assert torch.equal(views[1][1].transpose(0, 1), value)
    got_key, got_value = cache.gather([3], 4)
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": (torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 16))}, r"value storage has shape \(4, 2, 4, 16\)"),
        ({"storage": (torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 8).half())}, "key and value storage differ"),
        ({"storage": (torch.zeros(4, 2, 4, 8),) * 2, "dtype": torch.bfloat16}, "storage is torch.float32"),
        ({"storage": (torch.zeros(4, 2, 4, 8, dtype=torch.int8),) * 2}, "must be floating point"),
    ],
)
def test_storage_that_does_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKVCache(4, 2, 4, 8, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(0, 2, 4, 8), (4, 0, 4, 8), (4, 2, 0, 8), (4, 2, 4, -8)])
def test_sizes_below_one(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        PagedKVCache(*sizes)


def test_c13_copies_are_simultaneous() -> None:
    """C13: {a -> b, b -> c} copies the old b into c; swaps work; K and V both move."""
    cache = PagedKVCache(4, 1, 2, 8, dtype=torch.float32)
    cache.key_cache[:] = torch.arange(4.0).view(4, 1, 1, 1)
    cache.value_cache[:] = 10 + torch.arange(4.0).view(4, 1, 1, 1)
    cache.copy_blocks([(0, 1), (1, 2)])
    assert cache.key_cache[:, 0, 0, 0].tolist() == [0, 0, 1, 3]
    assert cache.value_cache[:, 0, 1, 7].tolist() == [10, 10, 11, 13]
    cache.copy_blocks([(2, 3), (3, 2)])
    assert cache.key_cache[:, 0, 0, 0].tolist() == [0, 0, 3, 1]


@pytest.mark.parametrize("pair", [(0, 4), (4, 0), (-1, 0), (0, -1)])
def test_copies_outside_the_pool(pair: tuple[int, int]) -> None:
    cache = PagedKVCache(4, 1, 2, 8, dtype=torch.float32)
    cache.key_cache[0] = 1
    before = cache.key_cache.clone()
    with pytest.raises(IndexError, match="outside the pool of 4 blocks"):
        cache.copy_blocks([(0, 1), pair])
    assert torch.equal(cache.key_cache, before)


def test_two_copies_into_one_block() -> None:
    with pytest.raises(ValueError, match="block 2 is the destination of more than one copy"):
        PagedKVCache(4, 1, 2, 8).copy_blocks([(0, 2), (1, 2)])


def test_gather_refuses_what_it_cannot_read() -> None:
    cache = PagedKVCache(4, 1, 2, 8)
    with pytest.raises(ValueError, match="seq_len 5 needs 3 blocks of 2, the block table has 2"):
        cache.gather([0, 1], 5)
    with pytest.raises(IndexError, match="block -1 is outside the pool of 4 blocks"):
        cache.gather(torch.tensor([0, -1]), 3)
    assert cache.gather([0, -1, 999], 2)[0].shape == (2, 1, 8)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.integers(1, 6), num_blocks=st.integers(1, 8))
def test_written_tokens_are_gathered_back(data: st.DataObject, block_size: int, num_blocks: int) -> None:
    """Any table, any length, written in any order and in pieces: gather returns exactly the tokens, in order."""
    table = data.draw(st.permutations(range(num_blocks)))
    length = data.draw(st.integers(0, num_blocks * block_size))
    order = data.draw(st.permutations(range(length)))
    cut = data.draw(st.integers(0, length))
    cache = PagedKVCache(num_blocks, 2, block_size, 8, dtype=torch.float32)
    cache.fill_(torch.nan)
    key, value = tokens(length, seed=length)
    slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(length)]).long()
    for piece in (order[:cut], order[cut:]):
        index = torch.tensor(piece, dtype=torch.int64)
        cache.write(key[index], value[index], slots[index])
    got_key, got_value = cache.gather(table, length)
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, value)
    unwritten = int(cache.key_cache.isnan().sum())
    assert unwritten == (num_blocks * block_size - length) * 2 * 8


def test_a_cache_made_in_inference_mode_is_writable_outside() -> None:
    with torch.inference_mode():
        cache = PagedKVCache(4, 2, 4, 8)
    cache.write(*tokens(1), torch.tensor([3]))
    cache.fill_(1)
    assert (cache.key_cache == 1).all()


def test_an_unused_pool_costs_no_memory() -> None:
    """A pool of 1 GiB is there at once and takes memory only where blocks are used."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc to measure resident memory")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    cache = PagedKVCache(8192, 8, 16, 256)
    cache.write(*tokens(2, heads=8, head_dim=256), torch.tensor([0, cache.num_slots - 1]))
    assert cache.nbytes == 2**30
    assert resident() - before < cache.nbytes // 8
