"""Paged attention: right, and the same bits however a sequence is chunked, batched and placed."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_problem import Problem, same_bits

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch
from minipaged.ops.cpu.backend import NativeBackend


@pytest.mark.parametrize("dim", [16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (4, 4), (14, 2)])
def test_c24_error_is_no_larger_than_torchs(
    any_isa: NativeBackend, dtype: torch.dtype, dim: int, heads: int, kv_heads: int
) -> None:
    length = 700
    problem = Problem.random([length], heads, kv_heads, dim, dtype)
    exact = problem.exact(0, 600, length)
    ours = (problem.run(any_isa, [(0, 600, length)], block_size=5)[0].double() - exact).pow(2).mean().sqrt()
    torchs = (problem.exact(0, 600, length, dtype).double() - exact).pow(2).mean().sqrt()
    allowed = 1.6 if any_isa.isa == "portable" else 1.1  # unfused products are rounded as well
    assert ours <= allowed * torchs, f"{ours:.3g} against torch's {torchs:.3g}"


@pytest.mark.parametrize("dim", range(16, 257, 8))
def test_c24_every_head_dim(backend: NativeBackend, dim: int) -> None:
    block_size = 1 + dim * 7 % 256
    problem = Problem.random([1, 3, 65, 513], 3, 1, dim, torch.float32)
    spans = [(0, 0, 1), (1, 2, 3), (2, 60, 65), (3, 512, 513)]
    for span, result in zip(spans, problem.run(backend, spans, block_size=block_size), strict=True):
        torch.testing.assert_close(result.double(), problem.exact(*span), rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025])
def test_c24_lengths_around_every_border(backend: NativeBackend, length: int) -> None:
    problem = Problem.random([length], 4, 2, 32, torch.float32)
    for block_size, first in itertools.product((1, 3, 4, 16, 32), {0, length // 2, length - 1}):
        result = problem.run(backend, [(0, first, length)], block_size=block_size)[0]
        torch.testing.assert_close(result.double(), problem.exact(0, first, length), rtol=0, atol=1e-5)


def test_c23_heads_map_to_their_group(backend: NativeBackend, dtype: torch.dtype) -> None:
    for heads, kv_heads in ((4, 2), (6, 2), (8, 2), (28, 4), (32, 8), (4, 4), (4, 1), (200, 1)):
        problem = Problem.random([20], heads, kv_heads, 16, dtype)
        problem.values[0] = torch.arange(1.0, kv_heads + 1).to(dtype).view(1, -1, 1).expand(20, -1, 16).contiguous()
        result = problem.run(backend, [(0, 11, 20)])[0]
        expected = torch.arange(heads) // (heads // kv_heads) + 1.0
        torch.testing.assert_close(result.float(), expected.view(1, -1, 1).expand(9, -1, 16))


def test_c21_empty_rows_give_zeros(backend: NativeBackend, dtype: torch.dtype) -> None:
    cache = PagedKVCache(4, 2, 4, 16, dtype=dtype)
    cache.fill_(float("nan"))
    cache.write(torch.ones(3, 2, 16), torch.full((3, 2, 16), 2.0), torch.tensor([8, 9, 10]))
    batch = AttentionBatch(
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([[-1], [2], [99]], dtype=torch.int32),
        torch.tensor([0, 3, 0], dtype=torch.int32),
        torch.tensor([0, 1, 2, 5], dtype=torch.int32),
        3,
        3,
    )
    query = torch.randn(5, 4, 16).to(dtype)
    out = backend.attention(query, cache, backend.plan(batch), out=torch.full((5, 4, 16), torch.nan, dtype=dtype))
    assert torch.equal(out[1], torch.full((4, 16), 2.0, dtype=dtype))
    assert bool((out[[0, 2, 3, 4]] == 0).all())


def test_c20_a_needed_block_outside_the_pool_is_an_error(backend: NativeBackend) -> None:
    cache = PagedKVCache(4, 1, 4, 16, dtype=torch.float32)
    for wrong in (-1, 4, 2**31 - 1, -(2**31)):
        batch = AttentionBatch(
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
            torch.tensor([[1, wrong]], dtype=torch.int32),
            torch.tensor([5], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            1,
            5,
        )
        with pytest.raises(IndexError, match="block"):
            backend.attention(torch.ones(1, 1, 16), cache, backend.plan(batch))


LENGTHS = [700, 130, 64, 1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 128), (3, 3, 16), (10, 2, 40), (1, 1, 64), (3, 1, 64), (4, 1, 192)]
)
def test_same_bits_for_any_chunks_batches_blocks_and_threads(
    any_isa: NativeBackend, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Each sequence whole and alone is the measure; NaN and rubbish lie wherever nothing may be read."""
    problem = Problem.random(LENGTHS, heads, kv_heads, dim, dtype)
    whole = [problem.run(any_isa, [(s, 0, n)])[0] for s, n in enumerate(LENGTHS)]
    two = NativeBackend(threads=2, isa=any_isa.isa)
    for seed, chunk in enumerate((7, 16, 100, 512, 1000)):
        for start in range(0, max(LENGTHS), chunk):
            spans = [(s, start, min(n, start + chunk)) for s, n in enumerate(LENGTHS) if start < n]
            if chunk < 50 and start % 3:  # a third of the many small chunks is enough
                continue
            results = problem.run((any_isa, two)[seed % 2], spans, block_size=(16, 1, 128, 3, 64)[seed], seed=seed)
            for (s, first, last), result in zip(spans, results, strict=True):
                assert same_bits(result, whole[s][first:last]), f"chunk {chunk} at {first} of sequence {s}"
    decodes = [(0, n - 1, n) for n in (1, 2, 63, 64, 65, 128, 511, 512, 513, 640, 700)]
    for block_size in (1, 2, 5, 16, 100, 128, 256):
        together = problem.run(two, decodes, block_size=block_size, seed=block_size)
        mixed = problem.run(two, [*decodes[3:], (1, 30, 100)], block_size=block_size)
        for (_, first, last), result in zip(decodes, together, strict=True):
            assert same_bits(result, whole[0][first:last]), f"decode of {last} at block size {block_size}"
        for (s, first, last), result in zip([*decodes[3:], (1, 30, 100)], mixed, strict=True):
            assert same_bits(result, whole[s][first:last])


def test_control_another_order_of_keys_is_noticed(backend: NativeBackend, dtype: torch.dtype) -> None:
    problem = Problem.random([300], 2, 1, 64, dtype)
    whole = problem.run(backend, [(0, 299, 300)])[0]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    problem.keys[0], problem.values[0] = problem.keys[0][order], problem.values[0][order]
    other = problem.run(backend, [(0, 299, 300)])[0]
    torch.testing.assert_close(other, whole, rtol=0.02, atol=0.01)
    assert not same_bits(other, whole)
