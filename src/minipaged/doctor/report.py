"""The diagnosis for people: a table, the build's error if there is one, and a last line that says whether it works."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minipaged.doctor.examine import Diagnosis
from minipaged.doctor.finding import NOTHING, STATES, Finding

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Every finding with its state, its reason and, below it, its advice."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosis.findings:
        table.add_row(Text(finding.state, STYLES[finding.state]), Text(finding.name, "bold"), _text(finding))
    console.print(table)
    _print_build_error(diagnosis, console)
    console.print()
    console.print(_verdict(diagnosis), soft_wrap=True)


def _text(finding: Finding) -> Text:
    quiet = finding.state == "ok"
    text = Text(finding.value)
    text.append(f" ({finding.why})" if quiet else f"\n{finding.why}", "dim")
    if finding.advice != NOTHING:
        text.append(f"\n-> {finding.advice}", "" if quiet else STYLES[finding.state])
    return text


def _print_build_error(diagnosis: Diagnosis, console: Console) -> None:
    error, log = diagnosis.fact("back end cpu", "build_error"), diagnosis.fact("back end cpu", "build_log")
    if not error:
        return
    console.print(Text("\nerror of the native kernels' build:", "bold"))
    for line in error.splitlines():
        console.print(Text(f"  {line}"), soft_wrap=True)
    if log:
        console.print(Text(f"all of its output: {log}"), soft_wrap=True)


def _verdict(diagnosis: Diagnosis) -> Text:
    if diagnosis.backend is None:
        verdict = Text(f"not usable: {diagnosis.reason}", STYLES["problem"])
    else:
        verdict = Text.assemble(("usable", "bold green"), f": back end {diagnosis.backend} serves")
    for state in STATES[:0:-1]:  # the worst first; what is ok is not counted
        names = [finding.name for finding in diagnosis.findings if finding.state == state]
        if names:
            plural = "s" if len(names) > 1 else ""
            verdict.append(f"\n{len(names)} {state}{plural}: {', '.join(names)}", STYLES[state])
    return verdict
