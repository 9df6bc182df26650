"""Entry point of the `minipaged` command: assembles the commands, each in its own file."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import MutableMapping
from typing import Annotated

import typer

from minipaged.cli import bench, bench_serve, chat, doctor, generate, serve, tune, verify

app = typer.Typer(
    name="minipaged",
    help="A small, readable, fast inference engine for Qwen3 models, built around a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("chat", epilog=chat.EXAMPLE)(chat.chat)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("verify", epilog=verify.EXAMPLE)(verify.verify)
bench.app.command("serve", epilog=bench_serve.EXAMPLE)(bench_serve.bench_serve)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("tune", epilog=tune.EXAMPLE)(tune.tune)
app.add_typer(bench.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from minipaged import __version__

        typer.echo(f"minipaged {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A small, readable, fast inference engine for Qwen3 models, built around a paged KV cache."""


def main() -> None:
    """Run the command line; console script `minipaged`."""
    limit_spinning(os.environ)
    print_whatever_comes()
    app()


def print_whatever_comes() -> None:
    """stdout and stderr write what their encoding cannot hold as escapes of JSON: nothing is lost, JSON stays JSON."""

    def escape(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("minipaged-escape", escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="minipaged-escape")


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let compute threads that wait for each other sleep soon, unless the user has said how they are to wait.

    GNU's OpenMP spins for milliseconds; where other processes want the cores, whoever is waited for does not get one
    meanwhile: steps became three to four times slower (`benchmarks/results/native-tuning.md`). It reads the variable
    when torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = "2000"
