"""Every instruction set that this machine runs; those with a fused multiply-add agree bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from paged_problem import Problem, same_bits

from minipaged.errors import BackendUnavailableError
from minipaged.ops import get_backend
from minipaged.ops.backend import RMSNorm
from minipaged.ops.cpu.backend import ISA_VARIABLE, NativeBackend
from minipaged.ops.cpu.library import huge_page_tensor, instruction_sets

HERE = [name for name, runs in instruction_sets().items() if runs]
FUSED = [name for name in HERE if name != "portable"]


def test_portable_runs_everywhere() -> None:
    assert instruction_sets()["portable"]
    assert NativeBackend().isa == HERE[0]
    assert NativeBackend().batch_invariant


@pytest.mark.skipif(len(FUSED) < 2, reason="only one instruction set with fused multiply-add here")
def test_fused_sets_agree_bit_for_bit(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(14, 300, generator=g).to(dtype), torch.randn(96, 300, generator=g).to(dtype)
    x[0] *= 1e-20  # products and sums that underflow
    w[0] *= 1e-20
    norm = RMSNorm((1 + torch.randn(300, generator=g) / 4).to(dtype), 1e-6)
    problem = Problem.random([90, 600], 4, 2, 48, dtype)
    results = []
    for isa in FUSED:
        backend = NativeBackend(threads=1, isa=isa)
        plain = backend.linear(x, backend.pack_linear(w), out=torch.empty(14, 96))
        gated = backend.linear(x, backend.pack_linear(w, gated=True), norm=norm, act="silu_mul")
        results.append([plain, gated, *problem.run(backend, [(0, 20, 90), (1, 599, 600)])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bits(a, b)


def test_the_environment_variable_chooses() -> None:
    code = "from minipaged.ops import get_backend; print(get_backend('cpu').isa)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env={**os.environ, ISA_VARIABLE: "portable"}, capture_output=True, text=True, check=True)
    assert done.stdout == "portable\n"
    with pytest.raises(BackendUnavailableError, match=r"available: .*portable"):
        NativeBackend(isa="sse9")


def test_the_registry_prefers_it() -> None:
    assert get_backend(None).name == "cpu"


def test_huge_page_memory_is_zero_aligned_and_returned() -> None:
    tensor = huge_page_tensor((3, 1000, 700), torch.float32)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert not bool(tensor.any())
    view = tensor[1]
    del tensor
    view.fill_(2)
    assert float(view.sum()) == 2 * 700_000


def test_types_without_kernels_are_served_by_torch(backend: NativeBackend) -> None:
    """C25: float16 scores beyond its range."""
    problem = Problem.random([9], 2, 1, 128, torch.float16)
    problem.queries[0].fill_(40)
    problem.keys[0].fill_(40)
    result = problem.run(backend, [(0, 8, 9)])[0]
    torch.testing.assert_close(result[0].float(), problem.values[0].float().mean(0).expand(2, -1), rtol=0, atol=2e-3)
