"""From runs to a verdict: medians, the best rival per figure, our ratio to it, and what was promised."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS = "ours"


@dataclass(frozen=True)
class Target:
    """A figure of a workload, and the ratio to the best rival that must be and should be reached."""

    figure: str
    unit: str
    must: float
    aim: float
    less_is_better: bool = False

    def best(self, values: dict[str, float]) -> str:
        """The engine with the best value."""
        return (min if self.less_is_better else max)(values, key=lambda engine: values[engine])

    def reached(self, ratio: float, wanted: float) -> bool:
        """Whether ours / best rival is good enough."""
        return ratio <= wanted if self.less_is_better else ratio >= wanted


@dataclass(frozen=True)
class Extra:
    """Something that only ours is measured on, by `minipaged bench`: arguments, figure, bounds."""

    arguments: tuple[str, ...]
    figure: str
    unit: str
    must: float
    aim: float
    less_is_better: bool = False
    scale: float = 1.0

    def reached(self, value: float, wanted: float) -> bool:
        """Whether the figure, scaled to its unit, is good enough."""
        return value <= wanted if self.less_is_better else value >= wanted


WORKLOADS: dict[str, tuple[Target, ...]] = {
    "W1": (Target("decode_tok_s", "tok/s", 1.2, 1.3),),
    "W2": (Target("output_tok_s", "tok/s", 1.6, 2.0),),
    "W4": (Target("prefill_tok_s", "tok/s", 1.05, 1.25),),
    "W3": (Target("output_tok_s", "tok/s", 1.4, 1.8),),
    "W5": (Target("decode_tok_s", "tok/s", 1.3, 1.5), Target("ttft_s", "s", 1.0, 0.85, less_is_better=True)),
}
EXTRAS: dict[str, Extra] = {
    "attention": Extra(
        ("attention", "--shape", "qwen3-0.6b", "--sequences", "8", "--context", "2048"),
        "share_of_bandwidth",
        "% of read bandwidth",
        75,
        88,
        scale=100,
    ),
    "scattered": Extra(
        ("attention", "--shape", "qwen3-0.6b", "--sequences", "8", "--context", "2048", "--scattered"),
        "share_of_bandwidth",
        "% of read bandwidth",
        75,
        88,
        scale=100,
    ),
    "startup": Extra(("startup",), "own_s", "s without import torch", 2.0, 1.5, less_is_better=True),
}
W1_SHARE = (0.85, 0.95)  # of read bandwidth: must, aim
WHAT = {
    "W1": "1 request, prompt 128, output 128",
    "W2": "8 requests, prompt 128, output 128",
    "W3": "32 requests, prompts 100-512, outputs 32-256",
    "W4": "1 prompt of 2048",
    "W5": "1 prompt of 8192, output 32",
    "attention": "decode attention alone, 8 x 2048, blocks as a fresh pool hands them out",
    "scattered": "the same, blocks in random order",
    "startup": "start of the 0.6B from a page-cached file",
}


def median_of(runs: Sequence[dict[str, Any]], engine: str, workload: str, figure: str) -> float | None:
    """Over the quiet runs, over all of them if none was quiet; None without any."""
    found = [r for r in runs if r["engine"] == engine and r["workload"] == workload and figure in r]
    kept = [r for r in found if r["quiet"]] or found
    return statistics.median(r[figure] for r in kept) if kept else None


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per figure of each workload that ran, in the order of the tables above."""
    engines = list(dict.fromkeys(run["engine"] for run in runs))
    entries = []
    for workload, targets in WORKLOADS.items():
        if not any(run["workload"] == workload for run in runs):
            continue
        for target in targets:
            medians = {e: median_of(runs, e, workload, target.figure) for e in engines}
            values = {engine: value for engine, value in medians.items() if value is not None}
            entries.append({"workload": workload, **_judged(target, values), **_noise(runs, workload)})
        entries += _bandwidth_share(runs) if workload == "W1" else []
    for name, extra in EXTRAS.items():
        value = median_of(runs, OURS, name, extra.figure)
        if value is not None:
            value *= extra.scale
            bounds = {"must": extra.must, "aim": extra.aim}
            verdict = _verdict(extra.reached(value, extra.must), extra.reached(value, extra.aim))
            entry = {"workload": name, "figure": extra.figure, "unit": extra.unit, "values": {OURS: value}}
            entries.append({**entry, **bounds, "verdict": verdict, **_noise(runs, name)})
    return entries


