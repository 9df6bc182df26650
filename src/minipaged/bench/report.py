"""A report for people: what was measured, on what, the result, its share of the limit; and its comparison with
another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from minipaged.bench.report_header import Report


@dataclass(frozen=True, slots=True)
class Figure:
    """How to print a number of a report. better: +1 more is better, -1 less is better, 0 neither."""

    label: str
    form: str
    better: int = 0
    scale: float = 1.0

    def show(self, value: float) -> str:
        """The number with its unit."""
        return self.form.format(value * self.scale)


GIB, MB = 1 / 2**30, 1e-6
# In the order in which they are printed. A report has those that belong to its benchmark.
FIGURES: dict[str, Figure] = {
    "output_tok_s": Figure("output", "{:.1f} tok/s", +1),
    "decode_tok_s": Figure("decode, per sequence", "{:.2f} tok/s", +1),
    "prefill_tok_s": Figure("prefill", "{:.1f} tok/s", +1),
    "tok_s": Figure("step", "{:.2f} tok/s", +1),
    "gb_s": Figure("rate", "{:.1f} GB/s", +1),
    "own_s": Figure("start, own part", "{:.2f} s", -1),
    "import_torch_s": Figure("start, import torch", "{:.2f} s", -1),
    "total_s": Figure("whole", "{:.2f} s", -1),
    "load_s": Figure("of which loading", "{:.2f} s", -1),
    "ttft_s": Figure("time to first token", "{:.3f} s", -1),
    "first_token_s": Figure("first token when ready", "{:.3f} s", -1),
    "bytes_per_step": Figure("a decode step must read", "{:.1f} MB", 0, MB),
    "share_of_bandwidth": Figure("share of read bandwidth", "{:.1%}", +1),
    "share_of_matrix_peak": Figure("share of matrix peak", "{:.1%}", +1),
    "share_of_limit": Figure("share of the limit (memory or arithmetic)", "{:.1%}", +1),
    "share_outside_runner": Figure("time in scheduler and outputs", "{:.1%}", -1),
    "preemptions": Figure("preemptions", "{:.0f}", -1),
    "cached_tokens": Figure("prompt tokens found in the prefix cache", "{:.0f}"),
    "anonymous_growth_bytes": Figure("anonymous memory after import torch", "{:.2f} GiB", -1, GIB),
    "anonymous_overhead_bytes": Figure("of which not weights", "{:.1f} MB", -1, MB),
    "anonymous_allowed_bytes": Figure("packed weights + KV pool + 300 MB", "{:.2f} GiB", 0, GIB),
    "read_bandwidth_gb_s": Figure("read bandwidth", "{:.1f} GB/s"),
    "matrix_peak_gflop_s": Figure("matrix peak", "{:.0f} GFLOP/s"),
}
LIMITS = ("read_bandwidth_gb_s", "matrix_peak_gflop_s")  # of the machine: printed apart
SAME = ("benchmark", "workload", "description", "model", "threads", "backend", "dtype", "device", "headline")


def print_report(report: Report, console: Console) -> None:
    """Everything but the single runs and the profile."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(report):
        table.add_row(name, Text(value))
    console.print(table)
    if "cases" in report:
        console.print(_cases(report))
    for note in report["notes"]:
        console.print(Text(f"note: {note}", style="yellow"))


