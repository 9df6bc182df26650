"""What every runner in this folder shares: arguments, a warm-up, one workload, and a JSON file with the figures.

A runner loads its engine, says what it is, and runs requests; everything that is measured is measured here. Needs
nothing but numpy and this repository's `src` on the path (`compare.py` sets it), so that it works inside each
engine's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from minipaged.bench.noise import LoadMeter
from minipaged.bench.workloads import BenchRequest, workload

WARM_UP = (128, 8)  # prompt and output tokens


@dataclass
class Timing:
    """One pass over the requests, in seconds of one clock. first, last: of each request's tokens, [] if the engine
    does not tell.
    """

    begin: float
    end: float
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """A loaded rival. `facts`: its version, precision and options."""

    facts: dict[str, Any]

    def run(self, requests: Sequence[BenchRequest]) -> Timing:
        """Greedy, end-of-sequence ignored, all at once. Raises if a request does not get all its tokens."""
        ...


def main(load: Callable[[argparse.Namespace], Engine]) -> None:
    """Entry point of a runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--model", required=True, help="folder or file")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of options of the engine")
    arguments = parser.parse_args()
    requests = workload(arguments.workload).requests
    begin = time.perf_counter()
    engine = load(arguments)
    load_s = time.perf_counter() - begin
    prompt, output = WARM_UP
    engine.run([BenchRequest(requests[0].prompt[:prompt], output)])
    meter = LoadMeter()
    timing = engine.run(requests)
    load = meter.stop()
    result = {
        **figures(requests, timing),
        **timing.facts,
        **engine.facts,
        "load_s": load_s,
        "peak_bytes": peak_bytes(),
        "own_cores": load and load.own_cores,
        "other_cores": load and load.other_cores,
    }
    arguments.out.write_text(json.dumps(result))


def figures(requests: Sequence[BenchRequest], timing: Timing) -> dict[str, float]:
    """Rates per second and seconds, as far as they make sense for these requests."""
    seconds = timing.end - timing.begin
    found = {"total_s": seconds}
    if all(request.output_tokens == 1 for request in requests):
        found["prefill_tok_s"] = sum(len(request.prompt) for request in requests) / seconds
    else:
        found["output_tok_s"] = sum(request.output_tokens for request in requests) / seconds
    if timing.first:
        found["ttft_s"] = statistics.median(first - timing.begin for first in timing.first)
    if len(requests) == 1 and timing.last and requests[0].output_tokens > 1:
        found["decode_tok_s"] = (requests[0].output_tokens - 1) / (timing.last[0] - timing.first[0])
    return found


def peak_bytes() -> int:
    """Peak resident memory of this process and its descendants, each at its own peak."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines = (entry / "status").read_text().splitlines()
            except OSError:
                continue  # it has ended
            values = dict(line.split(":", 1) for line in lines if ":" in line)
            parents[int(entry.name)] = int(values["PPid"])
            peaks[int(entry.name)] = int(values.get("VmHWM", "0").split()[0]) * 1024
    family, grown = {os.getpid()}, True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in family} - family
        grown = bool(new)
        family |= new
    return sum(peaks.get(pid, 0) for pid in family)
