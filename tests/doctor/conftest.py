"""A machine made of files: what /proc and /sys would say, below a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minipaged.doctor import bandwidth

Machine = Callable[[dict[str, str]], Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Write files, given by their paths from the root; returns the root."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


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
