"""Which runs count, with probes and loads that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minipaged.bench import trials
from minipaged.bench.noise import Load, LoadMeter
from minipaged.bench.trials import run_trials


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What others take during each run, in order; missing entries are quiet."""
    planned: list[float | None] = []

    class Meter:
        def stop(self) -> Load | None:
            taken = planned.pop(0) if planned else 0.0
            return None if taken is None else Load(2.0, taken)

    monkeypatch.setattr(trials, "LoadMeter", Meter)
    monkeypatch.setattr(trials, "RETRIES", 2)
    return planned


def numbers(*values: float) -> Iterator[float]:
    yield from values


def test_quiet_runs_stand_between_probes(loads: list[float | None]) -> None:
    probes, results = numbers(40, 41, 42, 44), numbers(1, 5, 3)
    done = run_trials(lambda: next(results), lambda: next(probes), rounds=3)
    assert done.probes == [40, 41, 42, 44]
    assert done.probe == 41.5
    assert done.spread == pytest.approx(4 / 41.5)
    assert done.median(float) == 3
    assert done.noisy == 0
    assert done.other_cores == 0.0


def test_disturbed_runs_are_repeated_and_not_counted(loads: list[float | None]) -> None:
    loads += [0.11, 0.1, None]  # too much, just tolerable, unknown
    results = numbers(100, 2, 4)
    done = run_trials(lambda: next(results), lambda: 40.0, rounds=2)
    assert [a.quiet for a in done.all] == [False, True, True]
    assert done.median(float) == 3
    assert done.noisy == 1


def test_a_moving_limit_disturbs_too(loads: list[float | None]) -> None:
    probes, results = numbers(40, 47, 47, 47), numbers(1, 2, 3)
    done = run_trials(lambda: next(results), lambda: next(probes), rounds=2)
    assert [a.quiet for a in done.all] == [False, True, True]


def test_if_no_run_is_quiet_all_count_and_the_number_is_bounded(loads: list[float | None]) -> None:
    loads += [1.0] * 10
    done = run_trials(lambda: 1, lambda: 40.0, rounds=3)
    assert len(done.all) == 6
    assert done.kept == list(done.all)
    assert done.noisy == 6


def test_rounds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        run_trials(lambda: 1, lambda: 1.0, rounds=0)


def write_proc(root: Path, busy: int, own: int, child: int, stranger: int) -> None:
    """A /proc with this process, a child of it, and a stranger; times in ticks of 1/100 s."""
    import os

    me = os.getpid()
    root.mkdir(exist_ok=True)
    root.joinpath("stat").write_text(f"cpu  {busy} 0 0 5000 100 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
    for pid, parent, ticks in ((me, 1, own), (me + 1, me, child), (me + 2, 1, stranger)):
        root.joinpath(str(pid)).mkdir(exist_ok=True)
        fields = " ".join(["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", "20"])
        root.joinpath(str(pid), "stat").write_text(f"{pid} (a (strange) name) {fields}\n")


def test_load_meter_separates_the_family_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    clock = numbers(10.0, 12.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    write_proc(tmp_path / "proc", 1000, 100, 10, 500)
    meter = LoadMeter(tmp_path / "proc")
    write_proc(tmp_path / "proc", 1350, 300, 60, 600)  # in 2 s: 3.5 s in all, 2.5 s by us
    load = meter.stop()
    assert load is not None
    assert load.own_cores == pytest.approx(1.25)
    assert load.other_cores == pytest.approx(0.5)


def test_load_meter_without_proc(tmp_path: Path) -> None:
    assert LoadMeter(tmp_path / "nothing").stop() is None
