"""What the measurement ran on: processor, memory, versions. Facts that cannot be read are None, never guessed."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minipaged import __version__
from minipaged.cgroup import PROC, memory_limit
from minipaged.cpu_flags import CPUINFO, read_cpu_flags
from minipaged.threads import default_threads

CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The instruction sets that decide how fast a model runs, as /proc/cpuinfo spells them.
FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores this process may use, relevant CPU features, last-level cache and memory in bytes, huge pages,
    system.

    With a GPU as `device` also its name and memory.
    """
    flags = read_cpu_flags()
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": default_threads(),
        "cpu_features": [name for name in FEATURES if name in flags],
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": memory_bytes(),
        "transparent_huge_pages": huge_page_setting(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_properties(torch.device(device))
        facts |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory}
    return facts


def versions() -> dict[str, str | None]:
    """minipaged, Python and the packages that compute; None for one that is not installed."""
    found: dict[str, str | None] = {"minipaged": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_name(cpuinfo: Path = CPUINFO) -> str | None:
    """As the processor calls itself, with family and model: one vendor string can stand for several generations."""
    if not cpuinfo.is_file():
        return platform.processor() or None
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo.read_text().split("\n\n")[0], re.MULTILINE))
    name = fields.get("model name") or fields.get("CPU implementer")
    detail = [f"{key} {fields[key]}" for key in ("cpu family", "model", "CPU part") if key in fields]
    return " ".join(filter(None, (name, f"({', '.join(detail)})" if detail else ""))) or None


def last_level_cache_bytes() -> int | None:
    """Of the first processor."""
    sizes = []
    for path in CACHE.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG])?", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {None: 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)


def memory_bytes() -> int | None:
    """What this process may use: the machine's memory, or its control group's limit if that is smaller."""
    return min((size for size in (memory_limit(), total_memory()) if size is not None), default=None)


def total_memory(proc: Path = PROC) -> int | None:
    """Bytes of memory that the machine has."""
    meminfo = proc / "meminfo"
    match = re.search(r"^MemTotal:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    return int(match[1]) * 1024 if match else None


def huge_page_setting(path: Path = HUGE_PAGES) -> str | None:
    """Which of "always", "madvise" and "never" the system has chosen."""
    match = re.search(r"\[(\w+)\]", path.read_text()) if path.is_file() else None
    return match[1] if match else None


def slug(facts: dict[str, Any]) -> str:
    """A file-name part that tells machines apart, e.g. "amd-epyc-2-cores"."""
    name = facts.get("gpu") or re.sub(r"\(.*?\)|@.*", "", facts["cpu"] or sys.platform)
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {facts['cores']} cores".lower()).strip("-")
