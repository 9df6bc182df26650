"""A kernel call as data: the same object is run on a GPU, interpreted on the CPU, or compiled ahead of time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""What the kernels compute with. float64 is the reference's business."""

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels were built for the interpreter, which is decided when they are imported."""


def _let_scalars_be_integers() -> None:
    """The interpreter of triton 3.6 makes loop bounds of arrays of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if INTERPRETED and triton.__version__.startswith("3.6."):
    _let_scalars_be_integers()

BATCH_TENSORS = ("block_tables", "seq_lens", "query_start_loc")
"""Slices of a step's tensors: not worth a compilation of their own for each alignment."""


@dataclass(slots=True)
class Launch:
    """`kernel` over `grid` with run-time `arguments` (tensors, integers, floats) and compile-time `constants`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3

    @property
    def keywords(self) -> dict[str, Any]:
        """What the kernel is called with, apart from its grid."""
        return {
            **self.arguments,
            **self.constants,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,  # a * b + c in one rounding, whatever this version of triton defaults to
        }

    def run(self) -> None:
        """Start it on the current stream of its tensors' device; nothing happens for an empty grid."""
        if 0 in self.grid:
            return
        with _on_device_of(next(value for value in self.arguments.values() if isinstance(value, Tensor))):
            self.kernel[self.grid](**self.keywords)


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton starts kernels on the current device, which need not be the tensors' if there are several."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def compute_type(*dtypes: torch.dtype) -> Any:
    """The type in which products are formed: the promoted one of the operands.

    float32 under the interpreter, which multiplies bfloat16 operands as if they were integers. ValueError for a type
    that the kernels do not know.
    """
    for dtype in dtypes:
        if dtype not in TYPES:
            raise ValueError(f"the Triton kernels take float32, float16 and bfloat16, not {dtype}")
    promoted = dtypes[0]
    for dtype in dtypes[1:]:
        promoted = torch.promote_types(promoted, dtype)
    return tl.float32 if INTERPRETED else TYPES[promoted]


def block_of(size: int, smallest: int = 1) -> int:
    """The power of two that covers `size`: Triton's tiles have no other sizes."""
    return max(smallest, 1 << (size - 1).bit_length())


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is dense, as the kernels read it; else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
