"""`minipaged tune`: measure the attention kernels' tile sizes on this GPU, once, for all later runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from minipaged.cli.options import UsageError, with_flags

EXAMPLE = "Example:  minipaged tune --shape qwen3-0.6b --block-size 16"


@with_flags()
def tune(
    shape: Annotated[
        list[str] | None, typer.Option(help="Published size, like qwen3-4b; repeat for more. None: all of them.")
    ] = None,
    block_size: Annotated[list[int] | None, typer.Option(min=1, max=256, help="Repeat for more. None: 16.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Table to write; the user's cache if not given.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure tile sizes of the GPU attention kernels and write the table that serving reads.

    Without a table the kernels run with default tiles. Needs a CUDA GPU; exit status 1 without one.
    """
    import torch

    from minipaged.errors import BackendUnavailableError
    from minipaged.model.random_weights import QWEN3_SHAPES
    from minipaged.ops.registry import available_backends

    wrong = [name for name in shape or [] if name not in QWEN3_SHAPES]
    if wrong:
        raise UsageError(f"--shape {wrong[0]} is unknown; choose of {', '.join(QWEN3_SHAPES)}")
    reason = available_backends("cuda")["triton"]
    if reason is not None:
        raise BackendUnavailableError(f"tune measures the Triton kernels on a GPU, and they cannot run: {reason}")

    import triton

    from minipaged.ops.triton.kernels.tuning import save_table, table_path
    from minipaged.ops.triton.tune import Measured, best, gpu_timer
    from minipaged.ops.triton.tune import tune as measure

    configs = [QWEN3_SHAPES[name] for name in shape or QWEN3_SHAPES]
    heads = [(c.num_attention_heads, c.num_key_value_heads, c.head_dim) for c in configs]
    device = torch.device("cuda")
    measured: list[Measured] = []
    for one in measure(heads, block_size or [16], dtype=torch.bfloat16, device=device, timer=gpu_timer):
        measured.append(one)
        if not as_json:
            result = one.problem if one.seconds is None else f"{one.seconds * 1e6:.1f} us"
            typer.echo(f"{one.key}  {one.tile}  {result}")
    gpu = torch.cuda.get_device_name()
    path = output or table_path(gpu)
    about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    save_table(path, best(measured), about)
    if as_json:
        tiles = {key: asdict(tile) for key, tile in best(measured).items()}
        typer.echo(json.dumps({"table": str(path), "about": about, "tiles": tiles, "measured": len(measured)}))
    else:
        typer.echo(f"table written to {path}")
