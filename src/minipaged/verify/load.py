"""Loads a folder as the engine does: back end, number type, threads."""

from __future__ import annotations

from pathlib import Path

import torch

from minipaged.model.qwen3 import Qwen3Model
from minipaged.ops.registry import get_backend
from minipaged.threads import set_threads


def load_ours(
    folder: Path,
    *,
    backend: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    threads: int | None = None,
    progress: bool = False,
) -> Qwen3Model:
    """backend None or "auto": the best one on `device`; device "auto": a GPU if there is one. Errors as
    `get_backend` and `Qwen3Model`."""
    set_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Qwen3Model.from_folder(
        folder,
        get_backend(None if backend == "auto" else backend, device),
        dtype=dtype,
        device=device,
        progress=progress,
    )
