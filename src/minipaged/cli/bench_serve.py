"""`minipaged bench serve`: load on any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minipaged.cli.options import UsageError, usage_errors, with_flags

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "Example:  minipaged bench serve --url http://127.0.0.1:8000 --request-rate 4 --num-requests 200"
PIPE_WIDTH = 120
TIMES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2e_ms": "whole request",
}


@with_flags()
def bench_serve(
    trace: Annotated[Path | None, typer.Argument(help="The trace of --dataset azure.", metavar="[FILE]")] = None,
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    dataset: Annotated[str, typer.Option(help="random, or azure (an Azure LLM inference trace in FILE).")] = "random",
    model: Annotated[str | None, typer.Option(help="Model to ask for; the first that the server names.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean arrivals per second (Poisson). Else: all at once, or as in the trace.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean prompt length of --dataset random.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean output length of --dataset random.")] = 64,
    spread: Annotated[float, typer.Option(min=0, max=1, help="Lengths vary by this share of the mean.")] = 0.5,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts of a trace.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer outputs of a trace.")] = None,
    speed: Annotated[float, typer.Option(help="Play a trace's arrivals so many times as fast.")] = 1.0,
    seconds: Annotated[float | None, typer.Option(help="Send nothing after so many seconds.")] = None,
    prompts: Annotated[str, typer.Option(help="ids (exact lengths) or text (about as many words).")] = "ids",
    vocabulary: Annotated[int, typer.Option(min=2, help="Token ids are below this.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions; prompts are text.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly as many tokens as planned.")] = True,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    slo_ttft: Annotated[float | None, typer.Option(help="Goodput: time to first token, in ms.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Goodput: time per output token, in ms.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key of the server.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Send requests to a server and report what its clients see: latencies at p50, p90, p99, throughput, goodput."""
    from minipaged.bench import traffic
    from minipaged.bench.load_client import LoadClient
    from minipaged.bench.machine import machine_facts, versions
    from minipaged.bench.serve import LoadOptions, run_load

    with usage_errors():
        client = LoadClient(url, api_key=api_key, timeout=timeout)
        _check(dataset, trace, request_rate, speed, prompts)
        for flag, value in (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot)):
            if value is not None and not value > 0:
                raise UsageError(f"{flag} must be above 0 (ms), got {value}")
        if dataset == "azure" and trace is not None:
            rows = traffic.azure_trace(trace, num_requests)
            arrivals, lengths = [at / speed for at, _, _ in rows], [(p, o) for _, p, o in rows]
        else:
            lengths = traffic.random_lengths(num_requests, prompt_tokens, output_tokens, spread, seed)
            arrivals = [0.0] * len(lengths)
        if request_rate is not None:
            arrivals = traffic.poisson_times(len(lengths), request_rate, seed)
        planned = traffic.plan(
            arrivals,
            lengths,
            form="text" if chat else prompts,
            vocabulary=vocabulary,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
        )
    options = LoadOptions(
        model=model,
        concurrency=concurrency,
        chat=chat,
        ignore_eos=ignore_eos,
        temperature=temperature,
        seconds=seconds,
        ttft_slo=None if slo_ttft is None else slo_ttft / 1e3,
        tpot_slo=None if slo_tpot is None else slo_tpot / 1e3,
    )
    with _progress(len(planned)) as advance:
        result = asyncio.run(run_load(client, planned, options, advance))
    report = {
        "benchmark": "serve",
        "url": url,
        "dataset": dataset if trace is None else f"{dataset} {trace.name}",
        "request_rate": request_rate,
        "concurrency": concurrency,
        "seed": seed,
        **result,
        "machine": machine_facts(),
        "versions": versions(),
    }
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        _print(report)
    if not report["completed"]:
        raise typer.Exit(1)


def _check(dataset: str, trace: Path | None, rate: float | None, speed: float, prompts: str) -> None:
    if dataset not in ("random", "azure"):
        raise UsageError(f"--dataset must be random or azure, got {dataset}")
    if (dataset == "azure") != (trace is not None):
        raise UsageError("--dataset azure needs the FILE of the trace, and nothing else takes one")
    if trace is not None and not trace.is_file():
        raise UsageError(f"there is no file {trace}")
    if prompts not in ("ids", "text"):
        raise UsageError(f"--prompts must be ids or text, got {prompts}")
    if rate is not None and (math.isnan(rate) or rate <= 0):
        raise UsageError(f"--request-rate must be above 0, got {rate}")
    if not speed > 0:
        raise UsageError(f"--speed must be above 0, got {speed}")


class _progress:  # noqa: N801 - used like a function
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        console = Console(stderr=True)
        columns = ("requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda sample: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=PIPE_WIDTH)
    console.print(
        f"{report['model']} at {report['url']}: {report['completed']} of {report['requests']} requests in "
        f"{report['duration_s']:.1f} s, {report['failed']} failed",
        highlight=False,
    )
    console.print(
        f"{report['requests_per_s']:.2f} requests/s, {report['output_tok_s']:.1f} output tok/s, "
        f"{report['total_tok_s']:.1f} tok/s in all; {report['prompt_tokens']} prompt tokens, "
        f"{report['cached_tokens']} of them cached",
        highlight=False,
    )
    if report["goodput_per_s"] is not None:
        console.print(
            f"goodput {report['goodput_per_s']:.2f} requests/s, {report['good_share']:.1%} of them, within "
            f"TTFT {report['slo']['ttft_ms']} ms and TPOT {report['slo']['tpot_ms']} ms",
            highlight=False,
        )
    console.print(_table(report))
    for error, count in report["errors"].items():
        console.print(f"{count} x {error}", markup=False, highlight=False)


def _table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for key, label in TIMES.items():
        values = report[key]
        if values is not None:
            table.add_row(label, *(f"{values[name]:.1f}" for name in ("mean", "p50", "p90", "p99", "max")))
    return table
