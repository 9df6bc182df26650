"""`minipaged bench ...`: arguments and the form of the reports; the measurements are in `minipaged.bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minipaged.cli.options import LLM_FLAGS, Flag, UsageError, usage_errors, with_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from minipaged.bench.profile import Profile
    from minipaged.bench.report_header import Report
    from minipaged.bench.workloads import Workload
    from minipaged.model.source import ModelSource

EXAMPLE = "Example:  minipaged bench latency --shape qwen3-0.6b --json > before.json"
PIPE_WIDTH = 120  # columns where there is no terminal to ask
KERNEL_SHAPE = "qwen3-0.6b"  # whose sizes `attention` and `linear` take if no model is given

# None = whatever the workload is about: only "shared-prefix" looks for shared prefixes.
ENGINE_FLAGS = tuple(replace(f, default=None) if f.name == "enable_prefix_caching" else f for f in LLM_FLAGS)
KERNEL_FLAGS = tuple(
    f for f in LLM_FLAGS if f.name in ("revision", "dtype", "device", "backend", "block_size", "seed", "threads")
)
BENCH_FLAGS = (
    Flag("shape", str, None, "A published size with random weights, e.g. qwen3-0.6b; nothing is downloaded."),
    Flag("rounds", int, 3, "Quiet runs wanted; at most twice as many are made."),
    Flag("json", bool, False, "Print one JSON object and nothing else."),
    Flag("vs", Path, None, "Compare with this report, made earlier with --json."),
)
PROFILE_FLAGS = (
    *BENCH_FLAGS,
    Flag("profile", bool, False, "Run once more and show the time per class of operation and step."),
    Flag("plot", Path, None, "Draw the profile to this file (.svg, .png, .pdf); needs matplotlib."),
)
PROMPT_FLAG = Flag("prompt_tokens", int, None, "Change the length of every prompt.", min=1)
OUTPUT_FLAG = Flag("output_tokens", int, None, "Change the number of tokens generated.", min=1)
Model = Annotated[
    str | None, typer.Argument(help="Folder or Hub id; the bundled demo model if not given.", metavar="MODEL")
]

app = typer.Typer(
    name="bench",
    help="Measure speed next to the limits of this machine: read bandwidth of memory and rate of matrix products.",
    no_args_is_help=True,
    epilog=EXAMPLE,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def workload_flag(default: str) -> Flag:
    """--workload with this default."""
    return Flag("workload", str, default, "W1 to W5, recipe (256 sequences), shared-prefix or long-prompt.")


@app.command("latency", epilog=EXAMPLE)
@with_flags(llm=ENGINE_FLAGS, bench=PROFILE_FLAGS, work=(workload_flag("W1"), PROMPT_FLAG, OUTPUT_FLAG))
def latency(llm: dict[str, Any], bench: dict[str, Any], work: dict[str, Any], model: Model = None) -> None:
    """One request alone: tokens per second, time to first token, share of read bandwidth."""
    with usage_errors():
        chosen = _workload(**work)
        if len(chosen.requests) > 1 or chosen.output_tokens < 2:
            raise ValueError(
                f"latency measures one request that generates at least 2 tokens (W1, W5, long-prompt); "
                f"{chosen.name} has {len(chosen.requests)} that generate {chosen.output_tokens}"
            )
    _run_workload("latency", chosen, model, llm, bench)


@app.command("throughput", epilog="Example:  minipaged bench throughput --shape qwen3-0.6b --workload W2")
@with_flags(llm=ENGINE_FLAGS, bench=PROFILE_FLAGS, work=(workload_flag("W3"), PROMPT_FLAG, OUTPUT_FLAG))
def throughput(llm: dict[str, Any], bench: dict[str, Any], work: dict[str, Any], model: Model = None) -> None:
    """Many requests at once: generated tokens per second of all together."""
    with usage_errors():
        chosen = _workload(**work)
    _run_workload("throughput", chosen, model, llm, bench)


@app.command("prefill", epilog="Example:  minipaged bench prefill --shape qwen3-0.6b --prompt-tokens 4096")
@with_flags(llm=ENGINE_FLAGS, bench=PROFILE_FLAGS, work=(workload_flag("W4"), PROMPT_FLAG))
def prefill(llm: dict[str, Any], bench: dict[str, Any], work: dict[str, Any], model: Model = None) -> None:
    """A long prompt: prompt tokens per second, share of the matrix peak."""
    with usage_errors():
        chosen = _workload(**work, output_tokens=1)
    _run_workload("prefill", chosen, model, llm, bench)


@app.command("attention", epilog="Example:  minipaged bench attention --sequences 8 --context 2048")
@with_flags(llm=KERNEL_FLAGS, bench=BENCH_FLAGS)
def attention(
    llm: dict[str, Any],
    bench: dict[str, Any],
    model: Model = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Measure this case only: sequences.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Measure this case only: tokens in the cache.")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Query tokens per sequence in that case; 1 = decode.")] = 1,
    scattered: Annotated[
        bool, typer.Option(help="Blocks in random order instead of as a fresh pool hands them out.")
    ] = False,
) -> None:
    """Paged attention alone, decode and prefill, in the sizes of MODEL or --shape (qwen3-0.6b if neither is given)."""
    from minipaged.bench.kernels import ATTENTION_CASES, bench_kernels

    with usage_errors():
        if (sequences is None) != (context is None):
            raise ValueError("--sequences and --context make one case: give both or neither")
        if queries > (context or queries):
            raise ValueError(f"--queries {queries} is more than --context {context}: queries are the last tokens of it")
    cases = ATTENTION_CASES if sequences is None or context is None else ((sequences, context, queries),)
    with _session(bench) as progress:
        source = _source(model, llm, bench, default_shape=KERNEL_SHAPE)
        _check_kernel_options(llm)
        options = {"attention": cases, "scattered": scattered, "rounds": bench["rounds"]}
        report = bench_kernels("attention", source, llm, **options, progress=progress)
    _finish(report, bench)


@app.command("linear", epilog="Example:  minipaged bench linear --shape qwen3-4b --rows 1 --rows 16")
@with_flags(llm=KERNEL_FLAGS, bench=BENCH_FLAGS)
def linear(
    llm: dict[str, Any],
    bench: dict[str, Any],
    model: Model = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows (tokens) of a product; may be repeated.")] = None,
) -> None:
    """The matrix products of a layer and the output head alone, in the sizes of MODEL or --shape (qwen3-0.6b if neither
    is given).
    """
    from minipaged.bench.kernels import LINEAR_ROWS, bench_kernels

    with _session(bench) as progress:
        source = _source(model, llm, bench, default_shape=KERNEL_SHAPE)
        _check_kernel_options(llm)
        report = bench_kernels(
            "linear", source, llm, rows=rows or LINEAR_ROWS, rounds=bench["rounds"], progress=progress
        )
    _finish(report, bench)


@app.command("step", epilog="Example:  minipaged bench step --shape qwen3-0.6b --sequences 1 --sequences 32 --profile")
@with_flags(llm=KERNEL_FLAGS, bench=PROFILE_FLAGS)
def step(
    llm: dict[str, Any],
    bench: dict[str, Any],
    model: Model = None,
    sequences: Annotated[list[int] | None, typer.Option(help="Sequences in a decode step; may be repeated.")] = None,
    context: Annotated[int, typer.Option(help="Tokens that each of them has in the cache.")] = 256,
    prefill_tokens: Annotated[list[int] | None, typer.Option(help="Also prefill so many; may be repeated.")] = None,
) -> None:
    """Whole steps of the model, without a scheduler: decode with 1, 8 and 32 sequences, or as given."""
    from minipaged.bench.run import Bench, bench_step, step_cases, step_options

    with _session(bench) as progress:
        source = _source(model, llm, bench)
        _check_kernel_options(llm)
        with usage_errors():
            counts = sequences or ([] if prefill_tokens else [1, 8, 32])
            cases = step_cases(source, sequences=counts, context=context, prefill=prefill_tokens or [])
            loaded = Bench(source, {**llm, **step_options(cases, llm["block_size"])}, progress)
        with loaded:
            report, profile = bench_step(loaded, cases, rounds=bench["rounds"], profile=_profile_wanted(bench))
    _finish(report, bench, profile)


@app.command("startup", epilog="Example:  minipaged bench startup ./Qwen3-0.6B")
@with_flags(llm=LLM_FLAGS, bench=BENCH_FLAGS)
def startup(llm: dict[str, Any], bench: dict[str, Any], model: Model = None) -> None:
    """A fresh process until the model is ready, from a page-cached file: time and anonymous memory.

    With --shape, random weights are written to a temporary folder first.
    """
    from minipaged.bench.startup import bench_startup

    with _session(bench) as progress:
        source = _source(model, llm, bench)
        report = bench_startup(source, llm, rounds=bench["rounds"], progress=progress)
    _finish(report, bench)


def _run_workload(
    benchmark: str, workload: Workload, model: str | None, llm: dict[str, Any], bench: dict[str, Any]
) -> None:
    from minipaged.bench.run import Bench, bench_workload, fitting

    with _session(bench) as progress:
        source = _source(model, llm, bench)
        with usage_errors():
            workload = fitting(workload, source)
            if llm["enable_prefix_caching"] is None:
                llm["enable_prefix_caching"] = workload.prefix_caching
            loaded = Bench(source, llm, progress)
        with loaded:
            report, profile = bench_workload(
                benchmark, loaded, workload, rounds=bench["rounds"], profile=_profile_wanted(bench)
            )
    _finish(report, bench, profile)


def _workload(workload: str, prompt_tokens: int | None, output_tokens: int | None) -> Workload:
    from minipaged.bench import workloads

    return workloads.workload(workload).resized(prompt_tokens, output_tokens)


def _source(
    model: str | None, llm: dict[str, Any], bench: dict[str, Any], default_shape: str | None = None
) -> ModelSource:
    """The model that the arguments name; `revision` leaves the options with it."""
    from minipaged.model.hub import resolve_model
    from minipaged.model.source import ModelSource

    revision = llm.pop("revision")
    if model is not None and bench["shape"] is not None:
        raise UsageError(f"MODEL {model} and --shape {bench['shape']} are two models: give one")
    shape = bench["shape"] or (default_shape if model is None else None)
    if shape is not None:
        with usage_errors():
            return ModelSource.random(shape)
    return ModelSource.from_folder(resolve_model(model, revision))


def _check_kernel_options(llm: dict[str, Any]) -> None:
    """What `LLM` checks for the other benchmarks."""
    from minipaged.model.dtypes import DTYPES
    from minipaged.ops.registry import available_backends

    if not 1 <= llm["block_size"] <= 256:
        raise UsageError(f"--block-size must be from 1 to 256, got {llm['block_size']}")
    if llm["dtype"] not in ("auto", *DTYPES):
        raise UsageError(f"--dtype {llm['dtype']}: choose auto or one of {', '.join(DTYPES)}")
    if llm["backend"] not in (None, *available_backends()):
        raise UsageError(f"--backend {llm['backend']}: choose one of {', '.join(available_backends())}")


def _profile_wanted(bench: dict[str, Any]) -> bool:
    return bench["profile"] or bench["plot"] is not None


@contextmanager
def _session(bench: dict[str, Any]) -> Iterator[Callable[[str], object]]:
    """Checks what all benchmarks share before anything is measured, and shows on a terminal what is going on."""
    from rich.console import Console

    if bench["rounds"] < 1:
        raise UsageError(f"--rounds must be at least 1, got {bench['rounds']}")
    if bench["vs"] is not None:
        bench["vs_report"] = _read_report(bench["vs"])
    plot = bench.get("plot")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {plot}: there is no folder {plot.absolute().parent}")
    with Console(stderr=True).status("starting") as status:  # shows nothing where stderr is no terminal
        yield status.update


def _read_report(path: Path) -> Report:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--vs {path} cannot be read: {error}") from error
    if not isinstance(report, dict) or "benchmark" not in report:
        raise UsageError(f"--vs {path} is not a report of `minipaged bench --json`")
    return report


def _finish(report: Report, bench: dict[str, Any], profile: Profile | None = None) -> None:
    """Print the report in the form that was asked for."""
    from rich.console import Console

    from minipaged.bench.report import compare, print_comparison, print_profile, print_report

    comparison = None
    if bench["vs"] is not None:
        comparison = compare(report, bench["vs_report"])
        report = {**report, "vs": comparison}
    if bench["json"]:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=PIPE_WIDTH)
        print_report(report, console)
        if "profile" in report:
            print_profile(report["profile"], console)
        if comparison is not None:
            print_comparison(comparison, console)
    if profile is not None and bench["plot"] is not None:
        from minipaged.bench.profile_plot import plot_profile

        plot_profile(
            profile, bench["plot"], f"{report['benchmark']} of {report['model']}, back end {report['backend']}"
        )
        typer.echo(f"plot written to {bench['plot']}", err=True)
