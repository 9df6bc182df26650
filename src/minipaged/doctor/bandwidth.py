"""How fast memory is read: the limit of decoding, where every token reads every weight once."""

from __future__ import annotations

import statistics
from pathlib import Path

from minipaged import cgroup
from minipaged.bench.limits import Limits
from minipaged.bench.machine import last_level_cache_bytes
from minipaged.bench.probes import CACHES, LEAST_BUFFER, Probes
from minipaged.bench.trials import STEADY
from minipaged.doctor.finding import Finding, State
from minipaged.model.dtypes import resolve_dtype
from minipaged.model.random_weights import QWEN3_SHAPES
from minipaged.ops.cpu.library import unavailable_reason
from minipaged.threads import set_threads

MODEL = "qwen3-0.6b"
PROBES = 5
SHARE = 0.5  # of the available memory, at most, for the buffer that is read
SMALLEST = 64 << 20


def model_bytes(itemsize: int = 2) -> int:
    """Bytes of weights that one decode step of Qwen3-0.6B reads."""
    return Limits(QWEN3_SHAPES[MODEL], itemsize, itemsize).weight_bytes


def read_bandwidth(root: Path) -> list[Finding]:
    """Median and spread of several probes with the threads that the engine would use, and what decode can reach."""
    import torch

    count = set_threads()
    wanted = max(LEAST_BUFFER, CACHES * (last_level_cache_bytes() or 0))
    left = cgroup.available_memory(root / "proc", root / "sys" / "fs" / "cgroup")
    size = wanted if left is None else min(wanted, int(left * SHARE))
    name = "read bandwidth"
    if size < SMALLEST:
        why = f"{left} bytes of memory are available, too little for a buffer that no cache holds"
        return [_none(why, "end other programs, or raise the memory limit", "warning")]
    probes = Probes(threads=count, buffer_bytes=size)
    rates = [probes.read_bandwidth() for _ in range(PROBES)]
    median = statistics.median(rates)
    spread = (max(rates) - min(rates)) / median
    native = unavailable_reason("cpu") is None
    dtype = resolve_dtype("auto", torch.bfloat16, fast_bfloat16=native)
    most = median / model_bytes(dtype.itemsize)
    kind = str(dtype).removeprefix("torch.")
    facts = {
        "gb_s": median / 1e9,
        "spread": spread,
        "probe": probes.method,
        "decode_limit_tok_s": most,
        "decode_limit_model": MODEL,
        "decode_limit_dtype": kind,
    }
    value = f"{median / 1e9:.1f} GB/s, spread {spread:.0%}"
    why = f"{probes.method}; decode of Qwen3-0.6B in {kind} cannot pass {most:.0f} tok/s per sequence"
    if spread > STEADY:
        advice = "others use the memory too: repeat it on a quiet machine before you trust a measured speed"
        return [Finding(name=name, value=value, why=why, state="note", advice=advice, facts=facts)]
    if size < wanted:
        advice = "too little memory for a larger buffer: caches may make this figure too high"
        return [Finding(name=name, value=value, why=why, state="note", advice=advice, facts=facts)]
    advice = f"`minipaged bench latency --shape {MODEL}` shows how near the engine comes"
    return [Finding(name=name, value=value, why=why, advice=advice, facts=facts)]


def not_measured() -> list[Finding]:
    """For --quick."""
    return [_none("--quick leaves the probe out", "run it without --quick: it takes a few seconds", "ok")]


def _none(why: str, advice: str, state: State) -> Finding:
    return Finding(
        name="read bandwidth",
        value="not measured",
        why=why,
        state=state,
        advice=advice,
        facts={"gb_s": None},
    )