def _facts(report: Report) -> list[tuple[str, str]]:
    machine, versions = report["machine"], report["versions"]
    parts = [f"{machine['cpu']}, {machine['cores']} cores"]
    if machine.get("gpu"):
        parts.insert(0, machine["gpu"])
    if machine["last_level_cache_bytes"]:
        parts.append(f"last-level cache {machine['last_level_cache_bytes'] / 2**20:.0f} MiB")
    if machine["memory_bytes"]:
        parts.append(f"memory {machine['memory_bytes'] / 2**30:.1f} GiB")
    parts.append(machine["system"])
    others = "unknown" if report["other_cores"] is None else f"{report['other_cores']:.2f} cores taken by others"
    peak = report["matrix_peak_gflop_s"]
    limits = f"read {report['read_bandwidth_gb_s']:.1f} GB/s, spread {report['read_bandwidth_spread']:.0%}"
    facts = [
        ("machine", ", ".join(parts)),
        ("CPU features", " ".join(machine["cpu_features"]) or "unknown"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("threads", f"{report['threads']}, back end {report['backend']}, {report['dtype']} on {report['device']}"),
        ("limits", limits if peak is None else f"{limits}; {report['matrix_probe']} {peak:.0f} GFLOP/s"),
        ("read probe", report["read_probe"]),
        ("noise", f"{others}; {report['rounds']} rounds counted, {report['noisy_rounds']} noisy"),
        ("model", report["model"]),
    ]
    if "workload" in report:
        counts = f"{report['prompt_tokens']} prompt and {report['output_tokens']} output tokens"
        facts.append(("workload", f"{report['workload']}: {report['description']} ({counts})"))
    if "headline" in report:
        facts.append(("headline", report["headline"]))
    facts += [(figure.label, text) for figure, text in _figures(report)]
    return facts


def _figures(report: Report) -> list[tuple[Figure, str]]:
    names = [name for name in FIGURES if name not in LIMITS and report.get(name) is not None]
    return [(FIGURES[name], FIGURES[name].show(report[name])) for name in names]


# title, key, format, factor
CASE_COLUMNS = (
    ("ms", "seconds", "{:.3f}", 1e3),
    ("tok/s", "tok_s", "{:.1f}", 1.0),
    ("GB/s", "gb_s", "{:.1f}", 1.0),
    ("GFLOP/s", "gflop_s", "{:.0f}", 1.0),
    ("of bandwidth", "share_of_bandwidth", "{:.0%}", 1.0),
    ("of matrix peak", "share_of_matrix_peak", "{:.0%}", 1.0),
    ("of the limit", "share_of_limit", "{:.0%}", 1.0),
)


def _cases(report: Report) -> Table:
    columns = [column for column in CASE_COLUMNS if column[1] in report["cases"][0]]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    for title, *_ in columns:
        table.add_column(title, justify="right")
    for case in report["cases"]:
        table.add_row(case["case"], *(form.format(case[key] * factor) for _, key, form, factor in columns))
    return table


def print_profile(profile: dict[str, Any], console: Console) -> None:
    """Time per class of operation, for decode steps and for steps with prefill."""
    for kind, part in profile.items():
        if not part["steps"]:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), title=f"{part['steps']} {kind} steps", title_justify="left")
        table.add_column("operation", no_wrap=True)
        for title in ("ms per step", "share", "calls per step"):
            table.add_column(title, justify="right")
        for op in part["ops"]:
            table.add_row(op["op"], f"{op['ms_per_step']:.3f}", f"{op['share']:.1%}", f"{op['calls_per_step']:.1f}")
        table.add_row("all", f"{sum(op['ms_per_step'] for op in part['ops']):.3f}", "", "", style="bold")
        console.print(table)


def compare(report: Report, other: Report) -> dict[str, Any]:
    """This report against another one: for each figure that both have `{"now", "other", "ratio"}`, and what differs.

    ratio: now / other, None where the other is 0. differences: names that should be equal for a comparison, (other,
    now).
    """
    ratios = {}
    for name in FIGURES:
        now, before = report.get(name), other.get(name)
        if isinstance(now, int | float) and isinstance(before, int | float):
            ratios[name] = {"now": now, "other": before, "ratio": now / before if before else None}
    known_cases = {case["case"]: case for case in other.get("cases", [])}
    for case in report.get("cases", []):
        before = known_cases.get(case["case"], {}).get("seconds")
        if before:
            ratios[case["case"]] = {"now": case["seconds"], "other": before, "ratio": case["seconds"] / before}
    differences = {name: [other.get(name), report.get(name)] for name in SAME if other.get(name) != report.get(name)}
    cpus = [(r.get("machine") or {}).get("cpu") for r in (other, report)]
    if cpus[0] != cpus[1]:
        differences["cpu"] = cpus
    return {"figures": ratios, "differences": differences}


def print_comparison(comparison: dict[str, Any], console: Console) -> None:
    """A table of ratios; in the last column what they mean."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="against the other report", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for title in ("other", "now", "now / other"):
        table.add_column(title, justify="right")
    table.add_column("")
    in_seconds = Figure("", "{:.3f} ms", -1, 1e3)
    for name, row in comparison["figures"].items():
        figure = FIGURES.get(name, in_seconds)
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        verdict = _verdict(figure, row["ratio"])
        table.add_row(figure.label or name, figure.show(row["other"]), figure.show(row["now"]), ratio, verdict)
    console.print(table)
    for name, (before, now) in comparison["differences"].items():
        console.print(Text(f"note: not the same {name}: {before} there, {now} here", style="yellow"))


def _verdict(figure: Figure, ratio: float | None) -> Text:
    if ratio is None or not figure.better or abs(ratio - 1) < 0.01:
        return Text("")
    better = (ratio > 1) == (figure.better > 0)
    return Text("better", style="green") if better else Text("worse", style="red")
