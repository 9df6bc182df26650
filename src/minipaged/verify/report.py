"""The report for people: Rich tables on a terminal, the same text without colour in a pipe."""

from __future__ import annotations

import math
from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minipaged.verify.judge import LOGIT_TOLERANCE, NEAR_TIE_MARGIN, NOISE_FACTOR, ROUNDING, OpResult, Path, Report

COLUMNS: dict[str, tuple[tuple[Path, ...] | None, tuple[str, ...]]] = {
    "Q/K/V": (None, ("input_norm", "q_proj", "k_proj", "v_proj")),
    "QK-norm": (None, ("q_norm", "k_norm")),
    "RoPE": (None, ("q_rope", "k_rope")),
    "K/V\nwrite": (None, ("kv_write",)),
    "attention\nevery query": (("prefill", "chunk"), ("attention",)),
    "attention\nlast query": (("decode",), ("attention",)),
    "O": (None, ("o_proj", "hidden_mid")),
    "MLP": (None, ("post_norm", "mlp_gate_up", "mlp_down", "hidden_out")),
}
"""Column of the table: which paths (None = all) and which operations it sums up."""
MAX_LISTED = 10


def column_cells(report: Report) -> dict[int, dict[str, list[OpResult]]]:
    """layer -> column -> the results in it, for the decoder layers."""
    cells: dict[int, dict[str, list[OpResult]]] = {
        layer: {name: [] for name in COLUMNS} for layer in range(report.num_layers)
    }
    for result in report.ops:
        for name, (paths, ops) in COLUMNS.items():
            if result.layer in cells and result.op in ops and (paths is None or result.path in paths):
                cells[result.layer][name].append(result)
    return cells


def print_report(report: Report, console: Console) -> None:
    """Layers, tokens, claims and the verdict. Into a pipe the same, without colours."""
    console.print(headline(report), highlight=False, soft_wrap=True)
    if report.ops:
        console.print(_layer_table(report))
    if report.prompt_logits is not None:
        console.print(
            f"Logits of the whole model over {sum(map(len, report.prompts))} prompt tokens: max abs error "
            f"{report.prompt_logits.max_abs:.1e}, relative {report.prompt_logits.max_relative:.1e}"
            f"{_limit_note(report)}",
            highlight=False,
            soft_wrap=True,
        )
    if report.tokens:
        console.print(_token_line(report), highlight=False, soft_wrap=True)
        for token in report.near_ties[:MAX_LISTED]:
            console.print(
                f"  near tie: prompt {token.prompt}, position {token.position}: {token.chosen} for {token.expected}, "
                f"margin {token.margin:.1e}",
                highlight=False,
                soft_wrap=True,
            )
    if report.claims:
        console.print(_claim_table(report))
    for bug in report.bugs[:MAX_LISTED]:
        console.print(f"[red]bug:[/red] {escape(bug.message)}", highlight=False, soft_wrap=True)
    if len(report.bugs) > MAX_LISTED:
        console.print(f"... and {len(report.bugs) - MAX_LISTED} more", highlight=False)
    console.print(verdict(report), highlight=False, soft_wrap=True)


def headline(report: Report) -> str:
    """What was compared with what."""
    return (
        f"{escape(report.model)}: {report.num_layers} layers, back end {report.backend}, {report.dtype}, block size "
        f"{report.block_size}, against Hugging Face eager (transformers {report.versions['transformers']}, float32)"
    )


def verdict(report: Report) -> str:
    """The last line, in Rich's markup: passed, or how many bugs and the first of them."""
    if report.passed:
        return f"[green]passed[/green] in {report.seconds:.1f} s"
    count = len(report.bugs)
    return f"[red]failed[/red]: {count} bug{'s' * (count > 1)}, the first: {escape(report.bugs[0].message)}"


def _layer_table(report: Report) -> Table:
    kind = "relative (RMS)" if report.errors_add_up else "of the worst token, relative to that token's result"
    table = Table(
        title=f"Error by layer, {kind}; last line: the largest absolute error",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
    )
    cells = column_cells(report)
    table.add_column("layer", "max abs", justify="right")
    for name in COLUMNS:
        results = [result for by_column in cells.values() for result in by_column[name]]
        table.add_column(name, format_error(max(result.figures.max_abs for result in results)), justify="right")
    for layer, by_column in cells.items():
        table.add_row(str(layer), *(_cell(results) for results in by_column.values()))
    return table


def _cell(results: list[OpResult]) -> str:
    text = format_error(max(result.error for result in results))
    return text if all(result.passed for result in results) else f"[red]{text}[/red]"


def format_error(value: float) -> str:
    """An error for a table: infinite where something is missing or not a number."""
    return "exact" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "infinite"


def _limit_note(report: Report) -> str:
    if report.errors_add_up or report.logits_limit == LOGIT_TOLERANCE:
        return ""
    return (
        f" (up to {report.logits_limit:.1e} allowed: this model amplifies rounding, {ROUNDING:g} in each layer "
        f"moves Hugging Face's own by {report.logits_limit / NOISE_FACTOR:.1e})"
    )


def _token_line(report: Report) -> str:
    count = Counter(token.verdict for token in report.tokens)
    clear = sum(token.margin > NEAR_TIE_MARGIN for token in report.tokens)
    worst = max(token.max_abs for token in report.tokens)
    smallest = min(token.margin for token in report.tokens)
    return (
        f"Greedy decoding: {len(report.tokens)} tokens compared ({clear} with a margin above {NEAR_TIE_MARGIN:g}, "
        f"smallest {smallest:.1e}): {count['equal']} equal, {count['near tie']} near ties, {count['bug']} bugs; "
        f"logits off by at most {worst:.1e}"
    )


def _claim_table(report: Report) -> Table:
    exact = all(claim.limit == 0 for claim in report.claims)
    title = "bit-identical" if exact else "within the promise; this back end does not promise equal bits"
    table = Table(title=f"Determinism: logits against the same request alone ({title})", title_justify="left")
    for name in ("claim", "how", "rows", "identical", "max diff", "verdict"):
        table.add_column(name, justify="left" if name in ("claim", "how", "verdict") else "right")
    for claim in report.claims:
        how = f"{claim.detail}; {claim.evidence}" if claim.evidence else claim.detail
        table.add_row(
            claim.name,
            how,
            str(claim.rows_compared),
            str(claim.rows_identical),
            f"{claim.max_abs:.1e}",
            "[green]holds[/green]" if claim.passed else "[red]broken[/red]",
        )
    return table
