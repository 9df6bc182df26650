"""Packed linear layers: right to the last digit that the type has, and the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from paged_problem import same_bits
from torch.nn import functional as F

from minipaged.ops.backend import RMSNorm
from minipaged.ops.cpu.backend import NativeBackend


def slack(backend: NativeBackend, allowed: float) -> float:
    """Without a fused multiply-add each product is rounded as well."""
    return 1.6 if backend.isa == "portable" else allowed


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1024, 320), (40, 1024, 512), (300, 3072, 64)])
def test_error_is_no_larger_than_torchs(any_isa: NativeBackend, dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    x, w = random(rows, k, dtype=dtype), random(n, k, dtype=dtype, seed=1)
    exact = x.double() @ w.double().T
    ours = rms(any_isa.linear(x, any_isa.pack_linear(w)).double() - exact)
    torchs = rms(F.linear(x, w).double() - exact)
    assert ours <= slack(any_isa, 1.02) * torchs, f"{ours:.3g} against torch's {torchs:.3g}"


@pytest.mark.parametrize(("k", "n"), [(64, 64), (33, 100), (8, 1), (200, 513), (1, 32), (130, 48)])
@pytest.mark.parametrize("rows", [0, 1, 5, 13, 29])
def test_any_shape_with_everything_on(any_isa: NativeBackend, dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    x, w, bias = random(rows, k, dtype=dtype), random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    residual, norm = random(rows, n, dtype=dtype, seed=3), RMSNorm(1 + random(k, dtype=dtype, seed=4) / 4, 1e-6)
    normed = any_isa.rms_norm(x, norm)
    exact = normed.double() @ w.double().T + bias.double() + residual.double()
    out = residual.clone()
    result = any_isa.linear(x, any_isa.pack_linear(w, bias), norm=norm, residual=out, out=out)
    assert result is out
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20 * k**0.5
    torch.testing.assert_close(out.double(), exact, rtol=unit, atol=unit)


@pytest.mark.parametrize(("k", "inner"), [(64, 48), (33, 20), (1024, 96)])
def test_gated(any_isa: NativeBackend, dtype: torch.dtype, k: int, inner: int) -> None:
    x, w, bias = (
        random(7, k, dtype=dtype),
        random(2 * inner, k, dtype=dtype, seed=1) / 8,
        random(2 * inner, dtype=dtype),
    )
    gate, up = (x.double() @ w.double().T + bias.double()).chunk(2, dim=1)
    exact = F.silu(gate) * up
    ours = any_isa.linear(x, any_isa.pack_linear(w, bias, gated=True), act="silu_mul")
    torch_gate, torch_up = F.linear(x, w, bias).chunk(2, dim=1)
    torchs = rms((F.silu(torch_gate) * torch_up).double() - exact)
    error = rms(ours.double() - exact)
    assert error <= slack(any_isa, 1.05) * torchs, f"{error:.3g} against torch's {torchs:.3g}"


def test_rms_norm_rounds_like_hugging_face(any_isa: NativeBackend) -> None:
    x, weight = random(9, 1000, dtype=torch.bfloat16) * 30, 1 + random(1000, dtype=torch.bfloat16, seed=1) / 4
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    ours = any_isa.rms_norm(x, RMSNorm(weight, 1e-6))
    assert (ours != expected).float().mean() < 0.002  # a rare last bit of the reciprocal root


def test_c25_norm_of_large_values(any_isa: NativeBackend, dtype: torch.dtype) -> None:
    x, weight = torch.full((1, 1024), 1e17, dtype=dtype), torch.ones(1024, dtype=dtype)
    torch.testing.assert_close(any_isa.rms_norm(x, RMSNorm(weight, 1e-6)), torch.ones_like(x))


def test_strided_arguments_and_other_types(backend: NativeBackend, dtype: torch.dtype) -> None:
    """Views, padded rows, a float32 result for bfloat16 weights (logits), a result of a type without kernels."""
    wide = random(20, 3 * 64, dtype=dtype)
    x, w = wide[:, 64:128], random(40, 64, dtype=dtype, seed=1)
    packed = backend.pack_linear(w)
    expected = backend.linear(x.contiguous(), packed)
    assert same_bits(backend.linear(x, packed), expected)
    out = torch.full((20, 100), 7.0, dtype=dtype)
    backend.linear(x, packed, out=out[:, 30:70])
    assert same_bits(out[:, 30:70].contiguous(), expected)
    assert bool((out[:, :30] == 7).all() and (out[:, 70:] == 7).all())
    logits = backend.linear(x, packed, out=torch.empty(20, 40, dtype=torch.float32))
    assert same_bits(logits.to(dtype), expected)
    turned = random(64, 20, dtype=dtype).T
    assert same_bits(backend.linear(turned, packed), backend.linear(turned.contiguous(), packed))
    half = backend.linear(x, packed, out=torch.empty(20, 40, dtype=torch.float16))
    assert torch.equal(half, expected.to(torch.float16))
    assert same_bits(backend.linear(x, backend.pack_linear(w.T.contiguous().T)), expected)


def test_embedding_rows_come_out_of_the_packed_head(any_isa: NativeBackend, dtype: torch.dtype) -> None:
    w = random(75, 33, dtype=dtype)
    packed = any_isa.pack_linear(w, use="both")
    ids = torch.tensor([74, 0, 31, 32, 33, 0])
    assert same_bits(any_isa.embed(ids, packed), w[ids])
    for bad in (-1, 75):
        with pytest.raises(IndexError, match="vocabulary"):
            any_isa.embed(torch.tensor([1, bad]), packed)


def everything(backend: NativeBackend, x: torch.Tensor, dtype: torch.dtype, gated: bool) -> torch.Tensor:
    k = x.shape[1]
    w, bias = random(96, k, dtype=dtype, seed=1), random(96, dtype=dtype, seed=2)
    packed, norm = backend.pack_linear(w, bias, gated=gated), RMSNorm(1 + random(k, dtype=dtype, seed=4) / 4, 1e-6)
    return backend.linear(x, packed, norm=norm, act="silu_mul" if gated else None)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [1024, 2048, 77])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, k: int, gated: bool) -> None:
    x = random(700, k, dtype=dtype)
    whole = everything(NativeBackend(threads=1), x, dtype, gated)
    for threads in (1, 2):
        backend = NativeBackend(threads=threads)
        assert same_bits(everything(backend, x, dtype, gated), whole)
        for rows in (*range(1, 65), 100, 333):
            start = (rows * 7) % (700 - rows)
            part = everything(backend, x[start : start + rows], dtype, gated)
            assert same_bits(part, whole[start : start + rows]), f"{rows} rows, {threads} threads"


def test_control_another_order_of_the_sum_is_noticed(backend: NativeBackend, dtype: torch.dtype) -> None:
    """The comparison above can fail: a sum in two halves, or in another order, has other bits."""
    x, w = random(8, 1024, dtype=dtype), random(96, 1024, dtype=dtype, seed=1)
    out = torch.empty(8, 96, dtype=torch.float32)
    whole = backend.linear(x, backend.pack_linear(w), out=out).clone()
    low = backend.linear(x[:, :600], backend.pack_linear(w[:, :600]), out=torch.empty_like(out))
    both = backend.linear(x[:, 600:], backend.pack_linear(w[:, 600:]), residual=low, out=torch.empty_like(out))
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(5))
    shuffled = backend.linear(x[:, order], backend.pack_linear(w[:, order]), out=torch.empty_like(out))
    for other in (both, shuffled):
        torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-3)
        assert not same_bits(other, whole)
