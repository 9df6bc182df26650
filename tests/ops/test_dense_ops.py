"""Linear layers, norms, rotary embedding of both back ends against float64 and against Hugging Face's Qwen3."""

from __future__ import annotations

import pytest
import torch
from dense_case import DTYPES, check_gated_linear, check_linear, near, randn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import Backend, QKNormRoPE, RMSNorm, RotaryTable, get_backend
from minipaged.ops.torch import linear as torch_linear


@pytest.fixture(params=["reference", "torch", "torch without packing"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "torch without packing":
        monkeypatch.setattr(torch_linear, "packing_works", lambda dtype: False)
    return get_backend(request.param.split()[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(backend: Backend, dtype: torch.dtype, rows: int, bias: bool) -> None:
    check_linear(backend, dtype, rows, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_gated_linear(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    check_gated_linear(backend, dtype, rows)


@pytest.mark.parametrize("use", ["linear", "embed", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_table_for_embedding_and_head(backend: Backend, dtype: torch.dtype, use: str) -> None:
    """Whatever was announced, both calls work, and rows come back exactly."""
    weight = randn(320, 64).to(dtype)
    packed = backend.pack_linear(weight.clone(), use=use)  # type: ignore[arg-type]
    ids = torch.tensor([319, 0, 7, 7])
    assert torch.equal(backend.embed(ids, packed), weight[ids])
    out = torch.full((4, 72), torch.nan, dtype=dtype)[:, :64]
    assert backend.embed(ids, packed, out=out) is out
    assert torch.equal(out, weight[ids])
    x = randn(3, 64, seed=1).to(dtype) / 8
    assert near(backend.linear(x, packed), x.double() @ weight.double().T)
    assert backend.embed(ids[:0], packed).shape == (0, 64)


@pytest.mark.parametrize("use", ["linear", "embed", "both"])
def test_packing_keeps_nothing_of_its_arguments(backend: Backend, use: str) -> None:
    """`copies_weights`: the caller may overwrite or unmap what it handed over."""
    assert backend.copies_weights
    weight, bias = randn(8, 16), randn(8, seed=1)
    packed = backend.pack_linear(weight, bias, use=use)  # type: ignore[arg-type]
    x = randn(2, 16, seed=2)
    expected = x.double() @ weight.double().T + bias.double()
    weight.fill_(torch.nan)
    bias.fill_(torch.nan)
    assert near(backend.linear(x, packed), expected)


def test_linear_of_another_dtype_is_refused() -> None:
    backend = get_backend("torch")
    packed = backend.pack_linear(randn(8, 16))
    with pytest.raises(ValueError, match=r"input is torch.bfloat16, the weight torch.float32"):
        backend.linear(randn(2, 16).bfloat16(), packed)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_rms_norm_is_hugging_faces(dtype: torch.dtype) -> None:
    """Torch back end: bit for bit (normalised in float32, rounded, times weight). Reference: within one rounding."""
    hf = Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    hf.weight.data = randn(64, seed=1).to(dtype)
    norm = RMSNorm(hf.weight.data, 1e-6)
    x = (randn(9, 80) * 5).to(dtype)[:, :64]
    expected = hf(x)
    assert torch.equal(get_backend("torch").rms_norm(x, norm), expected)
    out = torch.full((9, 72), torch.nan, dtype=dtype)[:, :64]
    assert get_backend("torch").rms_norm(x, norm, out=out) is out
    assert torch.equal(out, expected)
    torch.testing.assert_close(get_backend("reference").rms_norm(x, norm), expected)


def test_c25_fp16_norm_does_not_overflow() -> None:
    """C25: 1024 values of 300, whose squares sum to 9.2e7."""
    x, norm = torch.full((2, 1024), 300.0).half(), RMSNorm(torch.ones(1024).half(), 1e-6)
    for name in ("reference", "torch"):
        assert (get_backend(name).rms_norm(x, norm) == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 1, 24), (3, 3, 128)])
def test_qk_norm_rope_write(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Norm per head, then rotation, as Hugging Face's attention does; V goes to the cache untouched; -1 is skipped."""
    rows, positions = 5, torch.tensor([3, 0, 40, 41, 7])
    qkv = randn(rows, (num_heads + 2 * num_kv_heads) * head_dim + 16).to(dtype)[:, :-16]
    angles = torch.arange(64.0)[:, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    rope = RotaryTable(angles.cos(), angles.sin())
    norms = []
    for seed in (1, 2):
        hf = Qwen3RMSNorm(head_dim)
        hf.weight.data = randn(head_dim, seed=seed).to(dtype)
        norms.append(hf)

    heads = qkv.reshape(rows, -1, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = (torch.cat([t[positions]] * 2, dim=-1)[None] for t in rope_pair(rope))
    q_rotated, k_rotated = apply_rotary_pos_emb(
        norms[0](q)[None].transpose(1, 2).float(), norms[1](k)[None].transpose(1, 2).float(), cos, sin
    )
    expected_q, expected_k = q_rotated[0].transpose(0, 1), k_rotated[0].transpose(0, 1)

    slots = torch.tensor([9, 2, -1, 0, 7])
    for name in ("reference", "torch"):
        cache = PagedKVCache(4, num_kv_heads, 3, head_dim, dtype=dtype)
        cache.fill_(torch.nan)
        out = torch.full((rows, num_heads, head_dim), torch.nan, dtype=dtype)
        backend = get_backend(name)
        q_norm, k_norm = (RMSNorm(norm.weight.data, 1e-6) for norm in norms)
        rotary = backend.pack_rotary(QKNormRoPE(q_norm, k_norm, rope, num_heads, num_kv_heads))
        assert backend.qk_norm_rope_write(qkv, rotary, cache, positions, slots, out=out) is out
        assert near(out, expected_q)
        assert torch.equal(backend.qk_norm_rope_write(qkv, rotary, cache, positions, slots), out)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert near(cache.key_cache[slot // 3, :, slot % 3], expected_k[row])
                assert torch.equal(cache.value_cache[slot // 3, :, slot % 3], v[row])
        assert int(cache.key_cache.isnan().sum()) == (12 - 4) * num_kv_heads * head_dim
        empty = backend.qk_norm_rope_write(qkv[:0], rotary, cache, positions[:0], slots[:0])
        assert empty.shape == (0, num_heads, head_dim)


def rope_pair(rope: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.cos, rope.sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_without_qk_norm_heads_are_rotated_as_they_are(name: str, dtype: torch.dtype) -> None:
    """The attention of Qwen2 and Llama, into a cache of another type."""
    backend, positions, slots = get_backend(name), torch.tensor([3, 0, 40]), torch.tensor([9, 2, 0])
    qkv = randn(3, 8 * 16).to(dtype)
    angles = torch.arange(64.0)[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)
    rotary = backend.pack_rotary(QKNormRoPE(None, None, RotaryTable(angles.cos(), angles.sin()), 4, 2))
    cache = PagedKVCache(4, 2, 3, 16, dtype=torch.bfloat16 if dtype == torch.float32 else torch.float32)
    query = backend.qk_norm_rope_write(qkv, rotary, cache, positions, slots)
    q, k, v = qkv.view(3, 8, 16).split([4, 2, 2], dim=1)
    cos, sin = (torch.cat([t[positions]] * 2, dim=-1)[None] for t in rope_pair(rotary.rope))
    expected_q, expected_k = apply_rotary_pos_emb(
        q[None].transpose(1, 2).float(), k[None].transpose(1, 2).float(), cos, sin
    )
    assert query.dtype == dtype
    assert near(query, expected_q[0].transpose(0, 1))
    for row, slot in enumerate(slots.tolist()):
        assert near(cache.key_cache[slot // 3, :, slot % 3], expected_k[0, :, row])
        assert near(cache.value_cache[slot // 3, :, slot % 3], v[row])
