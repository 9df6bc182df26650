"""A machine's two limits as the native kernels meet them, for benchmarks: read bandwidth, and the rate of products."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.ops.cpu.arguments import PROBE, TYPES
from minipaged.ops.cpu.library import KernelTable, huge_page_tensor

FLOPS_PER_STEP = 12 * 32 * 2  # of one thread, in float32


@dataclass(frozen=True, slots=True)
class NativeProbes:
    """kernels: those of one instruction set. threads: how many compute."""

    kernels: KernelTable
    threads: int

    @property
    def isa(self) -> str:
        """The instruction set's name."""
        name: bytes = self.kernels.name
        return name.decode()

    def read_bandwidth(
        self, nbytes: int = 1 << 30, *, buffer: Tensor | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> float:
        """Bytes per second of one pass over huge-page memory by all threads; `buffer`: touched memory to read."""
        if buffer is None:
            buffer = huge_page_tensor((nbytes,), torch.uint8).fill_(1)
        result = ctypes.c_float()
        call = PROBE.pack(buffer.data_ptr(), buffer.numel(), 0, self.threads, ctypes.addressof(result))
        start = clock()
        self.kernels.read_probe(call)
        return buffer.numel() / (clock() - start)

    def matrix_peak(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        steps: int = 1 << 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> float:
        """Floating-point operations per second of the product kernel on data in L1, all threads."""
        result = ctypes.c_float()
        call = PROBE.pack(0, steps, TYPES[dtype], self.threads, ctypes.addressof(result))
        start = clock()
        self.kernels.peak_probe(call)
        return steps * self.threads * FLOPS_PER_STEP * (4 // dtype.itemsize) / (clock() - start)
