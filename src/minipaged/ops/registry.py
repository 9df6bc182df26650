"""Which back ends there are, which of them can run here, and why the others cannot."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from minipaged.errors import BackendUnavailableError

if TYPE_CHECKING:
    import torch

    from minipaged.ops.backend import Backend

logger = logging.getLogger(__name__)

# name -> (module, class), best first. A module may define `unavailable_reason(device) -> str | None`.
_BACKENDS = {
    "triton": ("minipaged.ops.triton.backend", "TritonBackend"),
    "flashinfer": ("minipaged.ops.triton.flashinfer_backend", "FlashInferBackend"),
    "cpu": ("minipaged.ops.cpu.backend", "NativeBackend"),
    "torch": ("minipaged.ops.torch.backend", "TorchBackend"),
    "reference": ("minipaged.ops.reference", "ReferenceBackend"),
}
GPU_BACKENDS = frozenset(("triton", "flashinfer"))
"""Those that compute on GPUs only and are built on Triton, an optional package."""


def backend_names() -> tuple[str, ...]:
    """Every back end's name, best first; imports none of them."""
    return tuple(_BACKENDS)


def available_backends(device: torch.device | str = "cpu") -> dict[str, str | None]:
    """Every back end's name, best first, with None if it can run on `device`, else the reason why it cannot."""
    return {name: _unavailable_reason(name, device) for name in _BACKENDS}


def get_backend(name: str | None = None, device: torch.device | str = "cpu") -> Backend:
    """A new back end object; it owns its scratch memory, so use one per thread.

    name: "reference", "cpu", "torch", "triton", "flashinfer", or None for the best one that can run on `device`. Raises
    ValueError for an unknown name and BackendUnavailableError, with the reason, for one that cannot run here.
    """
    if name is None:
        name = best_backend(device)
        if name == "torch" and str(device).startswith("cpu"):
            logger.warning(
                "backend 'torch' serves, at half to four fifths of the speed of 'cpu' and without its bit-identical "
                "results: %s",
                _unavailable_reason("cpu", device),
            )
    elif name not in _BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; choose one of {', '.join(map(repr, _BACKENDS))}")
    reason = _unavailable_reason(name, device)
    if reason is not None:
        raise BackendUnavailableError(f"backend {name!r} cannot run on {device}: {reason}; backend 'torch' can")
    module, class_name = _BACKENDS[name]
    backend: Backend = getattr(import_module(module), class_name)()
    return backend


def best_backend(device: torch.device | str = "cpu") -> str:
    """The name of the one that `get_backend(None, device)` takes."""
    return next(n for n in _BACKENDS if chosen_by_itself(n, device) and _unavailable_reason(n, device) is None)


def backend_note(name: str, device: torch.device | str = "cpu") -> str:
    """Why `get_backend(None, device)` chose this one: it is the best, or what keeps the better ones from running."""
    better = [n for n in list(_BACKENDS)[: list(_BACKENDS).index(name)] if chosen_by_itself(n, device)]
    return "; ".join(f"{n}: {_unavailable_reason(n, device)}" for n in better) or "the fastest that runs here"


def chosen_by_itself(name: str, device: torch.device | str) -> bool:
    """Whether `get_backend(None, device)` considers this one, or only who asks for it by name gets it."""
    # Triton's interpreter takes CPU tensors, for tests: nobody wants it unless they ask for it. FlashInfer is for those
    # who ask: without CUDA graphs it is not the fastest at decoding.
    return name != "flashinfer" and (name != "triton" or not str(device).startswith("cpu"))


def _unavailable_reason(name: str, device: torch.device | str) -> str | None:
    module = _BACKENDS[name][0]
    if find_spec(module) is None:
        return "this installation does not contain it"
    if name == "cpu" and not str(device).startswith("cpu"):
        return "it computes on the CPU"
    if name in GPU_BACKENDS:  # said without importing triton, which takes a second
        if name == "flashinfer" and str(device).startswith("cpu"):
            return "it runs on CUDA devices, not on cpu"
        if find_spec("triton") is None:
            return "the package triton is not installed (extra [gpu])"
        if str(device).startswith("cpu") and os.environ.get("TRITON_INTERPRET") != "1":
            return "it takes CPU tensors only under TRITON_INTERPRET=1"
    try:
        check = getattr(import_module(module), "unavailable_reason", None)
    except (ImportError, OSError) as error:  # OSError: a shared library behind it does not load
        return f"it does not import: {error}"
    reason: str | None = check(device) if check is not None else None
    return reason
