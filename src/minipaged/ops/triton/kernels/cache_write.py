"""Storing K and V in their slots, and copying blocks: the article's section 12 on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.transfer import upload
from minipaged.ops.triton.kernels.launch import Launch, block_of, rows_contiguous

COPY_TILE = 1024  # elements per program of a block copy


@triton.jit(do_not_specialize=["num_slots"])
def write_kv_kernel(
    key, value, key_cache, value_cache, slots, num_slots,
    key_token, key_head, value_token, value_head,
    key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per token: all heads of its K and V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):  # -1 skips; anything else outside the pool is skipped as well
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        inside = (head < NUM_HEADS) & (d < HEAD_DIM)
        k = tl.load(key + token * key_token + head * key_head + d, mask=inside)
        v = tl.load(value + token * value_token + head * value_head + d, mask=inside)
        k_at = key_cache + block * key_block + head * key_kv_head + offset * key_slot + d
        v_at = value_cache + block * value_block + head * value_kv_head + offset * value_slot + d
        tl.store(k_at, k.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(v_at, v.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit
def copy_blocks_kernel(
    key_cache, value_cache, sources, destinations, key_block, value_block, block_elements, TILE: tl.constexpr
):
    """One program per (pair, tile of a block); both caches. Blocks are contiguous, and no destination is a source."""
    pair = tl.program_id(0)
    source = tl.load(sources + pair).to(tl.int64)
    destination = tl.load(destinations + pair).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = element < block_elements
    k = tl.load(key_cache + source * key_block + element, mask=inside)
    v = tl.load(value_cache + source * value_block + element, mask=inside)
    tl.store(key_cache + destination * key_block + element, k, mask=inside)
    tl.store(value_cache + destination * value_block + element, v, mask=inside)


def cache_strides(cache: PagedKVCache) -> dict[str, int]:
    """Strides of both caches under the names that every kernel uses. ValueError if the head dimension is not dense."""
    for name, tensor in (("key_cache", cache.key_cache), ("value_cache", cache.value_cache)):
        if tensor.stride(3) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(3)} in its last dimension; the Triton kernels need 1: "
                "store head_dim innermost, or use backend 'torch'"
            )
    k, v = cache.key_cache.stride(), cache.value_cache.stride()
    return {
        "key_block": k[0], "key_kv_head": k[1], "key_slot": k[2],
        "value_block": v[0], "value_kv_head": v[1], "value_slot": v[2],
    }  # fmt: skip


def write_launch(key: Tensor, value: Tensor, cache: PagedKVCache, slots: Tensor) -> Launch:
    """key, value [T, Hkv, D] to slots [T]; what lies outside the pool is skipped."""
    key, value = rows_contiguous(key), rows_contiguous(value)
    return Launch(
        write_kv_kernel,
        (key.shape[0],),
        {
            "key": key, "value": value, "key_cache": cache.key_cache, "value_cache": cache.value_cache,
            "slots": slots, "num_slots": cache.num_slots,
            "key_token": key.stride(0), "key_head": key.stride(1),
            "value_token": value.stride(0), "value_head": value.stride(1),
            **cache_strides(cache),
        },
        {
            "NUM_HEADS": cache.num_kv_heads, "HEAD_DIM": cache.head_dim, "BLOCK_SIZE": cache.block_size,
            "BLOCK_H": block_of(cache.num_kv_heads), "BLOCK_D": block_of(cache.head_dim),
        },
        num_warps=4,
    )  # fmt: skip


def copies_directly(cache: PagedKVCache, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether `copy_blocks_kernel` may run these pairs: dense blocks, and no block is both read and written."""
    dense = all(tensor[0].is_contiguous() for tensor in (cache.key_cache, cache.value_cache))
    destinations = {destination for _, destination in pairs}
    return dense and len(destinations) == len(pairs) and destinations.isdisjoint(source for source, _ in pairs)


def copy_launch(cache: PagedKVCache, sources: Tensor, destinations: Tensor) -> Launch:
    """Block sources[i] to destinations[i] (int64 [P]) in both caches of one layer."""
    elements = cache.num_kv_heads * cache.block_size * cache.head_dim
    return Launch(
        copy_blocks_kernel,
        (sources.shape[0], -(-elements // COPY_TILE)),
        {
            "key_cache": cache.key_cache, "value_cache": cache.value_cache,
            "sources": sources, "destinations": destinations,
            "key_block": cache.key_cache.stride(0), "value_block": cache.value_cache.stride(0),
            "block_elements": elements,
        },
        {"TILE": COPY_TILE},
    )  # fmt: skip


def pair_tensors(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources and destinations, int64 [P] each; one copy to the device."""
    both = upload(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), device)
    return both[0], both[1]
