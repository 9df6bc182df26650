"""Each topic of `minipaged doctor` against machines made of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from minipaged.doctor import bandwidth, gpu, hub, memory, processor, software, threads
from minipaged.doctor.examine import examine
from minipaged.doctor.finding import NOTHING, STATES, UNKNOWN, Finding
from minipaged.doctor.installation import Installation, find_installation

Machine = Callable[[dict[str, str]], Path]  # see conftest.py
Processors = Callable[[int], None]
GIB = 1 << 30
CGROUP = "sys/fs/cgroup"
MEMINFO = f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {20 * GIB // 1024} kB\n"
ALL_SETS = {"avx512bf16": True, "avx512": True, "avx2": True, "portable": True}
AVX512_FLAGS = frozenset(("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"))


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Processors:
    """Pretend that the affinity mask holds processors 0 .. count - 1."""

    def set_count(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)

    return set_count


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# ---- threads


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
    monkeypatch.setattr("minipaged.bench.disturbance.time.monotonic", lambda: clock["now"])
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


# ---- memory


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


# ---- processor


@pytest.mark.parametrize(
    ("built", "wanted", "flags", "value", "state"),
    [
        (ALL_SETS, "", AVX512_FLAGS | {"avx512_bf16"}, "avx512bf16", "ok"),
        (ALL_SETS, "avx512bf16", AVX512_FLAGS | {"avx512_bf16"}, "avx512bf16", "ok"),
        (ALL_SETS, "avx2", AVX512_FLAGS | {"avx512_bf16"}, "avx2", "warning"),
        (ALL_SETS, "sse9", AVX512_FLAGS, "sse9, which does not run here", "problem"),
        ({**ALL_SETS, "avx512bf16": False}, "", AVX512_FLAGS, "avx512", "note"),
        ({"portable": True}, "", frozenset({"asimd"}), "portable", "ok"),
    ],
)
def test_instruction_set(built: dict[str, bool], wanted: str, flags: frozenset[str], value: str, state: str) -> None:
    finding = processor.judge_instruction_set(built, wanted, flags)
    assert (finding.value, finding.state) == (value, state)
    if state == "note":
        assert "avx512bf16 needs avx512_bf16" in finding.why
        assert "twice the bytes" in finding.advice


def test_needed_flags_are_those_of_the_build() -> None:
    """CMakeLists.txt compiles each set with -m flags; doctor has to look for the same ones."""
    text = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    common = text[text.index("set(AVX512 ") :].split(")")[0].split()[1:]
    for name in ("avx2", "avx512", "avx512bf16"):
        line = text[text.index(f"mp_kernels({name} ") :].split(")")[0]
        flags = [part for word in line.split()[1:] for part in (common if word == "${AVX512}" else [word])]
        spelled = {flag.removeprefix("-m").replace("avx512bf16", "avx512_bf16") for flag in flags}
        assert spelled == set(processor.NEEDS[name])


def test_cpu_name_and_features(machine: Machine) -> None:
    root = machine({"proc/cpuinfo": "cpu family\t: 25\nmodel\t: 17\nmodel name\t: AMD EPYC\nflags\t: sse avx2 fma\n"})
    finding = only(processor.cpu(root))
    assert finding.facts == {"name": "AMD EPYC (cpu family 25, model 17)", "features": ["avx2", "fma"]}


# ---- software, GPU, Hub


def test_a_missing_optional_package_is_a_note_and_a_missing_torch_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torch", "triton", "transformers"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(software, "version", version)
    found = {finding.name: finding for finding in software.versions(Installation("checkout", None, None))}
    assert found["torch"].state == "problem"
    assert found["transformers"].state == "warning"
    assert found["triton"].state == "note"
    assert "[gpu]" in found["triton"].advice
    assert found["numpy"].facts["version"] == "1.0"


def test_a_torch_that_does_not_import_ends_the_examination_early_but_not_silently(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(software, "import_module", broken)
    diagnosis = examine(quick=True, root=machine({"proc/meminfo": MEMINFO}))
    assert not diagnosis.usable
    torch_finding = next(finding for finding in diagnosis.findings if finding.name == "torch")
    assert "libcudart.so.13" in torch_finding.why
    assert torch_finding.state == "problem"
    assert diagnosis.to_dict()["memory_limit_bytes"] == 32 * GIB


def test_a_version_outside_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "requires", lambda _: ["numpy>=1.26", 'triton<3.10,>=3.6; extra == "gpu"'])
    monkeypatch.setattr(software, "version", lambda name: "1.20")
    found = {finding.name: finding for finding in software.versions(Installation("checkout", None, None))}
    assert found["numpy"].state == "warning"
    assert "'numpy>=1.26'" in found["numpy"].advice
    assert found["transformers"].state == "ok"


def test_this_installation_has_a_kind_and_a_way_to_build() -> None:
    installation = find_installation()
    assert installation.kind in ("wheel", "editable", "checkout")
    assert installation.rebuild_command
    nowhere = find_installation(Path("/no/such/site-packages/minipaged"))
    assert nowhere == Installation("checkout", None, None)


def test_a_driver_without_a_usable_gpu_is_a_warning(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    root = machine({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n"})
    finding = only(gpu.gpus(root))
    assert finding.state == "warning"
    assert "550.54.15" in finding.value
    (root / "proc/driver/nvidia/version").unlink()
    assert only(gpu.gpus(root)).state == "ok"


def test_a_gpu_is_described(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 139 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 139 * GIB))
    finding = only(gpu.gpus(machine({"proc/driver/nvidia/version": "Open Kernel Module for x86_64  580.65.06  R\n"})))
    assert finding.name == "GPU 0"
    assert finding.value == "NVIDIA H200, 139.00 GiB, 100.00 GiB free"
    assert "compute capability 9.0, driver 580.65.06" in finding.why


def test_hub_cache_and_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache, access = hub.hub(1)
    assert cache.facts["models"] == ["Qwen/Qwen3-0.6B"]
    assert cache.state == "ok"
    assert (access.state, access.facts) == ("note", {"offline": True})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    cache, access = hub.hub(1 << 60)
    assert cache.state == "warning"
    assert "HF_HOME" in cache.advice
    assert access.state == "ok"


# ---- bandwidth


@pytest.mark.usefixtures("small_probe")
def test_bandwidth_and_the_decode_speed_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token reads the 596 million numbers of Qwen3-0.6B once (its head is its embedding)."""
    rates = iter([10e9, 11e9, 10.5e9, 10.2e9, 10.4e9])
    monkeypatch.setattr(bandwidth.Probes, "read_bandwidth", lambda _: next(rates))
    monkeypatch.setattr(bandwidth, "resolve_dtype", lambda *_: torch.bfloat16)
    finding = only(bandwidth.read_bandwidth(Path("/no/such/root")))
    assert finding.facts["gb_s"] == pytest.approx(10.4)
    assert finding.facts["spread"] == pytest.approx(1.0 / 10.4)
    assert finding.facts["decode_limit_tok_s"] == pytest.approx(10.4e9 / (2 * 596_049_920))
    assert finding.state == "ok"


