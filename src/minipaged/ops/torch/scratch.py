"""Work memory that lives as long as its back end."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """Named buffers that only grow. A fresh large tensor costs a page fault per 4 KiB, three times the copy itself.

    A buffer is valid until the next `get` of the same name and dtype. Not for use by two threads at once.
    keep_replaced: a buffer that became too small stays alive, for a captured graph may still work in it.
    """

    def __init__(self, *, keep_replaced: bool = False) -> None:
        self._keep_replaced = keep_replaced
        self._replaced: list[Tensor] = []
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of this shape."""
        size = prod(shape)
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            if buffer is not None and self._keep_replaced:
                self._replaced.append(buffer)
            # Plain tensors even under inference mode: the same buffer also serves calls outside it.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)
