"""Host arrays whose contents go to a device without the host waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.ops.transfer import pin


class Staging:
    """Pinned arrays of one purpose. Before refilling them, `wait` until the last copy has left them; then `send`.

    On the CPU nothing is pinned, `wait` does nothing, and `send` returns the array's own memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type != "cpu"
        self._left: torch.cuda.Event | None = None

    def array(self, size: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
        """Zeros [size] that the device can read directly."""
        zeros = torch.zeros(size, dtype=dtype)
        array: np.ndarray[Any, Any] = (pin(zeros) if self._on_gpu else zeros).numpy()
        return array

    def wait(self) -> None:
        """Until the arrays may be changed again."""
        if self._left is not None:
            self._left.synchronize()

    def send(self, array: np.ndarray[Any, Any], target: Tensor | None = None) -> Tensor:
        """The array's content on the device, in `target` if given. Part of the current stream: whoever reads it there
        is later."""
        tensor = torch.from_numpy(array)
        if target is not None:
            return target.copy_(tensor, non_blocking=True)
        return tensor.to(self.device, non_blocking=True)

    def sent(self) -> None:
        """All copies of this step are on their way."""
        if self._on_gpu:
            if self._left is None:
                self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # On this device's stream: another device may be the current one.
            self._left.record(torch.cuda.current_stream(self.device))
