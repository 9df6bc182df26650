"""Bytes, operations and shares against numbers worked out by hand."""

from __future__ import annotations

import pytest

from minipaged.bench.limits import Limits, StepWork
from minipaged.bench.measure import Run, Step
from minipaged.model.random_weights import QWEN3_SHAPES

QWEN3 = QWEN3_SHAPES["qwen3-0.6b"]
# Of the 0.6B: 28 layers of q 2048x1024, k and v 1024x1024, o 1024x2048, gate, up and down 3072x1024, and the tied head.
LAYERS = 28 * (2048 * 1024 * 2 + 1024 * 1024 * 2 + 3 * 3072 * 1024)
HEAD = 151936 * 1024
NORMS = 28 * (2 * 1024 + 2 * 128) + 1024
KV = 2 * 28 * 8 * 128 * 2  # bytes per token: 112 KiB


def test_bytes_of_a_decode_step() -> None:
    """A decode step reads 1.192 GB of weights and 112 KiB per cached token."""
    limits = Limits(QWEN3, 2, 2)
    assert limits.weight_bytes == 2 * (LAYERS + HEAD + NORMS)
    assert round(limits.weight_bytes / 1e9, 3) == 1.192
    assert limits.kv_bytes_per_token == KV == 112 * 1024
    work = StepWork.of([(255, 1), (99, 1)], 2)
    assert work == StepWork(tokens=2, cached_tokens=356, query_key_pairs=356, logits_rows=2)
    assert limits.step_bytes(work) == limits.weight_bytes + 356 * KV


def test_untied_embedding_is_not_read() -> None:
    config = QWEN3_SHAPES["qwen3-8b"]
    numbers = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096) + 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert Limits(config, 2, 2).weight_bytes == 2 * (numbers + norms)


def test_operations() -> None:
    work = StepWork.of([(100, 3), (7, 1)], 2)
    assert work.query_key_pairs == 101 + 102 + 103 + 8
    expected = 2 * LAYERS * 4 + 2 * HEAD * 2 + 4 * 16 * 128 * 28 * work.query_key_pairs
    assert Limits(QWEN3, 2, 2).step_flops(work) == expected


def test_prefill_limit_of_w4() -> None:
    """2048 tokens at 416 GFLOP/s: 373 tokens per second, worked out independently from 0.88 + 0.235 GFLOP per token."""
    work = StepWork.of([(0, 2048)], 1)
    assert 2048 / Limits(QWEN3, 2, 2).step_seconds(work, 46.5e9, 416e9) == pytest.approx(373, rel=0.01)


def test_a_step_is_bound_by_the_larger_of_both() -> None:
    limits, work = Limits(QWEN3, 2, 2), StepWork.of([(0, 64)], 1)
    assert limits.step_seconds(work, 1e9, 1e30) == pytest.approx(limits.step_bytes(work) / 1e9)
    assert limits.step_seconds(work, 1e30, 1e9) == pytest.approx(limits.step_flops(work) / 1e9)


def test_share_of_bandwidth_is_bytes_times_steps_per_second_over_the_probe() -> None:
    """Prefill steps do not count; the probe is made up."""
    limits = Limits(QWEN3, 2, 2)
    steps = [
        Step(9.0, 8.0, StepWork.of([(0, 128)], 1), prefill=True),
        Step(0.05, 0.04, StepWork.of([(128, 1)], 1), prefill=False),
        Step(0.07, 0.06, StepWork.of([(129, 1)], 1), prefill=False),
    ]
    run = Run(9.12, 128, [[9.0, 9.05, 9.12]], steps, preemptions=0, cached_tokens=0)
    mean = limits.weight_bytes + 129.5 * KV
    assert run.bytes_per_step(limits) == pytest.approx(mean)
    assert run.share_of_bandwidth(limits, 40e9) == pytest.approx(mean * (2 / 0.12) / 40e9)
    assert run.decode_tok_s == pytest.approx(2 / 0.12)
    assert run.ttft_s == 9.0
    assert run.output_tok_s == pytest.approx(3 / 9.12)
    assert run.share_outside_runner == pytest.approx(1 - 8.1 / 9.12)
    least = sum(limits.step_seconds(s.work, 40e9, 400e9) for s in steps)
    assert run.share_of_limit(limits, 40e9, 400e9) == pytest.approx(least / 9.12)
