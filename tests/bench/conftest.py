"""Benchmarks at toy size: a small probe buffer, one round, a tiny shape; nothing depends on how fast anything is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny_shape import TINY, TINY_SHAPE
from typer.testing import CliRunner, Result

from minipaged.bench import kernels, probes, steps, trials
from minipaged.cli.main import app
from minipaged.model.random_weights import QWEN3_SHAPES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QWEN3_SHAPES, TINY_SHAPE, TINY)
    monkeypatch.setattr(probes, "LEAST_BUFFER", 1 << 20)
    monkeypatch.setattr(probes, "CACHES", 0)
    monkeypatch.setattr(probes, "PASSES", 1)
    monkeypatch.setattr(probes, "CPU_SQUARES", (64,))
    monkeypatch.setattr(trials, "RETRIES", 1)
    monkeypatch.setattr(kernels, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(kernels, "COVER", 0)
    monkeypatch.setattr(steps, "LEAST_SECONDS", 0.0)


@pytest.fixture
def bench() -> Callable[..., Result]:
    """`minipaged bench ...` in this process."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["bench", *map(str, arguments)])

    return run


@pytest.fixture
def bench_json(bench: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """The report of a benchmark that must succeed, in one round; stdout must be exactly one JSON object."""

    def run(*arguments: object) -> dict[str, Any]:
        result = bench(*arguments, "--rounds", 1, "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert isinstance(report, dict)
        return report

    return run
