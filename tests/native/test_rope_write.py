"""QK-norm, rotation and cache write in one pass, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from paged_problem import same_bits

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import RMSNorm, RotaryTable
from minipaged.ops.cpu.backend import NativeBackend


def problem(dim: int, dtype: torch.dtype, tokens: int = 9) -> tuple[torch.Tensor, RMSNorm, RMSNorm, RotaryTable]:
    g = torch.Generator().manual_seed(dim)
    angles = torch.arange(200.0)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    qkv = (torch.randn(tokens, 9 * dim, generator=g) * 3).to(dtype)
    q_norm, k_norm = (RMSNorm((1 + torch.randn(dim, generator=g) / 4).to(dtype), 1e-6) for _ in range(2))
    return qkv, q_norm, k_norm, RotaryTable(angles.cos(), angles.sin())


def rotated(x: torch.Tensor, norm: RMSNorm, rope: RotaryTable, positions: torch.Tensor) -> torch.Tensor:
    x = x.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    a, b = x.chunk(2, dim=-1)
    cos, sin = (t[positions].double()[:, None] for t in (rope.cos, rope.sin))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("dim", [16, 24, 40, 64, 128, 256])
def test_c27_against_float64(any_isa: NativeBackend, dtype: torch.dtype, dim: int) -> None:
    qkv, q_norm, k_norm, rope = problem(dim, dtype)
    positions = torch.tensor([0, 1, 2, 199, 50, 7, 8, 9, 10])
    slots = torch.tensor([5, -1, 7, 0, 11, 10_000, 9, 1, 3])  # -1 and what lies outside the pool are skipped
    cache = PagedKVCache(3, 2, 4, dim, dtype=dtype)
    cache.fill_(-9.0)
    query = any_isa.qk_norm_rope_write(qkv, q_norm, k_norm, rope, positions, cache, slots)
    q, k, v = qkv.view(9, 9, dim).split([5, 2, 2], dim=1)
    unit = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(query.double(), rotated(q, q_norm, rope, positions), rtol=unit, atol=unit)
    expected_key = rotated(k, k_norm, rope, positions)
    written = {int(slot): t for t, slot in enumerate(slots) if 0 <= slot < 12}
    for slot in range(12):
        key, value = cache.key_cache[slot // 4, :, slot % 4], cache.value_cache[slot // 4, :, slot % 4]
        if slot in written:
            torch.testing.assert_close(key.double(), expected_key[written[slot]], rtol=unit, atol=unit)
            assert same_bits(value.contiguous(), v[written[slot]].contiguous())
        else:
            assert bool((key == -9).all() and (value == -9).all())


def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    qkv, q_norm, k_norm, rope = problem(128, dtype, tokens=64)
    positions = torch.arange(64) + 30
    cache, other = (PagedKVCache(4, 2, 16, 128, dtype=dtype) for _ in range(2))
    slots = torch.randperm(64)
    query = NativeBackend(threads=2).qk_norm_rope_write(qkv, q_norm, k_norm, rope, positions, cache, slots)
    for t in range(64):
        one = slice(t, t + 1)
        alone = NativeBackend(threads=1).qk_norm_rope_write(
            qkv[one], q_norm, k_norm, rope, positions[one], other, slots[one]
        )
        assert same_bits(alone, query[one])
    assert same_bits(cache.key_cache, other.key_cache)
    assert same_bits(cache.value_cache, other.value_cache)


def test_position_outside_the_table(backend: NativeBackend) -> None:
    qkv, q_norm, k_norm, rope = problem(16, torch.float32)
    cache = PagedKVCache(3, 2, 4, 16, dtype=torch.float32)
    with pytest.raises(IndexError, match="max_model_len"):
        backend.qk_norm_rope_write(qkv, q_norm, k_norm, rope, torch.full((9,), 200), cache, torch.arange(9))


@pytest.mark.parametrize("wrong", ["both norms", "the norm of q", "the norm of k", "the tables"])
def test_constants_of_another_head_dim_are_refused(backend: NativeBackend, wrong: str) -> None:
    """The kernel would read beyond their ends."""
    qkv, q_norm, k_norm, rope = problem(64, torch.float32)
    _, short_q, short_k, short_rope = problem(32, torch.float32)
    cache, positions = PagedKVCache(3, 2, 4, 64, dtype=torch.float32), torch.arange(9)
    q = short_q if wrong in ("both norms", "the norm of q") else q_norm
    k = short_k if wrong in ("both norms", "the norm of k") else k_norm
    table = short_rope if wrong == "the tables" else rope
    with pytest.raises(ValueError, match="do not fit head_dim 64"):
        backend.qk_norm_rope_write(qkv, q, k, table, positions, cache, positions)
    assert not cache.key_cache.any()
