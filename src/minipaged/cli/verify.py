"""`minipaged verify [MODEL]`: the arguments, and which form the report takes; the work is in `minipaged.verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: minipaged verify ./Qwen3-0.6B --determinism --html report.html"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("verify", epilog=EXAMPLE)(verify)


def verify(
    model: Annotated[str | None, typer.Argument(help="Folder or Hub id; the bundled demo model if left out.")] = None,
    *,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="reference, cpu, torch or triton; the best one here if left out.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16; bfloat16 is judged against Hugging Face's own bfloat16 error.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    block_size: Annotated[int, typer.Option(min=1, max=256, help="Tokens per KV cache block.")] = 16,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to compare after each prompt.")] = 32,
    seed: Annotated[
        int, typer.Option(help="Of the block placement, and of the prompts where there is no tokenizer.")
    ] = 0,
    determinism: Annotated[
        bool,
        typer.Option(
            "--determinism", help="Also compute the same tokens in other ways and compare the logits bit by bit."
        ),
    ] = False,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a self-contained report with plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare a model with Hugging Face: every operation of every layer, then logits and greedy tokens.

    Exit status 0 if all is well, 1 if anything was found that rounding does not explain.
    """
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is neither float32 nor bfloat16", param_hint="--dtype")
    if html is not None and not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {html} does not exist", param_hint="--html")

    from rich.console import Console

    from minipaged.model.hub import resolve_model
    from minipaged.verify.html import write_html
    from minipaged.verify.report import print_report
    from minipaged.verify.run import verify_model

    folder = resolve_model(model, revision)
    status = Console(stderr=True).status("starting")
    with status:  # shows nothing where stderr is no terminal
        report = verify_model(
            folder,
            backend=backend,
            dtype=dtype,
            device=device,
            block_size=block_size,
            threads=threads,
            num_tokens=max_tokens,
            determinism=determinism,
            seed=seed,
            progress=status.update,
        )
    if html is not None:
        write_html(report, html)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), allow_nan=False))
    else:
        print_report(report, Console())
        if html is not None:
            typer.echo(f"report written to {html}")
    raise typer.Exit(0 if report.passed else 1)
