"""`minipaged doctor`: arguments and form; the examination is in `minipaged.doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from minipaged.cli.options import with_flags

EXAMPLE = "Example:  minipaged doctor --json > machine.json"
PIPE_WIDTH = 120  # columns where there is no terminal to ask


@with_flags()
def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the read-bandwidth probe (a few seconds, half a GiB).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Look at this machine and installation: what is there, why, and what to do about it.

    Versions, CPU, threads, memory, huge pages, read bandwidth and the decode speed it allows, GPUs, OpenMP, Hub cache.

    Each back end, or what keeps it from running; if the native kernels did not build, the compiler's error.

    States: ok; note (worth knowing); warning (costs speed or will surprise); problem (does not work until changed).

    Exit status 0 if the engine can start here, 1 if no back end can serve.
    """
    from rich.console import Console

    from minipaged.doctor.examine import examine
    from minipaged.doctor.report import print_diagnosis

    with Console(stderr=True).status("looking") as status:  # shows nothing where stderr is no terminal
        diagnosis = examine(quick=quick, progress=lambda topic: status.update(f"looking at {topic}"))
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), allow_nan=False))
    else:
        console = Console()
        print_diagnosis(diagnosis, console if console.is_terminal else Console(width=PIPE_WIDTH))
    if not diagnosis.usable:
        raise typer.Exit(1)
