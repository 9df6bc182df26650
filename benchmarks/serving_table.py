"""What `compare_serving.py` sends, and from its runs to a page: medians over the rounds, and ours over the other's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import OURS, median_of

RANDOM = ("--prompt-tokens", "320", "--spread", "0.6", "--output-tokens", "64", "--seed", "0")
CUT = ("--max-prompt-tokens", "512", "--max-output-tokens", "64")
SLO_TTFT_MS, SLO_TPOT_MS = 2000, 200  # MLPerf Inference's server scenario of Llama 2 70B, fixed before any run
SLO = ("--slo-ttft", str(SLO_TTFT_MS), "--slo-tpot", str(SLO_TPOT_MS))


@dataclass(frozen=True)
class Scenario:
    """What it is, and the flags of `minipaged bench serve` that make it."""

    what: str
    arguments: tuple[str, ...]
    trace: bool = False  # needs the Azure trace

    def limited(self, requests: int | None) -> Scenario:
        """With so many requests; None changes nothing."""
        if requests is None:
            return self
        return Scenario(
            f"{self.what}; {requests} requests only", (*self.arguments, "--num-requests", str(requests)), self.trace
        )


SCENARIOS = {
    "steady": Scenario(
        "0.5 requests/s (Poisson), prompts 128-512, outputs 26-102",
        (*RANDOM, "--num-requests", "20", "--request-rate", "0.5", *SLO),
    ),
    "overload": Scenario(
        "2 requests/s (Poisson), the same lengths: more than two cores can serve, so the queue grows",
        (*RANDOM, "--num-requests", "30", "--request-rate", "2", *SLO),
    ),
    "azure": Scenario(
        "first 20 requests of the Azure conversation trace at 0.4 of its speed, prompts cut to 512, outputs to 64",
        ("--num-requests", "20", "--speed", "0.4", *CUT, *SLO),
        trace=True,
    ),
}


@dataclass(frozen=True)
class Figure:
    """A column: its heading, where it stands in the client's report, its unit."""

    heading: str
    path: tuple[str, ...]
    unit: str = "ms"


FIGURES = {
    "output_tok_s": Figure("output", ("output_tok_s",), "tok/s"),
    "requests_per_s": Figure("completed", ("requests_per_s",), "req/s"),
    "goodput_per_s": Figure("goodput", ("goodput_per_s",), "req/s"),
    "ttft_p50_ms": Figure("TTFT p50", ("ttft_ms", "p50")),
    "ttft_p99_ms": Figure("TTFT p99", ("ttft_ms", "p99")),
    "tpot_p50_ms": Figure("TPOT p50", ("tpot_ms", "p50")),
    "itl_p50_ms": Figure("ITL p50", ("itl_ms", "p50")),
    "itl_p99_ms": Figure("ITL p99", ("itl_ms", "p99")),
    "e2e_p99_ms": Figure("E2E p99", ("e2e_ms", "p99")),
}


def scenario_arguments(scenario: Scenario, azure: Path | None) -> list[str]:
    """Flags of `bench serve`, with the trace where the scenario needs it. ValueError without one."""
    if not scenario.trace:
        return list(scenario.arguments)
    if azure is None:
        raise ValueError("this scenario needs the file of the Azure trace")
    return ["--dataset", "azure", str(azure), *scenario.arguments]


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Of one report of `bench serve`: every figure that it has, failed requests, and tokens per event. A server that
    puts several tokens into one event has fewer and longer gaps: its ITL is not another's.
    """
    found: dict[str, float] = {"failed": report["failed"]}
    for name, figure in FIGURES.items():
        value: Any = report
        for key in figure.path:
            value = None if value is None else value[key]
        if value is not None:
            found[name] = value
    if report["token_events"]:
        found["tokens_per_event"] = report["output_tokens"] / report["token_events"]
    return found


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per scenario that ran, in order: medians per server and figure, ours / other for each other server, and
    how many of the runs were noisy.
    """
    measured = [run for run in runs if "error" not in run]
    names = list(dict.fromkeys(run["engine"] for run in measured))
    entries = []
    for scenario in dict.fromkeys(run["workload"] for run in measured):
        own = [run for run in measured if run["workload"] == scenario]
        values = {name: _medians(own, name, scenario) for name in names}
        ratios = {
            name: {f: values[OURS][f] / v for f, v in values[name].items() if v and f in values[OURS] and f in FIGURES}
            for name in names
            if name != OURS and OURS in names
        }
        entry = {"scenario": scenario, "values": values, "ratios": ratios, "measurements": len(own)}
        entries.append({**entry, "noisy": sum(not run["quiet"] for run in own)})
    return entries


