"""The parts that reports of all benchmarks share: limits, noise, and one row of a table of cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minipaged.bench.machine import last_level_cache_bytes, machine_facts, versions
from minipaged.bench.noise import QUIET
from minipaged.bench.trials import STEADY, Trials

if TYPE_CHECKING:
    from minipaged.bench.probes import Probes

Report = dict[str, Any]


def report_header(
    benchmark: str,
    model: str,
    trials: Trials[Any],
    probes: Probes,
    peak: tuple[float, str] | None,
    *,
    threads: int,
    backend: str,
    dtype: str,
    device: str,
) -> Report:
    """What every report says. peak: operations per second of matrix products and what reached them, None = not
    measured."""
    return {
        "benchmark": benchmark,
        "model": model,
        "read_bandwidth_gb_s": trials.probe / 1e9,
        "read_bandwidth_spread": trials.spread,
        "read_probe": probes.method,
        "matrix_peak_gflop_s": None if peak is None else peak[0] / 1e9,
        "matrix_probe": None if peak is None else peak[1],
        "other_cores": trials.other_cores,
        "rounds": len(trials.kept),
        "noisy_rounds": trials.noisy,
        "threads": threads,
        "backend": backend,
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "machine": machine_facts(device),
        "versions": versions(),
        "notes": _noise_note(trials),
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


def _noise_note(trials: Trials[Any]) -> list[str]:
    if trials.noisy < len(trials.all):
        return []
    return [
        f"every run was noisy (others took more than {QUIET} cores, or read bandwidth moved by more than "
        f"{STEADY:.0%}): measure again on a quiet machine"
    ]
