"""Entry point of the `minipaged` command: assembles the commands, each in its own file."""

from __future__ import annotations

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
    app()