def _judged(target: Target, values: dict[str, float]) -> dict[str, Any]:
    entry: dict[str, Any] = {"figure": target.figure, "unit": target.unit, "values": values}
    entry |= {"must": target.must, "aim": target.aim, "best_rival": None, "ratio": None, "verdict": "not comparable"}
    rivals = {engine: value for engine, value in values.items() if engine != OURS}
    if OURS in values and rivals:
        best = target.best(rivals)
        ratio = values[OURS] / rivals[best]
        verdict = _verdict(target.reached(ratio, target.must), target.reached(ratio, target.aim))
        entry |= {"best_rival": best, "ratio": ratio, "verdict": verdict}
    return entry


def _bandwidth_share(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """W1 of ours: bytes of a step * steps per second / median of the probes before, between and after the runs of
    W1.
    """
    speed, nbytes = (median_of(runs, OURS, "W1", figure) for figure in ("decode_tok_s", "bytes_per_step"))
    if speed is None or nbytes is None:
        return []
    probes = [probe for run in runs if run["workload"] == "W1" for probe in run["read_bandwidth"]]
    share, (must, aim) = speed * nbytes / statistics.median(probes), W1_SHARE
    entry = {
        "workload": "W1",
        "figure": "share_of_bandwidth",
        "unit": "% of read bandwidth",
        "values": {OURS: 100 * share},
    }
    verdict = _verdict(share >= must, share >= aim)
    return [{**entry, "must": 100 * must, "aim": 100 * aim, "verdict": verdict, **_noise(runs, "W1")}]


def _noise(runs: Sequence[dict[str, Any]], workload: str) -> dict[str, int]:
    own = [run for run in runs if run["workload"] == workload]
    return {"measurements": len(own), "noisy": sum(not run["quiet"] for run in own)}


def _verdict(must: bool, aim: bool) -> str:
    return "aim reached" if aim else "must reached" if must else "missed"


def to_markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    machine, runs = report["machine"], report["runs"]
    engines = list(dict.fromkeys(run["engine"] for run in runs))
    probes = sorted(probe / 1e9 for run in runs for probe in run["read_bandwidth"])

    def titled(engine: str) -> str:
        """With the back ends that computed, which only ours tells."""
        backends = {run["backend"] for run in runs if run["engine"] == engine and "backend" in run}
        return f"{engine} ({', '.join(sorted(backends))})" if backends else engine

    titles = " | ".join(map(titled, engines))
    lines = [
        f"# Comparison of {report['when']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['cpu_features'])}), "
        f"{(machine['memory_bytes'] or 0) / 2**30:.1f} GiB, {machine['system']}; {report['threads']} threads. "
        "Qwen3-0.6B shapes, random weights, greedy, end-of-sequence ignored, prefix caches off.",
        "",
        f"Read bandwidth: median {statistics.median(probes):.1f} GB/s, from {probes[0]:.1f} to {probes[-1]:.1f} "
        f"({report['read_probe']}).",
        "",
        "| engine | version | precision |",
        "|---|---|---|",
    ]
    for engine in engines:
        facts = next((run for run in runs if run["engine"] == engine and "version" in run), {})
        lines.append(f"| {titled(engine)} | {facts.get('version', '-')} | {facts.get('precision', '-')} |")
    lines += [
        "",
        f"| workload | figure | {titles} | best rival | ours / best | must | aim | verdict | noisy |",
        "|---" * (8 + len(engines)) + "|",
    ]
    for entry in report["summary"]:
        values = [_number(entry["values"].get(engine)) for engine in engines]
        ratio = entry.get("ratio")
        cells = [f"{entry['workload']}: {WHAT[entry['workload']]}", f"{entry['figure']} ({entry['unit']})", *values]
        cells += [entry.get("best_rival") or "-", "-" if ratio is None else f"{ratio:.2f}"]
        cells += [f"{entry['must']:g}", f"{entry['aim']:g}", entry["verdict"]]
        cells.append(f"{entry['noisy']} of {entry['measurements']}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += _errors(runs)
    lines += [
        "",
        "Medians over the quiet runs (others took at most 0.1 core and the probes around a run agree within "
        "15 %), over all runs where none was quiet. Every run is in the JSON file.",
        "",
    ]
    return "\n".join(lines)


def _errors(runs: Sequence[dict[str, Any]]) -> list[str]:
    failed = [run for run in runs if "error" in run]
    return ["", *(f"- {run['engine']} failed on {run['workload']}: {run['error']}" for run in failed)] if failed else []


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
