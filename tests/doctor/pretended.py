"""What the tests of `minipaged doctor` share: sizes and files of a pretended machine (fixture `machine`), findings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from minipaged.doctor.finding import Finding

Machine = Callable[[dict[str, str]], Path]
"""Writes files, given by their paths from the root; returns the root."""
Processors = Callable[[int], None]
"""Pretends that the affinity mask holds processors 0 .. count - 1."""

GIB = 1 << 30
CGROUP = "sys/fs/cgroup"
MEMINFO = f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {20 * GIB // 1024} kB\n"


def only(findings: list[Finding]) -> Finding:
    """The one finding of a topic."""
    (finding,) = findings
    return finding