def _medians(runs: Sequence[dict[str, Any]], name: str, scenario: str) -> dict[str, float]:
    keys = (*FIGURES, "tokens_per_event")
    medians = {key: median_of(runs, name, scenario, key) for key in keys}
    failed = sum(run["failed"] for run in runs if run["engine"] == name)
    return {**{key: value for key, value in medians.items() if value is not None}, "failed": failed}


def to_markdown(page: dict[str, Any]) -> str:
    """The page."""
    machine, runs = page["machine"], page["runs"]
    measured = [run for run in runs if "error" not in run]
    lines = [
        f"# Serving, {page['when']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['cpu_features'])}), "
        f"{(machine['memory_bytes'] or 0) / 2**30:.1f} GiB, {machine['system']}; {page['threads']} threads. "
        f"Qwen3-0.6B shapes, random weights, greedy, end-of-sequence ignored; KV pool {page['kv_pool_gib']} GiB. Every "
        f"server gets `{' '.join(page['flags'])}`, and its own defaults otherwise.",
        "",
        "The client is `minipaged bench serve`, one process on the same machine; every server gets the same prompts, "
        "lengths and arrival times. Latencies are what the client sees. Goodput counts requests with a first token "
        f"within {SLO_TTFT_MS} ms and at most {SLO_TPOT_MS} ms per later token.",
        "",
        "| server | version | precision | start, s |",
        "|---|---|---|---|",
    ]
    for name, facts in page["servers"].items():
        lines.append(f"| {name} | {facts['version']} | {facts['precision']} | {facts['start_s']:.0f} |")
    if measured:
        probes = sorted(probe / 1e9 for run in measured for probe in run["read_bandwidth"])
        lines += [
            "",
            f"Read bandwidth: median {statistics.median(probes):.1f} GB/s, from {probes[0]:.1f} to {probes[-1]:.1f} "
            f"({page['read_probe']}).",
        ]
    for entry in page["summary"]:
        lines += ["", *_scenario_lines(entry, page["scenarios"][entry["scenario"]]["what"])]
    failed = [f"- {run['engine']}, round {run['round'] + 1}: {run['error']}" for run in runs if "error" in run]
    lines += ["", *failed] if failed else []
    lines += ["", "## Every run", "", *_run_lines(measured)]
    lines += [
        "",
        "Above: medians over the quiet runs (others took at most 0.1 core and the probes around a run agree "
        "within 15 %), over all runs where none was quiet. p99 of 20 or 30 requests is nearly the slowest one; "
        f"ITL has a value per token. {page['minutes']:.0f} minutes in all. The client's whole reports are in the JSON "
        "file.",
        "",
    ]
    return "\n".join(lines)


def _scenario_lines(entry: dict[str, Any], what: str) -> list[str]:
    headings = [f"{figure.heading}, {figure.unit}" for figure in FIGURES.values()]
    lines = [
        f"## {entry['scenario']}: {what}",
        "",
        f"| | {' | '.join(headings)} | tokens per event | failed |",
        "|---" * (3 + len(headings)) + "|",
    ]
    for name, values in entry["values"].items():
        cells = [_number(values.get(figure)) for figure in (*FIGURES, "tokens_per_event")]
        lines.append(f"| {name} | {' | '.join(cells)} | {values['failed']} |")
    for name, ratios in entry["ratios"].items():
        cells = [f"{ratios[figure]:.2f}" if figure in ratios else "-" for figure in FIGURES]
        lines.append(f"| ours / {name} | {' | '.join(cells)} | | |")
    return [*lines, "", f"Noisy: {entry['noisy']} of {entry['measurements']} runs."]


def _run_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    shown = ("output_tok_s", "ttft_p99_ms", "itl_p99_ms")
    headings = [f"{FIGURES[name].heading}, {FIGURES[name].unit}" for name in shown]
    lines = [f"| round | server | scenario | {' | '.join(headings)} | read GB/s | |", "|---" * 8 + "|"]
    for run in runs:
        cells = [_number(run.get(name)) for name in shown]
        probes = " -> ".join(f"{value / 1e9:.1f}" for value in run["read_bandwidth"])
        remark = "" if run["quiet"] else "noisy"
        lines.append(
            f"| {run['round'] + 1} | {run['engine']} | {run['workload']} | {' | '.join(cells)} | {probes} | {remark} |"
        )
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
