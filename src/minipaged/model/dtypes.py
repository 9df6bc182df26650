"""Which number type a model runs in: that of its checkpoint where it is fast, float32 where it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from minipaged.cpu_flags import read_cpu_flags

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # x86, x86 tiles, arm (as /proc/cpuinfo spells them)


def resolve_dtype(
    requested: str | torch.dtype,
    checkpoint: torch.dtype,
    *,
    device: str | torch.device = "cpu",
    fast_bfloat16: bool = False,
    cpu_flags: Callable[[], frozenset[str]] = read_cpu_flags,
) -> torch.dtype:
    """The type to run in: bfloat16, float16 or float32.

    "auto" is the checkpoint's type, but on a CPU float32 for float16, and for bfloat16 where neither the back end
    (`Backend.fast_bfloat16`) nor the processor's instructions make it fast. An explicit type is obeyed; where it is
    slow, one warning says so. ValueError for any other name.
    """
    name = str(requested).removeprefix("torch.")
    if name != "auto" and name not in DTYPES:
        raise ValueError(f"dtype must be 'auto' or one of {', '.join(map(repr, DTYPES))}, found {requested!r}")
    chosen = checkpoint if name == "auto" else DTYPES[name]
    if torch.device(device).type != "cpu" or chosen == torch.float32:
        return chosen
    if chosen == torch.bfloat16 and (fast_bfloat16 or not cpu_flags().isdisjoint(BF16_FLAGS)):
        return chosen
    if name == "auto":
        return torch.float32
    logger.warning(
        "dtype=%r is obeyed, but this CPU has no fast instructions for it; dtype='float32' may be much faster", name
    )
    return chosen
