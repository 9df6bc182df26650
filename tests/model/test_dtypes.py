"""C53: which type a model runs in, with faked instruction sets."""

from __future__ import annotations

import logging

import pytest
import torch

from minipaged.model.dtypes import read_cpu_flags, resolve_dtype

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("flags", "checkpoint", "expected"),
    [
        ({"avx2", "fma"}, BF16, F32),
        ({"avx2", "avx512f", "avx512_vnni"}, BF16, F32),
        ({"avx512f", "avx512_bf16"}, BF16, BF16),
        ({"amx_bf16", "amx_tile"}, BF16, BF16),
        ({"asimd", "bf16", "i8mm"}, BF16, BF16),
        ({"asimd"}, BF16, F32),
        (set(), BF16, F32),
        ({"avx512_bf16"}, F16, F32),
        ({"avx512_fp16"}, F16, F32),
        ({"avx512_bf16"}, F32, F32),
    ],
)
def test_auto_follows_the_processor(
    flags: set[str], checkpoint: torch.dtype, expected: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_dtype("auto", checkpoint, cpu_flags=lambda: frozenset(flags)) == expected
    assert not caplog.records


@pytest.mark.parametrize(("checkpoint", "expected"), [(BF16, BF16), (F16, F32), (F32, F32)])
def test_auto_follows_a_back_end_that_is_fast_at_bfloat16(checkpoint: torch.dtype, expected: torch.dtype) -> None:
    assert resolve_dtype("auto", checkpoint, fast_bfloat16=True, cpu_flags=frozenset) == expected


def test_bfloat16_is_obeyed_silently_where_the_back_end_is_fast(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minipaged"):
        assert resolve_dtype("bfloat16", F32, fast_bfloat16=True, cpu_flags=frozenset) == BF16
    assert not caplog.records


@pytest.mark.parametrize("checkpoint", [BF16, F16, F32])
def test_auto_on_a_gpu_is_the_checkpoints(checkpoint: torch.dtype) -> None:
    assert resolve_dtype("auto", checkpoint, device="cuda", cpu_flags=frozenset) == checkpoint


@pytest.mark.parametrize(
    ("requested", "flags", "warnings"),
    [
        ("bfloat16", set(), 1),
        (BF16, {"avx2"}, 1),
        ("float16", {"avx512_bf16"}, 1),
        ("bfloat16", {"avx512_bf16"}, 0),
        ("float32", set(), 0),
        ("torch.float32", {"avx512_bf16"}, 0),
    ],
)
def test_explicit_is_obeyed_with_at_most_one_warning(
    requested: str | torch.dtype, flags: set[str], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "minipaged"):
        chosen = resolve_dtype(requested, BF16, cpu_flags=lambda: frozenset(flags))
    assert str(chosen).removeprefix("torch.") == str(requested).removeprefix("torch.")
    assert len(caplog.records) == warnings


@pytest.mark.parametrize("requested", ["int8", "half", "", "torch.float64"])
def test_other_names_are_refused(requested: str) -> None:
    with pytest.raises(ValueError, match="'auto' or one of 'bfloat16', 'float16', 'float32'"):
        resolve_dtype(requested, BF16)


def test_flags_of_this_machine_are_read() -> None:
    """Every x86-64 processor has sse2, every 64-bit arm asimd; elsewhere the set may be empty."""
    flags = read_cpu_flags()
    if not flags:
        pytest.skip("this system does not list its instruction sets")
    assert flags & {"sse2", "asimd", "bf16"}
