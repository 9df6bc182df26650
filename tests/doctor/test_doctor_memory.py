"""Memory, NUMA nodes and huge pages, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended import CGROUP, GIB, MEMINFO, Machine, Processors, only

from minipaged.doctor import memory


def test_memory_of_a_container_and_of_a_whole_machine(machine: Machine) -> None:
    root = machine({"proc/meminfo": MEMINFO})
    whole = only(memory.memory(root, GIB))
    assert (whole.facts["limit_bytes"], whole.facts["available_bytes"], whole.state) == (32 * GIB, 20 * GIB, "ok")
    machine(
        {
            f"{CGROUP}/cgroup.controllers": "cpu memory\n",
            f"{CGROUP}/memory.max": f"{4 * GIB}\n",
            f"{CGROUP}/memory.current": f"{GIB}\n",
            f"{CGROUP}/memory.stat": "inactive_file 0\n",
        }
    )
    container = only(memory.memory(root, GIB))
    assert (container.facts["limit_bytes"], container.facts["available_bytes"]) == (4 * GIB, 3 * GIB)
    assert "version 2" in container.why
    assert container.state == "ok"
    tight = only(memory.memory(root, 3 * GIB))
    assert tight.state == "warning"
    assert "raise the limit" in tight.advice


def test_memory_limit_of_version_1(machine: Machine) -> None:
    limit = {
        f"{CGROUP}/memory/memory.limit_in_bytes": str(2 * GIB),
        f"{CGROUP}/memory/memory.usage_in_bytes": str(GIB),
    }
    finding = only(memory.memory(machine({"proc/meminfo": MEMINFO, **limit}), 0))
    assert finding.facts["limit_bytes"] == 2 * GIB
    assert "version 1" in finding.why


def test_numa_counts_the_nodes_that_the_affinity_mask_reaches(machine: Machine, processors: Processors) -> None:
    nodes = "sys/devices/system/node"
    root = machine({f"{nodes}/node0/cpulist": "0-1,4\n", f"{nodes}/node1/cpulist": "2-3\n", f"{nodes}/online": "0-1\n"})
    processors(2)
    assert only(memory.numa(root)).state == "ok"
    processors(4)
    both = only(memory.numa(root))
    assert both.facts == {"nodes": 2, "nodes_used": 2}
    assert both.state == "warning"
    assert "numactl --cpunodebind=0" in both.advice


SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
VmFlags: rd wr
7f0000400000-7f0000800000 rw-p 00000000 00:00 0  [anon]
AnonHugePages:      4096 kB
"""


@pytest.mark.parametrize(
    ("address", "expected"),
    [(0x7F0000000000, 2 << 20), (0x7F00003FFFFF, 2 << 20), (0x7F0000400000, 4 << 20), (0x7F0000800000, None)],
)
def test_huge_pages_of_a_mapping(address: int, expected: int | None) -> None:
    assert memory.anonymous_huge_bytes(SMAPS, address) == expected


@pytest.mark.parametrize(
    ("setting", "share", "state"),
    [
        ("always [madvise] never", 1.0, "ok"),
        ("always madvise [never]", 0.0, "warning"),
        ("[always] madvise never", 0.5, "warning"),
        ("always [madvise] never", None, "note"),
    ],
)
def test_huge_page_setting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, setting: str, share: float | None, state: str
) -> None:
    monkeypatch.setattr(memory, "_huge_share", lambda root: share)
    finding = only(memory.huge_pages(machine({"sys/kernel/mm/transparent_hugepage/enabled": setting})))
    assert finding.state == state
    assert finding.facts == {"setting": setting[setting.index("[") + 1 : setting.index("]")], "given": share}


def test_the_huge_page_probe_looks_at_this_process() -> None:
    """On a real kernel: a share, or None where it does not tell; the mapping is gone afterwards."""
    share = memory._huge_share(Path("/"))
    assert share is None or 0.0 <= share <= 1.0
