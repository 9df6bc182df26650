"""`--html`: one self-contained file with the errors as plots (inline SVG), the verdicts, versions and machine.

Colours are CSS variables with a light and a dark set, chosen by the reader's system; nothing is loaded from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from minipaged.verify.judge import OP_TOLERANCE, Report
from minipaged.verify.report import COLUMNS, column_cells, format_error

STYLE = """
:root {
  --ink: #1b1f24; --soft: #5b6470; --line: #d5dae1; --page: #ffffff; --good: #18794e; --bad: #c62a2f;
  --c0: #1f6feb; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce;
  --c4: #be185d; --c5: #0e7490; --c6: #a16207; --c7: #4b5563;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ee; --soft: #9aa4b1; --line: #343b45; --page: #14171b; --good: #4cc38a; --bad: #ff6369;
    --c0: #6cb0ff; --c1: #ff9a5c; --c2: #63d297; --c3: #c99bff;
    --c4: #ff8cc6; --c5: #5fd0e6; --c6: #e5c15a; --c7: #b4bcc8;
  }
}
body { max-width: 980px; margin: 2rem auto; padding: 0 1rem; color: var(--ink); background: var(--page); }
body { font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
.soft { color: var(--soft); }
.wide { overflow-x: auto; }
svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
.axis { stroke: var(--line); }
.limit { stroke: var(--bad); stroke-dasharray: 5 4; }
"""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 940, 300, 56, 130, 14, 36
FLOOR = 1e-9  # where an error of exactly 0 is drawn
CEILING = 1e2  # where an infinite one is

Series = tuple[str, Sequence[float]]


def write_html(report: Report, file: Path) -> None:
    """Write the report to `file` (UTF-8)."""
    file.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The whole page."""
    state = '<span class="good">passed</span>' if report.passed else '<span class="bad">failed</span>'
    sections = [
        f"<h1>minipaged verify: {state}</h1>",
        f"<p>{escape(report.model)}: {report.num_layers} layers, back end {escape(report.backend)}, {report.dtype}, "
        f"block size {report.block_size}, against Hugging Face eager attention in float32; "
        f"{len(report.tokens)} tokens compared, "
        f"{len(report.near_ties)} near ties, {len(report.bugs)} bugs, {report.seconds:.1f} s.</p>",
        _bugs(report),
        *(_layers(report) if report.ops else []),
        *(_positions(report) if report.ops or report.tokens else []),
        *(_tokens(report) if report.tokens else []),
        *(_claims(report) if report.claims else []),
        "<h2>Machine and versions</h2>",
        _table([[name, value] for name, value in {**report.machine, **report.versions}.items()], css="text"),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>minipaged verify: {escape(report.model)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _bugs(report: Report) -> str:
    if report.passed:
        return ""
    items = "".join(f"<li>{escape(bug.message)}</li>" for bug in report.bugs)
    return f'<h2 class="bad">Bugs, in order of execution</h2><ol>{items}</ol>'


def _layers(report: Report) -> list[str]:
    cells = column_cells(report)
    layers = list(cells)
    series = [
        (name.replace("\n", " "), [max((r.error for r in cells[layer][name]), default=0.0) for layer in layers])
        for name in COLUMNS
    ]
    limit = None if report.errors_add_up else OP_TOLERANCE
    rows = [["layer", *(name for name, _ in series)]]
    for index, layer in enumerate(layers):
        marked = [
            _mark(format_error(values[index]), all(result.passed for result in cells[layer][column]))
            for column, (_, values) in zip(COLUMNS, series, strict=True)
        ]
        rows.append([str(layer), *marked])
    largest = [
        max((result.figures.max_abs for layer in layers for result in cells[layer][name]), default=0.0)
        for name in COLUMNS
    ]
    rows.append(["max abs", *map(format_error, largest)])
    what = (
        "largest error of a token, relative to that token's result" if limit else "error relative to the result (RMS)"
    )
    return [
        "<h2>Error per layer</h2>",
        f'<p class="soft">{what}; logarithmic; the dashed line is the limit</p>'
        if limit
        else f'<p class="soft">{what}; logarithmic</p>',
        plot(series, layers, "layer", limit),
        _table(rows, header=True, raw=True),
    ]


def _positions(report: Report) -> list[str]:
    """Worst operation and logits of every position, prompt by prompt, the generated tokens after the prompt's."""
    parts = ["<h2>Error per token position</h2>"]
    prompt_logits = report.prompt_logits.relative_per_token if report.prompt_logits else ()
    offset = 0
    for index, prompt in enumerate(report.prompts):
        generated = [token for token in report.tokens if token.prompt == index]
        worst = [0.0] * len(prompt)
        for result in report.ops:
            if result.op == "logits":
                continue
            for token, value in zip(result.tokens, result.figures.relative_per_token, strict=True):
                if offset <= token < offset + len(prompt):
                    worst[token - offset] = max(worst[token - offset], value)
        # The logits of the last prompt position choose the first generated token: shown once, as the engine saw them.
        logits = [
            *prompt_logits[offset : offset + len(prompt) - bool(generated)],
            *(token.relative for token in generated),
        ]
        offset += len(prompt)
        parts += [
            f'<p class="soft">Prompt {index}: {len(prompt)} prompt tokens, then {len(generated)} generated ones</p>',
            plot(
                [("worst operation", worst), ("logits", logits)],
                range(max(len(worst), len(logits))),
                "token position",
                None if report.errors_add_up else report.logits_limit,
            ),
        ]
    return parts


def _tokens(report: Report) -> list[str]:
    rows = [["prompt", "position", "Hugging Face", "minipaged", "margin", "logits max abs error", "verdict"]]
    for token in report.tokens:
        rows.append(
            [
                str(token.prompt),
                str(token.position),
                str(token.expected),
                str(token.chosen),
                f"{token.margin:.1e}",
                format_error(token.max_abs),
                _mark(token.verdict, token.verdict != "bug"),
            ]
        )
    return ["<h2>Greedy tokens</h2>", _table(rows, header=True, raw=True)]


def _claims(report: Report) -> list[str]:
    rows = [["claim", "how", "rows compared", "bit-identical", "max difference", "allowed", "verdict"]]
    for claim in report.claims:
        rows.append(
            [
                escape(claim.name),
                escape(f"{claim.detail}; {claim.evidence}" if claim.evidence else claim.detail),
                str(claim.rows_compared),
                str(claim.rows_identical),
                format_error(claim.max_abs),
                "equal bits" if claim.limit == 0 else f"{claim.limit:.0e}",
                _mark("holds" if claim.passed else "broken", claim.passed),
            ]
        )
    return ["<h2>Determinism</h2>", _table(rows, header=True, raw=True, css="text")]


def plot(series: Sequence[Series], xs: Sequence[int], x_label: str, limit: float | None) -> str:
    """Errors (y, logarithmic) over integers (x), one line each, as an SVG element. Zero is drawn at the bottom,
    infinity at the top."""
    values = [min(max(value, FLOOR), CEILING) for _, ys in series for value in ys]
    low = math.floor(math.log10(min([*values, limit or CEILING])))
    high = max(math.ceil(math.log10(max([*values, limit or FLOOR]))), low + 1)
    span = max(len(xs) - 1, 1)

    def x_of(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index / span if len(xs) > 1 else 0.5)

    def y_of(value: float) -> float:
        share = (math.log10(min(max(value, FLOOR), CEILING)) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="error over {escape(x_label)}">']
    for exponent in range(low, high + 1, max(1, (high - low) // 8)):
        y = y_of(10.0**exponent)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    for index in range(0, len(xs), max(1, len(xs) // 12)):
        parts.append(f'<text x="{x_of(index):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{xs[index]}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
    )
    if limit is not None:
        y = y_of(limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number, (name, ys) in enumerate(series):
        color = f"var(--c{number % 8})"
        points = [(x_of(index), y_of(value)) for index, value in enumerate(ys)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"><title>{escape(name)}, {escape(x_label)} '
            f"{xs[index]}: {format_error(ys[index])}</title></circle>"
            for index, (x, y) in enumerate(points)
        ]
        y = TOP + 10 + 17 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 10}" y="{y - 8}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 24}" y="{y + 1}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _mark(text: str, good: bool) -> str:
    return text if good else f'<span class="bad">{text}</span>'


def _table(rows: Sequence[Sequence[str]], *, header: bool = False, raw: bool = False, css: str = "") -> str:
    lines = []
    for index, row in enumerate(rows):
        tag = "th" if header and index == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{cell if raw else escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f'<div class="wide"><table class="{css}">{"".join(lines)}</table></div>'
