"""Trials: runs between probes, and which of them count.

Memory bandwidth of a shared machine drifts within minutes. So every run stands between two probes of the limit it is
compared with, and a run that others disturbed, or during which the limit itself moved, is repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from minipaged.bench.noise import QUIET, Load, LoadMeter

T = TypeVar("T")
STEADY = 0.15  # two neighbouring probes that differ by more than this share mean that the limit moved in between
RETRIES = 2  # at most so many trials per wanted round


@dataclass(frozen=True, slots=True)
class Trial(Generic[T]):
    """One run, the load during it (None = unknown), and the probes just before and just after it."""

    result: T
    load: Load | None
    before: float
    after: float

    @property
    def quiet(self) -> bool:
        """Nobody else took more than a tenth of a core, and the limit stood still."""
        quiet = self.load is None or self.load.other_cores <= QUIET
        return quiet and abs(self.after - self.before) <= STEADY * min(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Trials(Generic[T]):
    """All of them in order."""

    all: Sequence[Trial[T]]

    @property
    def kept(self) -> list[Trial[T]]:
        """The quiet trials; all of them if there is none, which a report has to say."""
        return [a for a in self.all if a.quiet] or list(self.all)

    @property
    def noisy(self) -> int:
        """How many trials were not quiet."""
        return sum(not a.quiet for a in self.all)

    @property
    def probes(self) -> list[float]:
        """Every probe of the trials, each once: a trial's last is the next one's first."""
        return [self.all[0].before, *(a.after for a in self.all)]

    @property
    def probe(self) -> float:
        """The limit: median of all probes."""
        return statistics.median(self.probes)

    @property
    def spread(self) -> float:
        """(largest probe - smallest) / median."""
        return (max(self.probes) - min(self.probes)) / self.probe

    @property
    def other_cores(self) -> float | None:
        """Median over the kept trials; None if unknown."""
        loads = [a.load.other_cores for a in self.kept if a.load is not None]
        return statistics.median(loads) if loads else None

    def median(self, figure: Callable[[T], float]) -> float:
        """Of one figure over the kept trials."""
        return statistics.median(figure(a.result) for a in self.kept)


def run_trials(run: Callable[[], T], probe: Callable[[], float], *, rounds: int) -> Trials[T]:
    """Run until `rounds` trials were quiet, at most `RETRIES` times as many, with a probe before, between, after."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    trials: list[Trial[T]] = []
    before = probe()
    while sum(a.quiet for a in trials) < rounds and len(trials) < RETRIES * rounds:
        meter = LoadMeter()
        result = run()
        load = meter.stop()
        after = probe()
        trials.append(Trial(result, load, before, after))
        before = after
    return Trials(trials)
