"""The instruction sets of this processor, as the system names them; needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def read_cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Instruction sets of this processor as /proc/cpuinfo spells them; empty where they cannot be read."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    if sys.platform == "darwin":
        query = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        return frozenset({"bf16"} if answer.strip() == "1" else ())
    return frozenset()
