"""Linear layers, norms, rotary embedding, cache writes and block copies of the Triton back end, interpreted."""

from __future__ import annotations

import pytest
import torch
from dense_case import DTYPES, check_gated_linear, check_linear, near, norm64, randn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import Backend, QKNormRoPE, RMSNorm, RotaryTable, get_backend, write_kv_cache


@pytest.fixture
def backend() -> Backend:
    return get_backend("triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(backend: Backend, dtype: torch.dtype, rows: int, bias: bool) -> None:
    check_linear(backend, dtype, rows, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_gated_linear(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    check_gated_linear(backend, dtype, rows)


def test_a_linear_of_another_dtype_is_refused(backend: Backend) -> None:
    packed = backend.pack_linear(randn(8, 16))
    with pytest.raises(ValueError, match=r"input is torch\.bfloat16, the weight torch\.float32"):
        backend.linear(randn(2, 16).bfloat16(), packed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_table_for_embedding_and_head(backend: Backend, dtype: torch.dtype) -> None:
    weight = randn(320, 64).to(dtype)
    packed = backend.pack_linear(weight, use="both")
    ids = torch.tensor([319, 0, 7, 7])
    assert torch.equal(backend.embed(ids, packed), weight[ids])
    out = torch.full((4, 72), torch.nan, dtype=dtype)[:, :64]
    assert backend.embed(ids, packed, out=out) is out
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("size", [64, 96])
def test_rms_norm_is_hugging_faces(backend: Backend, dtype: torch.dtype, size: int) -> None:
    """Normalised in float32, rounded, times weight, rounded: at most one unit in the last place from Hugging Face."""
    hf = Qwen3RMSNorm(size, eps=1e-6).to(dtype)
    hf.weight.data = randn(size, seed=1).to(dtype)
    norm = RMSNorm(hf.weight.data, 1e-6)
    x = (randn(9, size + 16) * 5).to(dtype)[:, :size]
    torch.testing.assert_close(backend.rms_norm(x, norm), hf(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    out = torch.full((9, size + 8), torch.nan, dtype=dtype)[:, :size]
    assert backend.rms_norm(x, norm, out=out) is out
    assert torch.equal(out, backend.rms_norm(x, norm))
    heads = x[:, : size // 2 * 2].reshape(9, 2, -1)
    half = RMSNorm(norm.weight[: size // 2], 1e-6)
    assert near(backend.rms_norm(heads.float(), half), norm64(heads.float(), half))


def test_c25_fp16_norm_does_not_overflow(backend: Backend) -> None:
    """C25: 1024 values of 300, whose squares sum to 9.2e7."""
    x, norm = torch.full((2, 1024), 300.0).half(), RMSNorm(torch.ones(1024).half(), 1e-6)
    assert (backend.rms_norm(x, norm) == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False], ids=["QK-norm", "no norm"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 1, 24), (12, 3, 128)])
def test_qk_norm_rope_write(
    backend: Backend, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, normed: bool
) -> None:
    """Against the reference back end in float64; V untouched; -1 and slots outside the pool (C20) are not written."""
    rows, positions = 5, torch.tensor([3, 0, 40, 41, 7])
    qkv = randn(rows, (num_heads + 2 * num_kv_heads) * head_dim + 16).to(dtype)[:, :-16]
    angles = torch.arange(64.0)[:, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    q_norm, k_norm = (RMSNorm(randn(head_dim, seed=s).to(dtype), eps) for s, eps in ((1, 1e-6), (2, 1e-2)))
    norms = (q_norm, k_norm) if normed else (None, None)
    rotary = QKNormRoPE(*norms, RotaryTable(angles.cos(), angles.sin()), num_heads, num_kv_heads)
    slots = torch.tensor([9, 2, -1, 0, 7])

    exact = PagedKVCache(4, num_kv_heads, 3, head_dim, dtype=dtype)
    exact.fill_(torch.nan)
    wanted = get_backend("reference").qk_norm_rope_write(qkv, rotary, exact, positions, slots)
    cache = PagedKVCache(4, num_kv_heads, 3, head_dim, dtype=dtype)
    cache.fill_(torch.nan)
    out = torch.full((rows, num_heads, head_dim), torch.nan, dtype=dtype)
    assert backend.qk_norm_rope_write(qkv, rotary, cache, positions, slots, out=out) is out
    assert near(out, wanted)
    assert torch.equal(cache.key_cache.isnan(), exact.key_cache.isnan())
    assert near(cache.key_cache.nan_to_num(9), exact.key_cache.nan_to_num(9))
    assert torch.equal(cache.value_cache.nan_to_num(9), exact.value_cache.nan_to_num(9))

    before = cache.key_cache.clone(), cache.value_cache.clone()
    backend.qk_norm_rope_write(qkv, rotary, cache, positions, torch.tensor([12, -2, -1, 999, -(2**40)]))
    for tensor, old in zip((cache.key_cache, cache.value_cache), before, strict=True):
        assert torch.equal(tensor.nan_to_num(9), old.nan_to_num(9))
    assert backend.qk_norm_rope_write(qkv[:0], rotary, cache, positions[:0], slots[:0]).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_c20_write(dtype: torch.dtype) -> None:
    """C20: slots 5, -1, 7 of 4 x 4: slot 15 stays; slot 16 and -2 are errors before anything is written."""
    key, value = randn(3, 3, 24).to(dtype), randn(3, 30, 3, seed=1).to(dtype).transpose(1, 2)[..., :24]
    cache = PagedKVCache(4, 3, 4, 24, dtype=dtype)
    for wrong in (16, -2):
        with pytest.raises(IndexError, match=f"slot {wrong} is outside the pool"):
            write_kv_cache(
                key, value, cache.key_cache, cache.value_cache, torch.tensor([0, wrong, 1]), backend="triton"
            )
        assert (cache.key_cache == 0).all()
    write_kv_cache(key, value, cache.key_cache, cache.value_cache, torch.tensor([5, -1, 7]), backend="triton")
    assert torch.equal(cache.key_cache[1, :, 1], key[0])
    assert torch.equal(cache.value_cache[1, :, 3], value[2])
    assert int((cache.key_cache != 0).sum()) == 2 * 3 * 24


def test_kernels_that_write_skip_what_lies_outside() -> None:
    from minipaged.ops.triton.kernels.cache_write import write_launch

    key, around = randn(4, 3, 24), [torch.zeros(6, 3, 4, 24) for _ in range(2)]  # the pool is blocks 1 to 4 of it
    cache = PagedKVCache(4, 3, 4, 24, storage=(around[0][1:5], around[1][1:5]))
    slots = torch.tensor([16, -2, -1, 2**40])
    write_launch(key, key, cache, slots).run()
    norm, rope = RMSNorm(torch.ones(24), 1e-6), RotaryTable(torch.ones(1, 12), torch.zeros(1, 12))
    qkv, positions = randn(4, 9 * 24), torch.zeros(4, dtype=torch.int64)
    get_backend("triton").qk_norm_rope_write(qkv, QKNormRoPE(norm, norm, rope, 3, 3), cache, positions, slots)
    assert (around[0] == 0).all()
    assert (around[1] == 0).all()


def test_copy_blocks(backend: Backend) -> None:
    """Disjoint pairs through the kernel, chains as if at once, views that are not dense, errors before any copy."""
    caches = []
    for layer in range(2):
        both = randn(6, 2, 3, 4, 8, seed=layer)  # K and V interleaved by block
        caches.append(PagedKVCache(6, 3, 4, 8, storage=(both[:, 0], both[:, 1])))
    for pairs in ([], [(0, 1), (2, 5), (0, 3)], [(1, 2), (2, 3)]):
        expected = [(cache.key_cache.clone(), cache.value_cache.clone()) for cache in caches]
        for k, v in expected:
            old_k, old_v = k.clone(), v.clone()
            for source, destination in pairs:
                k[destination], v[destination] = old_k[source], old_v[source]
        backend.copy_blocks(caches, pairs)
        for cache, (k, v) in zip(caches, expected, strict=True):
            assert torch.equal(cache.key_cache, k)
            assert torch.equal(cache.value_cache, v)
    for wrong, error in (([(0, 6)], IndexError), ([(0, 1), (2, 1)], ValueError)):
        with pytest.raises(error, match="nothing was copied"):
            backend.copy_blocks(caches, wrong)
