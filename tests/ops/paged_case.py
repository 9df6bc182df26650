"""Builds paged attention problems in which everything that must not be read is poisoned; solves them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RUBBISH = (-1, 0, 999, 2**31 - 1, -(2**31))


@dataclass
class PagedCase:
    query: Tensor  # [T, Hq, D]
    key_cache: Tensor  # [N, Hkv, Bs, D], NaN wherever no token lives
    value_cache: Tensor
    block_tables: Tensor  # int32 [B, M], rubbish after the last needed block
    seq_lens: Tensor
    query_start_loc: Tensor
    keys: list[Tensor]  # per sequence, [L, Hkv, D]
    values: list[Tensor]

    @property
    def decode_arguments(self) -> tuple[Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return *self.decode_arguments, self.query_start_loc

    def chunk(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Arguments for tokens start : stop of the one sequence there is, all tokens before them being in the cache."""
        lengths = torch.tensor([stop], dtype=torch.int32)
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        return self.query[start:stop], self.key_cache, self.value_cache, self.block_tables, lengths, starts

    def expected(self, scale: float | None = None) -> Tensor:
        """Plain softmax attention over each sequence's own K and V, float64 [T, Hq, D]."""
        starts = self.query_start_loc.tolist()
        rows = [
            dense_attention(self.query[starts[b] : starts[b + 1]], k, v, scale)
            for b, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
        ]
        return torch.cat(rows) if rows else self.query.double()


def dense_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
    """query [q, Hq, D] are the last q of the L tokens; keys, values [L, Hkv, D]. Float64, scores written out."""
    num_queries, num_heads, head_dim = query.shape
    length, num_kv_heads = keys.shape[:2]
    if length == 0:
        return torch.zeros(query.shape, dtype=torch.float64)
    group = num_heads // num_kv_heads
    k = keys.double().repeat_interleave(group, dim=1)
    v = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->hql", query.double(), k) * (head_dim**-0.5 if scale is None else scale)
    position = torch.arange(length - num_queries, length)
    scores = scores.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
    return torch.einsum("hql,lhd->qhd", torch.softmax(scores, dim=-1), v)


def make_case(
    lengths: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> PagedCase:
    """Random sequences whose blocks lie shuffled in a pool with spares. query_lens None: one query each."""
    rng = torch.Generator().manual_seed(seed)
    query_lens = [1] * len(lengths) if query_lens is None else query_lens
    cache_dtype = cache_dtype or dtype
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    physical = torch.randperm(num_blocks, generator=rng).tolist()
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    key_cache = torch.full(shape, torch.nan, dtype=cache_dtype)
    value_cache = torch.full(shape, torch.nan, dtype=cache_dtype)
    width = max(needed, default=0) + 2
    tables = torch.tensor([[RUBBISH[(b + j) % len(RUBBISH)] for j in range(width)] for b in range(len(lengths))])
    tables = tables.reshape(len(lengths), width).int()
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = [physical.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        keys.append(torch.randn(length, num_kv_heads, head_dim, generator=rng).to(cache_dtype))
        values.append(torch.randn(length, num_kv_heads, head_dim, generator=rng).to(cache_dtype))
        for logical, block in enumerate(blocks):
            tokens = slice(logical * block_size, min(length, (logical + 1) * block_size))
            fill = tokens.stop - tokens.start
            key_cache[block, :, :fill] = keys[-1][tokens].transpose(0, 1)
            value_cache[block, :, :fill] = values[-1][tokens].transpose(0, 1)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return PagedCase(
        torch.randn(sum(query_lens), num_heads, head_dim, generator=rng).to(dtype),
        key_cache,
        value_cache,
        tables,
        torch.tensor(lengths, dtype=torch.int32),
        starts,
        keys,
        values,
    )


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Absolute error at most `tolerance`, nothing NaN."""
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual).all())
    error = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert error <= tolerance, f"largest error {error:.3g} > {tolerance}"
