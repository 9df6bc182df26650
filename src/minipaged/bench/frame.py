"""The parts that reports of all benchmarks share: limits, disturbance, and one row of a table of cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minipaged.bench.disturbance import QUIET
from minipaged.bench.machine import last_level_cache_bytes, machine_facts, versions
from minipaged.bench.sitting import STEADY, Sitting

if TYPE_CHECKING:
    from minipaged.bench.probes import Probes

Report = dict[str, Any]


def frame(
    benchmark: str,
    model: str,
    sitting: Sitting[Any],
    probes: Probes,
    peak: float | None,
    *,
    threads: int,
    backend: str,
    dtype: str,
    device: str,
) -> Report:
    """What every report says. peak: operations per second of matrix products, None = not measured."""
    return {
        "benchmark": benchmark,
        "model": model,
        "read_bandwidth_gb_s": sitting.probe / 1e9,
        "read_bandwidth_spread": sitting.spread,
        "read_probe": probes.method,
        "matrix_peak_gflop_s": None if peak is None else peak / 1e9,
        "other_cores": sitting.other_cores,
        "rounds": len(sitting.kept),
        "disturbed_rounds": sitting.disturbed,
        "threads": threads,
        "backend": backend,
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "machine": machine_facts(device),
        "versions": versions(),
        "notes": _disturbance_note(sitting),
    }


def case_part(name: str, seconds: float, nbytes: int, flops: int, bandwidth: float, peak: float) -> Report:
    """One row: what a call took, as rates and as shares of the limits."""
    return {
        "case": name,
        "seconds": seconds,
        "bytes": nbytes,
        "gb_s": nbytes / seconds / 1e9,
        "gflop_s": flops / seconds / 1e9,
        "share_of_bandwidth": nbytes / seconds / bandwidth,
        "share_of_matrix_peak": flops / seconds / peak,
        "share_of_limit": max(nbytes / bandwidth, flops / peak) / seconds,
    }


def cache_note(nbytes: int) -> list[str]:
    """A warning if what a step reads fits into the last-level cache, so that a share of memory bandwidth means
    nothing.
    """
    cache = last_level_cache_bytes()
    if cache is None or nbytes > 2 * cache:
        return []
    return [
        f"a step reads {nbytes / 2**20:.0f} MiB and the last-level cache holds {cache / 2**20:.0f} MiB: "
        "memory bandwidth is not what limits this model"
    ]


def _disturbance_note(sitting: Sitting[Any]) -> list[str]:
    if sitting.disturbed < len(sitting.attempts):
        return []
    return [
        f"every run was disturbed (others took more than {QUIET} cores, or read bandwidth moved by more than "
        f"{STEADY:.0%}): measure again on a quiet machine"
    ]
