"""The kernel shapes that published Qwen3 models start: what has to compile, without spills, for every GPU we name.

Built by the same functions that serve, from tensors without memory (device "meta").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import QKNormRoPE, RMSNorm, RotaryTable
from minipaged.ops.triton.kernels import cache_write, decode_attention, dense, varlen_attention
from minipaged.ops.triton.kernels.launch import Launch
from minipaged.ops.triton.kernels.tuning import Tile, varlen_tile

BF16, F32 = torch.bfloat16, torch.float32


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(block_size: int, dtype: torch.dtype = BF16, head_dim: int = 128) -> PagedKVCache:
    shape = (1024, 8, block_size, head_dim)
    storage = (_empty(*shape, dtype=dtype), _empty(*shape, dtype=dtype))
    return PagedKVCache(*shape, storage=storage)


def decode(
    block_size: int,
    group: int,
    *,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> list[Launch]:
    """The attention kernel and the one that joins its splits, 64 sequences of up to 8192 tokens."""
    query = _empty(64, 8 * group, head_dim, dtype=dtype)
    rows = decode_attention.DecodeRows(
        _empty(64, -(-8192 // block_size), dtype=torch.int32),
        _empty(64, dtype=torch.int32),
        _empty(65, dtype=torch.int32),
        decode_attention.splits_of(8192),
    )
    partial = _empty(64, 8 * group, rows.max_splits, head_dim, dtype=F32)
    return list(
        decode_attention.decode_launches(
            query, _cache(block_size, cache_dtype or dtype, head_dim), rows, 0.1, query, partial, partial[..., 0], tile
        )
    )


def varlen(
    block_size: int,
    group: int,
    *,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    arch: int = 90,
) -> Launch:
    """A step of 8192 tokens in 4 sequences. arch: whose default tile, without `tile`."""
    tile = tile or varlen_tile(head_dim, torch.promote_types(dtype, cache_dtype or dtype), block_size, group, arch)
    query = _empty(8192, 8 * group, head_dim, dtype=dtype)
    rows = varlen_attention.VarlenRows(
        _empty(4, -(-8192 // block_size), dtype=torch.int32),
        _empty(4, dtype=torch.int32),
        _empty(5, dtype=torch.int32),
        tokens_before=0,
    )
    return varlen_attention.varlen_launch(
        query, _cache(block_size, cache_dtype or dtype, head_dim), rows, 0.1, query, tile
    )


def _qk(num_heads: int) -> Launch:
    qkv, slots = _empty(64, (num_heads + 16) * 128), _empty(64, dtype=torch.int64)
    norm, table = RMSNorm(_empty(128), 1e-6), _empty(40960, 64, dtype=F32)
    rotary = QKNormRoPE(norm, norm, RotaryTable(table, table), num_heads, 8)
    return dense.qk_norm_rope_write_launch(qkv, rotary, _cache(16), slots, slots, _empty(64, num_heads, 128))


def _norm(size: int) -> Launch:
    return dense.rms_norm_launch(_empty(64, size), RMSNorm(_empty(size), 1e-6), _empty(64, size))


def _write() -> Launch:
    tokens = _empty(64, 8, 128)
    return cache_write.write_launch(tokens, tokens, _cache(16), _empty(64, dtype=torch.int64))


def _copy() -> Launch:
    ids = _empty(4, dtype=torch.int64)
    return cache_write.copy_launch(_cache(16), ids, ids)


SHIPPED: dict[str, Callable[[int], Launch]] = {
    "write_kv": lambda arch: _write(),
    "copy_blocks": lambda arch: _copy(),
    "qk_norm_rope_write, 16 heads (0.6B, 1.7B)": lambda arch: _qk(16),
    "rms_norm 1024 (0.6B)": lambda arch: _norm(1024),
    "rms_norm 5120 (14B, 32B)": lambda arch: _norm(5120),
    "silu_mul": lambda arch: dense.silu_mul_launch(_empty(64, 2 * 3072), _empty(64, 3072)),
    "decode, blocks of 16, group 2 (0.6B)": lambda arch: decode(16, 2)[0],
    "decode, blocks of 64, group 4 (4B, 8B)": lambda arch: decode(64, 4)[0],
    "join_splits": lambda arch: decode(16, 2)[1],
    "varlen, blocks of 16, group 2 (0.6B)": lambda arch: varlen(16, 2, arch=arch),
    "varlen, blocks of 64, group 4 (4B, 8B)": lambda arch: varlen(64, 4, arch=arch),
    "varlen float32, blocks of 16, group 2": lambda arch: varlen(16, 2, dtype=F32, arch=arch),
}  # fmt: skip
"""By name, from an architecture (80, 90, 100). At most 12: each one costs seconds of CI."""
