"""Numbers on their way between host and device, without the host waiting for them.

A copy is asynchronous only from and to pinned memory. What comes back, through `fetch`, is the one thing to wait for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def pin(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which torch hands out again only after the copies that started from it."""
    return tensor.pin_memory()


def upload(values: Any, device: torch.device) -> Tensor:
    """`values` (list, array or tensor) on `device`, part of its current stream. What is there already is shared."""
    tensor = torch.as_tensor(values)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return pin(tensor).to(device, non_blocking=True)


def fetch(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The values of `tensor` on the host: an asynchronous copy, and the wait for it alone."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))
    arrived.synchronize()
    return host.numpy()
