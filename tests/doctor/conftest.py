"""A machine made of files: what /proc and /sys would say, below a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pretended import Machine, Processors

from minipaged.doctor import bandwidth


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Processors:
    def set_count(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)

    return set_count


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have set these."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MINIPAGED_CPU_ISA", "KMP_BLOCKTIME", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "LEAST_BUFFER", 1 << 20)
    monkeypatch.setattr(bandwidth, "CACHES", 0)
    monkeypatch.setattr(bandwidth, "SMALLEST", 0)
