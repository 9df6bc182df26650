"""`minipaged verify [MODEL]`: the arguments and the form of the report; the work is in `minipaged.verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from minipaged.cli.options import LLM_FLAGS, UsageError, with_flags

EXAMPLE = "Example:  minipaged verify ./Qwen3-0.6B --determinism --html report.html"
PIPE_WIDTH = 120  # columns of a table where there is no terminal to ask
FLAGS = tuple(flag for flag in LLM_FLAGS if flag.name in ("device", "backend", "block_size", "threads"))


@with_flags(llm=FLAGS)
def verify(
    llm: dict[str, Any],
    model: Annotated[str | None, typer.Argument(help="Folder or Hub id; the bundled demo model if not given.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 (judged by Hugging Face's own bfloat16 error).")
    ] = "float32",
    max_tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to compare after each prompt.")] = 32,
    seed: Annotated[
        int, typer.Option(help="Of the order of blocks, and of prompts for a model without tokenizer.")
    ] = 0,
    determinism: Annotated[
        bool,
        typer.Option("--determinism", help="Compute the same tokens in other ways too; are the logits the same bits?"),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained report with plots to this file.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare a model with Hugging Face: every operation of every layer, then logits and greedy tokens.

    Exit status 1 if anything was found that rounding does not explain.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype {dtype} cannot be verified, only float32 and bfloat16 can")
    if not 1 <= llm["block_size"] <= 256:
        raise UsageError(f"--block-size must be from 1 to 256, got {llm['block_size']}")
    if html is not None and not html.absolute().parent.is_dir():
        raise UsageError(f"--html {html}: there is no folder {html.absolute().parent}")

    from rich.console import Console

    from minipaged.model.hub import resolve_model
    from minipaged.verify.html import write_html
    from minipaged.verify.report import print_report
    from minipaged.verify.run import verify_model

    folder = resolve_model(model, revision)
    with Console(stderr=True).status("starting") as status:  # shows nothing where stderr is no terminal
        report = verify_model(
            folder,
            **llm,
            dtype=dtype,
            num_tokens=max_tokens,
            seed=seed,
            determinism=determinism,
            progress=status.update,
        )
    if html is not None:
        write_html(report, html)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), allow_nan=False))
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=PIPE_WIDTH))
        if html is not None:
            typer.echo(f"report written to {html}")
    if not report.passed:
        raise typer.Exit(1)
