"""What a container may use: the limits of this process's control groups (Linux, versions 1 and 2). No limit elsewhere.

A limit anywhere on the way from the process's own group up to the root holds, so the smallest of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes "no memory limit" as a number near 2**63


def cpu_quota(proc: Path = PROC, root: Path = CGROUP) -> float | None:
    """Processors' worth of time per wall-clock second, e.g. 1.65; None = unlimited."""
    quotas = []
    for group in _groups("cpu", proc, root):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:  # else "max" or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(proc: Path = PROC, root: Path = CGROUP) -> int | None:
    """Bytes that the process's groups may hold; None = unlimited."""
    return min((limit for limit, _ in _memory(proc, root)), default=None)


def available_memory(proc: Path = PROC, root: Path = CGROUP) -> int | None:
    """Bytes that can still be taken without swapping: the machine's `MemAvailable`, or less if a group's limit is
    nearer; None if unknown.
    """
    rooms = [limit - used for limit, used in _memory(proc, root)]
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            rooms.append(int(line.split()[1]) * 1024)
    return max(0, min(rooms)) if rooms else None


def _memory(proc: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each group that has a limit. File pages that the kernel can drop do not count as used, on
    whichever of its lists they are (a file read twice is on the active one); dirty and mapped ones do.
    """
    for group in _groups("memory", proc, root):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and limit[0].isdigit() and int(limit[0]) < _UNLIMITED:
            stat = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
            kept = _pages(stat, "file_dirty", "file_writeback", "file_mapped", "dirty", "writeback", "mapped_file")
            droppable = max(0, _pages(stat, "inactive_file", "active_file") - kept)
            yield int(limit[0]), max(0, int(used[0]) - droppable) if used else 0


def _pages(stat: dict[str, str], *names: str) -> int:
    """Bytes under these names of memory.stat together, those of the groups below included (version 1: total_...)."""
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)


def _groups(controller: str, proc: Path, root: Path) -> Iterator[Path]:
    """The directories of this process's group for one controller and of all groups above it, as far as they are visible
    here.
    """
    mounts = {
        root,
        root / controller,
    }  # version 1 has one hierarchy per controller; inside a container the group is often the root
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root if controllers == "" else root / controller
            group = base / path.lstrip("/")
            mounts.update(parent for parent in (group, *group.parents) if parent.is_relative_to(base))
    yield from (group for group in sorted(mounts) if group.is_dir())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # no such controller here


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
