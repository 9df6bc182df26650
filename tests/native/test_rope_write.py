"""QK-norm, rotation and cache write in one pass, against the formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_problem import same_bits

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import QKNormRoPE, RMSNorm, RotaryTable
from minipaged.ops.cpu.backend import NativeBackend


def problem(dim: int, dtype: torch.dtype, tokens: int = 9) -> tuple[torch.Tensor, QKNormRoPE]:
    g = torch.Generator().manual_seed(dim)
    angles = torch.arange(200.0)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    qkv = (torch.randn(tokens, 9 * dim, generator=g) * 3).to(dtype)
    q_norm, k_norm = (RMSNorm((1 + torch.randn(dim, generator=g) / 4).to(dtype), 1e-6) for _ in range(2))
    return qkv, QKNormRoPE(q_norm, k_norm, RotaryTable(angles.cos(), angles.sin()), 5, 2)


def rotated(x: torch.Tensor, norm: RMSNorm | None, rope: RotaryTable, positions: torch.Tensor) -> torch.Tensor:
    assert norm is not None
    x = x.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    a, b = x.chunk(2, dim=-1)
    cos, sin = (t[positions].double()[:, None] for t in (rope.cos, rope.sin))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("dim", [16, 24, 40, 64, 128, 256])
def test_c27_against_float64(any_isa: NativeBackend, dtype: torch.dtype, dim: int) -> None:
    qkv, rotary = problem(dim, dtype)
    positions = torch.tensor([0, 1, 2, 199, 50, 7, 8, 9, 10])
    slots = torch.tensor([5, -1, 7, 0, 11, 10_000, 9, 1, 3])  # -1 and what lies outside the pool are skipped
    cache = PagedKVCache(3, 2, 4, dim, dtype=dtype)
    cache.fill_(-9.0)
    query = any_isa.qk_norm_rope_write(qkv, any_isa.pack_rotary(rotary), cache, positions, slots)
    q, k, v = qkv.view(9, 9, dim).split([5, 2, 2], dim=1)
    unit = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(query.double(), rotated(q, rotary.q_norm, rotary.rope, positions), rtol=unit, atol=unit)
    expected_key = rotated(k, rotary.k_norm, rotary.rope, positions)
    written = {int(slot): t for t, slot in enumerate(slots) if 0 <= slot < 12}
    for slot in range(12):
        key, value = cache.key_cache[slot // 4, :, slot % 4], cache.value_cache[slot // 4, :, slot % 4]
        if slot in written:
            torch.testing.assert_close(key.double(), expected_key[written[slot]], rtol=unit, atol=unit)
            assert same_bits(value.contiguous(), v[written[slot]].contiguous())
        else:
            assert bool((key == -9).all() and (value == -9).all())


def test_a_token_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    qkv, rotary = problem(128, dtype, tokens=64)
    positions = torch.arange(64) + 30
    cache, other = (PagedKVCache(4, 2, 16, 128, dtype=dtype) for _ in range(2))
    slots = torch.randperm(64)
    two, one_thread = NativeBackend(threads=2), NativeBackend(threads=1)
    query = two.qk_norm_rope_write(qkv, two.pack_rotary(rotary), cache, positions, slots)
    rotary = one_thread.pack_rotary(rotary)
    for t in range(64):
        one = slice(t, t + 1)
        alone = one_thread.qk_norm_rope_write(qkv[one], rotary, other, positions[one], slots[one])
        assert same_bits(alone, query[one])
    assert same_bits(cache.key_cache, other.key_cache)
    assert same_bits(cache.value_cache, other.value_cache)


def test_position_outside_the_table(backend: NativeBackend) -> None:
    qkv, rotary = problem(16, torch.float32)
    cache = PagedKVCache(3, 2, 4, 16, dtype=torch.float32)
    with pytest.raises(IndexError, match="max_model_len"):
        backend.qk_norm_rope_write(qkv, backend.pack_rotary(rotary), cache, torch.full((9,), 200), torch.arange(9))


@pytest.mark.parametrize("wrong", ["both norms", "the norm of q", "the norm of k", "the tables", "one norm is missing"])
def test_constants_that_do_not_fit_together_are_refused_at_load(wrong: str) -> None:
    """The kernel would read beyond their ends."""
    (_, long), (_, short) = problem(64, torch.float32), problem(32, torch.float32)
    others: dict[str, dict[str, Any]] = {
        "both norms": {"q_norm": short.q_norm, "k_norm": short.k_norm},
        "the norm of q": {"q_norm": short.q_norm},
        "the norm of k": {"k_norm": short.k_norm},
        "the tables": {"rope": short.rope},
        "one norm is missing": {"q_norm": None},
    }
    with pytest.raises(ValueError, match="norms of queries and keys must both have"):
        replace(long, **others[wrong])
    with pytest.raises(ValueError, match=r"cos and sin must be \[max_position, D / 2\] both"):
        replace(long, rope=RotaryTable(long.rope.cos, short.rope.sin))


@pytest.mark.parametrize("wrong", ["another head_dim", "another number of kv heads", "a narrow qkv", "slots", "out"])
def test_a_call_that_does_not_fit_its_layer_is_refused(backend: NativeBackend, wrong: str) -> None:
    """Nothing is written then."""
    qkv, rotary = problem(64, torch.float32)
    shape = (3, 3 if "kv heads" in wrong else 2, 4, 32 if "head_dim" in wrong else 64)
    cache, positions = PagedKVCache(*shape, dtype=torch.float32), torch.arange(9)
    qkv = qkv[:, :-64] if wrong == "a narrow qkv" else qkv
    slots = positions[:8] if wrong == "slots" else positions
    out = torch.empty(9, 4, 64) if wrong == "out" else None
    with pytest.raises(ValueError, match=r"do not fit a layer|9 tokens, 9 positions and 8 slots|out has shape"):
        backend.qk_norm_rope_write(qkv, backend.pack_rotary(rotary), cache, positions, slots, out=out)
    assert not cache.key_cache.any()


def test_a_layer_without_norms_is_refused_by_name(backend: NativeBackend) -> None:
    _, rotary = problem(64, torch.float32)
    with pytest.raises(ValueError, match=r"back end 'cpu' normalise .*without QK-norm, backend='torch' can"):
        backend.pack_rotary(replace(rotary, q_norm=None, k_norm=None))
