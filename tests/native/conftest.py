"""Fixtures of the native back end's tests; without the library (tools/build_native.py) they are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from minipaged.ops.native import NativeBackend, instruction_sets, unavailable_reason

if (_reason := unavailable_reason("cpu")) is not None:
    pytest.skip(f"native library: {_reason}", allow_module_level=True)

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
HERE = [name for name, runs in instruction_sets().items() if runs]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def backend() -> NativeBackend:
    return NativeBackend(threads=1)


@pytest.fixture(params=HERE)
def any_isa(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(threads=1, isa=request.param)
