"""Linear layers of any back end against float64: the checks that every one of them has to pass."""

from __future__ import annotations

import torch

from minipaged.ops import Backend, RMSNorm

DTYPES = [torch.float32, torch.bfloat16]
# One rounding of a value near 4 in bfloat16 is up to 2**-7; products accumulate in float32.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    relative = 0.02 if actual.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(actual.double(), expected.double(), rtol=relative, atol=TOLERANCE[actual.dtype])


def norm64(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def check_linear(backend: Backend, dtype: torch.dtype, rows: int, bias: bool) -> None:
    """Plain, with norm prologue, with residual (also when it is `out`), with out=; strided inputs; float32 results."""
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
    assert backend.linear(x, packed, residual=stream, out=stream) is stream
    assert near(stream, plain + residual.double())
    wide = torch.full((rows, 96), torch.nan)
    assert backend.linear(x, packed, norm=norm, out=wide) is wide
    assert torch.allclose(wide.double(), normed, rtol=0.02, atol=TOLERANCE[dtype])


def check_gated_linear(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    """silu(gate) * up, rows of the weight being gate then up; in float32, gates so large that exp overflows."""
    weight = randn(2 * 48, 64).to(dtype) / 8
    weight[3] *= 400 if dtype == torch.float32 else 1
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