@pytest.mark.usefixtures("small_probe")
def test_unsteady_bandwidth_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([5e9, 11e9, 10e9, 10e9, 10e9])
    monkeypatch.setattr(bandwidth.Probes, "read_bandwidth", lambda _: next(rates))
    finding = only(bandwidth.read_bandwidth(Path("/no/such/root")))
    assert finding.state == "note"
    assert "60%" in finding.value


def test_no_memory_for_the_probe(machine: Machine) -> None:
    finding = only(bandwidth.read_bandwidth(machine({"proc/meminfo": "MemAvailable: 1000 kB\n"})))
    assert (finding.value, finding.state) == ("not measured", "warning")


# ---- the whole


def test_a_system_without_proc_and_sys(tmp_path: Path) -> None:
    """As on another operating system: what cannot be known is said to be unknown, and nothing fails."""
    diagnosis = examine(quick=True, root=tmp_path)
    found = {finding.name: finding for finding in diagnosis.findings}
    for name in ("load by others", "memory", "NUMA nodes", "huge pages"):
        assert found[name].value == UNKNOWN
        assert found[name].state == "note"
    assert diagnosis.usable
    assert "could not be found out" not in {finding.value for finding in diagnosis.findings}
    assert diagnosis.to_dict()["memory_limit_bytes"] is None


def test_every_finding_is_complete_and_has_advice() -> None:
    diagnosis = examine(quick=True)
    names = [finding.name for finding in diagnosis.findings]
    assert len(set(names)) == len(names)
    for finding in diagnosis.findings:
        assert finding.state in STATES
        for text in (finding.value, finding.why, finding.advice):
            assert text.strip() == text != ""
            assert "\n" not in text, finding
        assert finding.state in ("ok", "note") or finding.advice != NOTHING


def test_a_topic_that_fails_does_not_take_the_others_along(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(root: Path) -> list[Finding]:
        raise ZeroDivisionError("a kernel with no nodes")

    monkeypatch.setattr(memory, "numa", explode)
    diagnosis = examine(quick=True, root=machine({"proc/meminfo": MEMINFO}))
    found = {finding.name: finding for finding in diagnosis.findings}
    assert found["NUMA nodes"].why == "ZeroDivisionError: a kernel with no nodes"
    assert found["NUMA nodes"].state == "warning"
    assert found["memory"].state == "ok"
