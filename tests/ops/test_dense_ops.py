"""Linear layers, norms, rotary embedding of both back ends against float64 and against Hugging Face's Qwen3."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import Backend, RMSNorm, RotaryTable, get_backend, torch_linear

DTYPES = [torch.float32, torch.bfloat16]
# One rounding of a value near 4 in bfloat16 is up to 2**-7; products accumulate in float32.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}


@pytest.fixture(params=["reference", "torch", "torch without packing"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "torch without packing":
        monkeypatch.setattr(torch_linear, "packing_works", lambda dtype: False)
    return get_backend(request.param.split()[0])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual.double(), expected.double(), rtol=0.02 if actual.dtype == torch.bfloat16 else 1e-5,
                          atol=TOLERANCE[actual.dtype])  # fmt: skip


def norm64(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(backend: Backend, dtype: torch.dtype, rows: int, bias: bool) -> None:
    """Plain, with norm prologue, with residual (also when it is `out`), with out=; strided inputs."""
    weight, b = randn(96, 64).to(dtype) / 8, randn(96, seed=1).to(dtype) if bias else None
    packed = backend.pack_linear(weight, b)
    assert (packed.in_features, packed.out_features, packed.gated) == (64, 96, False)
    x = randn(rows, 80, seed=2).to(dtype)[:, 8:72]
    residual = randn(rows, 100, seed=3).to(dtype)[:, :96]
    norm = RMSNorm(randn(64, seed=4).to(dtype), 1e-6)
    plain = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    normed = norm64(x, norm) @ weight.double().T + (b.double() if b is not None else 0)

    y = backend.linear(x, packed)
    assert y.dtype == dtype
    assert near(y, plain)
    out = torch.full((rows, 104), torch.nan, dtype=dtype)[:, :96]
    assert backend.linear(x, packed, norm=norm, residual=residual, out=out) is out
    assert near(out, normed + residual.double())
    stream = residual.clone()
    backend.linear(x, packed, residual=stream, out=stream)
    assert near(stream, plain + residual.double())
    wide = torch.empty(rows, 96, dtype=torch.float32)
    assert backend.linear(x, packed, norm=norm, out=wide) is wide
    assert torch.allclose(wide.double(), normed, rtol=0.02, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_gated_linear(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    """silu(gate) * up, rows of the weight being gate then up."""
    weight = randn(2 * 48, 64).to(dtype) / 8
    packed = backend.pack_linear(weight, gated=True)
    x, residual = randn(rows, 64, seed=2).to(dtype), randn(rows, 48, seed=3).to(dtype)
    norm = RMSNorm(randn(64, seed=4).to(dtype), 1e-6)
    gate, up = (norm64(x, norm) @ weight.double().T).chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    y = backend.linear(x, packed, norm=norm, act="silu_mul")
    assert y.dtype == dtype
    assert y.shape == (rows, 48)
    assert near(y, expected)
    for given in (None, residual):
        out = torch.full((rows, 56), torch.nan, dtype=dtype)[:, :48]
        assert backend.linear(x, packed, norm=norm, act="silu_mul", residual=given, out=out) is out
        assert near(out, expected + (residual.double() if given is not None else 0))


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
        arguments = (
            qkv,
            RMSNorm(norms[0].weight.data, 1e-6),
            RMSNorm(norms[1].weight.data, 1e-6),
            rope,
            positions,
            cache,
            slots,
        )
        assert get_backend(name).qk_norm_rope_write(*arguments, out=out) is out
        assert near(out, expected_q)
        assert torch.equal(get_backend(name).qk_norm_rope_write(*arguments), out)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert near(cache.key_cache[slot // 3, :, slot % 3], expected_k[row])
                assert torch.equal(cache.value_cache[slot // 3, :, slot % 3], v[row])
        assert int(cache.key_cache.isnan().sum()) == (12 - 4) * num_kv_heads * head_dim
        empty = get_backend(name).qk_norm_rope_write(
            qkv[:0], arguments[1], arguments[2], rope, positions[:0], cache, slots[:0]
        )
        assert empty.shape == (0, num_heads, head_dim)


def rope_pair(rope: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.cos, rope.sin
