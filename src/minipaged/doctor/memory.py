"""How much memory this process may use, whether it is in one place, and whether it comes in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

from minipaged import cgroup
from minipaged.bench.machine import huge_page_setting, total_memory
from minipaged.doctor.finding import NOTHING, Finding, gib, unknown
from minipaged.llm.memory import CPU_MEMORY_SHARE

OVERHEAD = 300 << 20  # bytes besides weights and KV pool: PyTorch, buffers of a step
HUGE_PAGES = Path("sys/kernel/mm/transparent_hugepage")
PROBE_PAGES = 16
ENOUGH = 0.9  # share of the probe; one page may fail where others do not
LARGEST_PROBE = 64 << 20  # some machines have huge pages of 512 MiB; memory is not taken only to look at it


def memory(root: Path, model_bytes: int | None) -> list[Finding]:
    """The limit and what is left. model_bytes: weights of Qwen3-0.6B in bfloat16, for scale; None if not known."""
    proc, groups = root / "proc", root / "sys" / "fs" / "cgroup"
    limit, total, left = (
        cgroup.memory_limit(proc, groups),
        total_memory(proc),
        cgroup.available_memory(proc, groups),
    )
    usable = min((size for size in (limit, total) if size is not None), default=None)
    facts = {"limit_bytes": usable, "cgroup_limit_bytes": limit, "total_bytes": total, "available_bytes": left}
    if usable is None or left is None:
        advice = "the KV pool is sized for 4 GiB then; --kv-cache-memory sets it"
        return [unknown("memory", "there is no /proc/meminfo", advice)]
    if limit is not None and (total is None or limit < total):
        version = 2 if (groups / "cgroup.controllers").is_file() else 1
        why = f"limit of the control group (version {version})" + (f"; the machine has {gib(total)}" if total else "")
    else:
        why = "all of the machine's memory; no control group has a smaller limit"
    need = 0 if model_bytes is None else model_bytes + OVERHEAD
    value = f"{gib(usable)}, {gib(left)} of it available"
    if left < need:
        advice = f"Qwen3-0.6B in bfloat16 needs {gib(need)} and its KV pool: end other programs, or raise the limit"
        return [Finding(name="memory", value=value, why=why, state="warning", advice=advice, facts=facts)]
    advice = f"the KV pool takes {CPU_MEMORY_SHARE:.0%} of what the weights leave; --kv-cache-memory sets it"
    return [Finding(name="memory", value=value, why=why, advice=advice, facts=facts)]


def numa(root: Path) -> list[Finding]:
    """Nodes whose processors this process may run on: memory of another node is read more slowly."""
    nodes = sorted((root / "sys" / "devices" / "system" / "node").glob("node[0-9]*"))
    if not nodes:
        return [unknown("NUMA nodes", "the system lists none", "nothing to do on a machine with one socket")]
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    used = [node.name for node in nodes if not mask or mask & _processors(node / "cpulist")]
    value = f"{len(used) or 1} of {len(nodes)} in use"
    facts = {"nodes": len(nodes), "nodes_used": len(used) or 1}
    if len(used) <= 1:
        why = "all threads are near all of the memory they get"
        return [Finding(name="NUMA nodes", value=value, why=why, advice=NOTHING, facts=facts)]
    number = used[0].removeprefix("node")
    return [
        Finding(
            name="NUMA nodes",
            value=value,
            why=f"this process may run on {', '.join(used)}: part of the reads go to another node's memory",
            state="warning",
            advice=f"one process per node: numactl --cpunodebind={number} --membind={number} minipaged ...",
            facts=facts,
        )
    ]


def huge_pages(root: Path) -> list[Finding]:
    """The system's setting, and what a small mapping that asked for huge pages really got."""
    setting = huge_page_setting(root / HUGE_PAGES / "enabled")
    name = "huge pages"
    if setting is None:
        return [unknown(name, "no transparent huge pages in this kernel", "nothing to do: ordinary pages work")]
    given = _huge_share(root)
    facts = {"setting": setting, "given": given}
    value = f"{setting}; a probe got {'?' if given is None else f'{given:.0%}'}"
    why = f"{HUGE_PAGES.name} is {setting!r}, and weights and KV pool ask for huge pages by madvise"
    if setting == "never":
        advice = f"decode reads memory more slowly: echo madvise | sudo tee /{HUGE_PAGES}/enabled"
        return [Finding(name=name, value=value, why=why, state="warning", advice=advice, facts=facts)]
    if given is None:
        return [Finding(name=name, value=value, why=why, state="note", advice=NOTHING, facts=facts)]
    if given < ENOUGH:
        why += "; the kernel found too few: memory is fragmented, or scarce"
        advice = "echo 1 | sudo tee /proc/sys/vm/compact_memory, then start again: decode may be slower without"
        return [Finding(name=name, value=value, why=why, state="warning", advice=advice, facts=facts)]
    return [Finding(name=name, value=value, why=why, advice=NOTHING, facts=facts)]


def _huge_share(root: Path) -> float | None:
    """Share of a few touched huge pages' worth of memory that is backed by huge pages; None if one cannot know."""
    size_file, smaps = root / HUGE_PAGES / "hpage_pmd_size", root / "proc" / "self" / "smaps"
    page = int(size_file.read_text()) if size_file.is_file() else 2 << 20
    if not smaps.is_file() or not hasattr(mmap, "MADV_HUGEPAGE") or page * (PROBE_PAGES + 1) > LARGEST_PROBE:
        return None
    with mmap.mmap(-1, page * (PROBE_PAGES + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel that was built without them
            return 0.0
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first)
        start = -address % page  # huge pages begin on their own multiples
        for offset in range(start, start + PROBE_PAGES * page, mmap.PAGESIZE):
            memory[offset] = 1
        text = smaps.read_text()
        del first  # an exported buffer keeps the mapping from being closed
    found = anonymous_huge_bytes(text, address + start)
    return None if found is None else min(1.0, found / (PROBE_PAGES * page))


def anonymous_huge_bytes(smaps: str, address: int) -> int | None:
    """Bytes in huge pages of the mapping that holds `address`, from the text of /proc/self/smaps."""
    inside = False
    for line in smaps.splitlines():
        if limits := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(limits[1], 16) <= address < int(limits[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return None


def _processors(cpulist: Path) -> set[int]:
    """ "0-3,8" as a set of numbers."""
    if not cpulist.is_file():
        return set()
    parts = [part.split("-") for part in cpulist.read_text().strip().split(",") if part]
    return {index for part in parts for index in range(int(part[0]), int(part[-1]) + 1)}
