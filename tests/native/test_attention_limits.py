"""Attention at the edge: scores of any size, and batches that contradict themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch
from minipaged.ops.cpu.backend import NativeBackend

NOTHING = torch.empty(0, dtype=torch.int64)


def a_batch(lengths: list[int], starts: list[int], width: int = 5) -> AttentionBatch:
    tables = torch.arange(width, dtype=torch.int32).expand(len(lengths), width).contiguous()
    seq_lens, query_starts = torch.tensor(lengths, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    return AttentionBatch(NOTHING, NOTHING, tables, seq_lens, query_starts, 1, max(lengths))


def attend(backend: NativeBackend, query: Tensor, cache: PagedKVCache, batch: AttentionBatch) -> Tensor:
    return backend.attention(query, cache, backend.plan(batch))


@pytest.mark.parametrize("size", [1e3, 2e4, 1e5, 1e6])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_c25_huge_scores_give_the_value_of_the_best_key(
    any_isa: NativeBackend, dtype: torch.dtype, dim: int, size: float
) -> None:
    """Scores up to 1e13: one key is ahead of all others by far, and rounding must not turn its weight into infinity."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(5, 1, 16, dim, dtype=dtype)
    keys = (torch.randn(70, 1, dim, generator=generator) * size).to(dtype)
    values = torch.randn(70, 1, dim, generator=generator).to(dtype)
    cache.write(keys, values, torch.arange(70))
    query = keys[5:6].expand(1, 2, dim).contiguous()
    result = attend(any_isa, query, cache, a_batch([70], [0, 1]))
    scores = (keys[:, 0].double() @ query[0, 0].double()) * dim**-0.5
    expected = (torch.softmax(scores, 0) @ values[:, 0].double()).expand(2, dim)
    torch.testing.assert_close(result[0].double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([0, 4], [0, 3_000_000, 1]), ([4], [-4, 0]), ([4], [2, 3]), ([4, 4], [0, 3, 1]), ([-1], [0, 1])],
)
def test_contradictory_lengths_are_refused_before_anything_is_written(
    backend: NativeBackend, lengths: list[int], starts: list[int]
) -> None:
    cache, query = PagedKVCache(5, 1, 16, 64), torch.ones(4, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="contradict each other"):
        attend(backend, query, cache, a_batch(lengths, starts))


def test_a_length_beyond_its_table_is_refused_at_once(backend: NativeBackend) -> None:
    """Not after a walk over 33 million tiles that do not exist."""
    cache, query = PagedKVCache(5, 1, 16, 64), torch.ones(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="block table"):
        attend(backend, query, cache, a_batch([2**31 - 1], [0, 1]))


def test_senseless_arguments_are_refused(backend: NativeBackend) -> None:
    cache = PagedKVCache(5, 2, 16, 64)
    with pytest.raises(ValueError, match="does not fit"):
        attend(backend, torch.ones(1, 0, 64, dtype=torch.bfloat16), cache, a_batch([3], [0, 1]))
    with pytest.raises(ValueError, match="bias has shape"):
        backend.pack_linear(torch.randn(64, 64), torch.randn(7))
    with pytest.raises(ValueError, match="threads must be at least 1, got -1"):
        NativeBackend(threads=-1)
