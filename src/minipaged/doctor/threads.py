"""How many threads compute and which limit decided it, who else uses the processors, and how OpenMP waits."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from minipaged import cgroup
from minipaged.bench.noise import QUIET, LoadMeter
from minipaged.doctor.finding import NOTHING, Finding, State, unknown
from minipaged.threads import available_processors, default_threads, openmp_threads

BUSY = 0.5  # cores taken by others from which on a step's slowest thread holds up the rest
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME")


def threads(root: Path) -> list[Finding]:
    """What `set_threads` chooses if nobody says otherwise: the smallest of three limits."""
    proc, groups = root / "proc", root / "sys" / "fs" / "cgroup"
    affinity, quota, openmp = available_processors(), cgroup.cpu_quota(proc, groups), openmp_threads()
    default = default_threads(proc, groups)
    chosen = min(default, openmp or default)
    if chosen < default:
        bound = "OMP_NUM_THREADS"
    elif quota is not None and quota < affinity:
        bound = "CPU quota"
    else:
        bound = "affinity mask"
    quota_text = "none" if quota is None else f"{quota:g} processors"
    limits = f"affinity mask {affinity}, CPU quota of the control group {quota_text}"
    why = f"{limits}, OMP_NUM_THREADS {openmp or 'not set'}; decided by: {bound}"
    facts = {
        "threads": chosen,
        "affinity": affinity,
        "cpu_quota": quota,
        "omp_num_threads": openmp,
        "decided_by": bound,
    }
    state: State = "ok"
    advice = "--threads N changes it"
    if quota is not None and quota < chosen:
        state, advice = "warning", f"even one thread is throttled: give the container at least one CPU, not {quota:g}"
    elif chosen < default:
        state, advice = "note", f"unset OMP_NUM_THREADS or use --threads {default}: prefill speed follows the threads"
    elif quota is not None and chosen < affinity and quota > chosen:
        state, advice = "note", f"{quota - chosen:.2f} of the quota lies idle: a whole number of CPUs uses it all"
    elif (cores := _physical_cores(root)) is not None and cores < affinity:
        facts["physical_cores"] = cores
        why += f"; these are hardware threads of {cores} physical core{'s' * (cores != 1)}"
        advice = f"try --threads {cores} as well: `minipaged bench latency --shape qwen3-0.6b --threads {cores}`"
    return [Finding(name="threads", value=str(chosen), why=why, state=state, advice=advice, facts=facts)]


def load(root: Path, seconds: float) -> list[Finding]:
    """Processors in use by other processes (and stolen by the hypervisor), on average over so many seconds."""
    meter = LoadMeter(root / "proc")
    time.sleep(seconds)
    measured = meter.stop()
    name = "load by others"
    if measured is None:
        return [unknown(name, "there is no /proc/stat", "look at the system's own monitor before you measure speed")]
    others = measured.other_cores
    value, why = f"{others:.2f} cores", f"average over {seconds:g} s; measurements count as quiet up to {QUIET:g}"
    facts = {"other_cores": others}
    if others <= QUIET:
        return [Finding(name=name, value=value, why=why, advice=NOTHING, facts=facts)]
    return [
        Finding(
            name=name,
            value=value,
            why=why,
            state="warning" if others >= BUSY else "note",
            advice="speed measured now is too low; find the process (`top`), or leave it cores: a lower --threads",
            facts=facts,
        )
    ]


def openmp(root: Path) -> list[Finding]:
    """How idle threads wait for the next operation, and whether one thread pool is loaded or several."""
    runtimes = _openmp_runtimes(root)
    given = {name: os.environ[name] for name in WAIT_VARIABLES if name in os.environ}
    facts = {"runtimes": [str(path) for path in runtimes], "environment": given}
    names = ", ".join(path.name for path in runtimes) or "not seen"
    settings = (
        " ".join(f"{name}={value}" for name, value in given.items())
        or "default settings: threads spin for a moment after each operation, then sleep"
    )
    value, why = settings, f"runtime loaded: {names}"
    state: State = "ok"
    advice = NOTHING
    if len(runtimes) > 1:
        state, why = "warning", f"{len(runtimes)} runtimes are loaded: {names}"
        advice = "their pools compete for the cores: remove LD_PRELOAD, or the package that brings the second one"
    elif given.get("OMP_WAIT_POLICY", "").lower() == "passive" or given.get("GOMP_SPINCOUNT") == "0":
        state = "note"
        advice = (
            "threads sleep between operations: kind to others, slower for small models; unset it on a machine alone"
        )
    elif given.get("OMP_WAIT_POLICY", "").lower() == "active":
        state = "note"
        advice = "threads never sleep: fastest alone, very slow if other programs need the cores; then unset it"
    elif given.get("OMP_PROC_BIND", "false").lower() != "false" or "GOMP_CPU_AFFINITY" in given:
        state = "note"
        advice = "threads are pinned: two processes pinned to the same cores halve each other's speed; unset it then"
    return [Finding(name="OpenMP", value=value, why=why, state=state, advice=advice, facts=facts)]


def _physical_cores(root: Path) -> int | None:
    """Cores behind the processors of the affinity mask; None if the system does not tell."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    folder = root / "sys" / "devices" / "system" / "cpu"
    files = [folder / f"cpu{index}" / "topology" / "thread_siblings_list" for index in mask]
    if not files or not all(file.is_file() for file in files):
        return None
    return len({file.read_text().strip() for file in files})


def _openmp_runtimes(root: Path) -> list[Path]:
    """OpenMP libraries in this process."""
    maps = root / "proc" / "self" / "maps"
    if not maps.is_file():
        return []
    found = re.findall(r"(/\S*/lib(?:gomp|omp|iomp5)\b\S*\.so\S*)", maps.read_text())
    return [Path(path) for path in dict.fromkeys(found)]
