"""How busy other processes kept the machine while something was measured (Linux; unknown elsewhere)."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
QUIET = 0.1  # cores; more than this taken by others disturbs a measurement


@dataclass(frozen=True, slots=True)
class Load:
    """Processors in use on average over an interval: by this process and its descendants, and by everybody else."""

    own_cores: float
    other_cores: float


class LoadMeter:
    """Measures from its construction to `stop`. Time stolen by the hypervisor counts as taken by others."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        self._start = self._sample()

    def stop(self) -> Load | None:
        """The load since the construction; None where /proc is not there to ask."""
        end = self._sample()
        if self._start is None or end is None:
            return None
        seconds, busy, own = (after - before for before, after in zip(self._start, end, strict=True))
        seconds = max(seconds, 1e-3)
        return Load(own / seconds, max(0.0, (busy - own) / seconds))

    def _sample(self) -> tuple[float, float, float] | None:
        """Now in seconds; processor seconds of the whole machine, and of this process and its descendants."""
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, fields[:8])
        busy = user + nice + system + sum(interrupts_and_steal)
        return time.monotonic(), busy / self._ticks, self._family_seconds()

    def _family_seconds(self) -> float:
        children: defaultdict[int, list[int]] = defaultdict(list)
        ticks: dict[int, int] = {}
        for entry in self._proc.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # The command name, in brackets, may hold spaces; utime, stime and those of waited-for children follow.
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it ended while we were looking
            children[int(fields[1])].append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
        total, pending = 0, [os.getpid()]
        while pending:
            pid = pending.pop()
            total += ticks.get(pid, 0)
            pending += children[pid]
        return total / self._ticks
