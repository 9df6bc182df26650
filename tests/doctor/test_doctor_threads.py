"""Threads, load of others and OpenMP, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pretended import CGROUP, Machine, Processors, only

from minipaged.doctor import threads
from minipaged.doctor.finding import NOTHING


@pytest.mark.parametrize(
    ("affinity", "quota", "openmp", "chosen", "bound", "state"),
    [
        (8, "max 100000", None, 8, "affinity mask", "ok"),
        (8, "400000 100000", None, 4, "CPU quota", "ok"),
        (8, "165000 100000", None, 1, "CPU quota", "note"),
        (8, "50000 100000", None, 1, "CPU quota", "warning"),
        (8, "max 100000", "3", 3, "OMP_NUM_THREADS", "note"),
        (8, "400000 100000", "6", 4, "CPU quota", "ok"),
        (2, "400000 100000", None, 2, "affinity mask", "ok"),
    ],
)
def test_the_smallest_limit_decides_the_threads(
    machine: Machine,
    processors: Processors,
    monkeypatch: pytest.MonkeyPatch,
    affinity: int,
    quota: str,
    openmp: str | None,
    chosen: int,
    bound: str,
    state: str,
) -> None:
    processors(affinity)
    if openmp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    finding = only(threads.threads(machine({f"{CGROUP}/cpu.max": quota})))
    assert finding.value == str(chosen)
    assert finding.facts["threads"] == chosen
    assert f"decided by: {bound}" in finding.why
    assert finding.state == state


def test_hardware_threads_of_one_core_are_named(machine: Machine, processors: Processors) -> None:
    processors(4)
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    root = machine(
        {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": text for i, text in siblings.items()}
    )
    finding = only(threads.threads(root))
    assert finding.facts["physical_cores"] == 2
    assert "hardware threads of 2 physical cores" in finding.why
    assert "--threads 2" in finding.advice


def test_load_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc/stat that advances by as many ticks as 1.5 processors give while the doctor waits."""
    ticks = os.sysconf("SC_CLK_TCK")
    clock = {"now": 100.0}
    monkeypatch.setattr("minipaged.bench.noise.time.monotonic", lambda: clock["now"])
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    stat.write_text("cpu 1000 0 0 0 0 0 0 0\n")

    def sleep(seconds: float) -> None:
        clock["now"] += seconds
        stat.write_text(f"cpu {1000 + round(1.5 * seconds * ticks)} 0 0 0 0 0 0 0\n")

    monkeypatch.setattr(threads.time, "sleep", sleep)
    finding = only(threads.load(tmp_path, 2.0))
    assert finding.facts["other_cores"] == pytest.approx(1.5)
    assert finding.state == "warning"


@pytest.mark.parametrize(
    ("environment", "state", "word"),
    [
        ({}, "ok", NOTHING),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "note", "sleep between operations"),
        ({"GOMP_SPINCOUNT": "0"}, "note", "sleep between operations"),
        ({"OMP_WAIT_POLICY": "active"}, "note", "never sleep"),
        ({"OMP_PROC_BIND": "true"}, "note", "pinned"),
    ],
)
def test_openmp_settings(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], state: str, word: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    root = machine({"proc/self/maps": "7f00-7f01 r-xp 00000000 08:01 42  /opt/torch/lib/libgomp.so.1\n" * 2})
    finding = only(threads.openmp(root))
    assert finding.state == state
    assert word in finding.advice
    assert finding.facts["runtimes"] == ["/opt/torch/lib/libgomp.so.1"]


def test_two_openmp_runtimes_are_a_warning(machine: Machine) -> None:
    lines = ("7f00-7f01 r-xp 0 08:01 1 /a/libgomp-24e2ab19.so.1.0.0\n", "7f02-7f03 r-xp 0 08:01 2 /b/libiomp5.so\n")
    finding = only(threads.openmp(machine({"proc/self/maps": "".join(lines)})))
    assert finding.state == "warning"
    assert "2 runtimes" in finding.why
