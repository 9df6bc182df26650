"""The processor, and which of the native kernels' instruction sets runs on it."""

from __future__ import annotations

import os
from pathlib import Path

from minipaged.bench.machine import FEATURES, cpu_name
from minipaged.cpu_flags import read_cpu_flags
from minipaged.doctor.finding import NOTHING, Finding, unknown

ISA_VARIABLE = "MINIPAGED_CPU_ISA"
# What each set of native kernels needs (CMakeLists.txt), as /proc/cpuinfo spells it; fastest first.
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
NEEDS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}


def cpu(root: Path) -> list[Finding]:
    """Name and the features that decide how fast a model runs."""
    cpuinfo = root / "proc" / "cpuinfo"
    name, flags = cpu_name(cpuinfo), read_cpu_flags(cpuinfo)
    if name is None and not flags:
        return [unknown("cpu", "there is no readable /proc/cpuinfo", "nothing to do: the kernels ask the CPU itself")]
    features = [feature for feature in FEATURES if feature in flags]
    return [
        Finding(
            name="cpu",
            value=name or "unknown name",
            why="features: " + (" ".join(features) or "none that the kernels use"),
            advice=NOTHING,
            facts={"name": name, "features": features},
        )
    ]


def instruction_set(root: Path) -> list[Finding]:
    """Which native kernels were chosen; nothing without the native library (the back end's finding says why)."""
    from minipaged.ops.cpu.library import instruction_sets, unavailable_reason

    if unavailable_reason("cpu") is not None:
        return []
    return [judge_instruction_set(instruction_sets(), os.environ.get(ISA_VARIABLE, ""), _flags(root))]


def judge_instruction_set(built: dict[str, bool], wanted: str, flags: frozenset[str]) -> Finding:
    """built: every set in the library, fastest first, and whether this CPU runs it; wanted: MINIPAGED_CPU_ISA."""
    running = [name for name, runs in built.items() if runs]
    best = running[0]
    facts = {"chosen": wanted or best, "available": running, "override": wanted or None}
    if wanted and wanted not in running:
        return Finding(
            name="instruction set",
            value=f"{wanted}, which does not run here",
            why=f"{ISA_VARIABLE}={wanted}; this CPU and this build have {', '.join(running)}",
            state="problem",
            advice=f"unset {ISA_VARIABLE}: back end 'cpu' does not start with it",
            facts={**facts, "chosen": None},
        )
    if wanted and wanted != best:
        return Finding(
            name="instruction set",
            value=wanted,
            why=f"{ISA_VARIABLE}={wanted} overrides {best}, the fastest that runs here",
            state="warning",
            advice=f"unset {ISA_VARIABLE} unless you compare instruction sets: {wanted} is slower",
            facts=facts,
        )
    why = f"the fastest of {', '.join(running)}" + (f" ({ISA_VARIABLE} says the same)" if wanted else "")
    better = next(iter(built))
    missing = [feature for feature in NEEDS.get(better, ()) if feature not in flags]
    if best == better or not missing:
        return Finding(
            name="instruction set", value=best, why=why, advice=f"{ISA_VARIABLE} picks another one", facts=facts
        )
    costs = "bfloat16 products are computed in float32 here" if "avx512_bf16" in missing else ""
    return Finding(
        name="instruction set",
        value=best,
        why=f"{why}; {better} needs {' '.join(missing)}, which this CPU (or its hypervisor) does not offer",
        state="note",
        advice=f"{costs}; a CPU with AVX-512-BF16 is faster at prompts and batches"
        if costs
        else "nothing to do on this CPU",
        facts=facts,
    )


def _flags(root: Path) -> frozenset[str]:
    return read_cpu_flags(root / "proc" / "cpuinfo")
