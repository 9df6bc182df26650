"""Fixtures of the native back end's tests. Without the library (tools/build_native.py) they are left out and say so."""

from __future__ import annotations

import pytest
import torch

from minipaged.ops.cpu.backend import NativeBackend
from minipaged.ops.cpu.library import instruction_sets, unavailable_reason

MISSING = unavailable_reason("cpu")
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    return f"native tests left out: {MISSING}" if MISSING else "native instruction sets: " + ", ".join(usable())


def usable() -> list[str]:
    return [] if MISSING else [name for name, runs in instruction_sets().items() if runs]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def backend() -> NativeBackend:
    return NativeBackend(threads=1)


@pytest.fixture(params=usable())
def any_isa(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(threads=1, isa=request.param)
