"""Timing on a GPU, and the two ceilings of this very machine: a device copy and a matrix product.

`Rig(rehearsal=True)` is the same on the CPU under TRITON_INTERPRET=1 with shapes that take milliseconds: it shows that
the script runs, and its numbers mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rig:
    """Where to run, and how large."""

    rehearsal: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.rehearsal else torch.bfloat16

    def graph_seconds(self, calls: Sequence[Callable[[], object]], repeats: int = 10) -> float:
        """Median seconds of one of `calls`, all of which are replayed as one CUDA graph.

        Give calls that touch different memory: what one of them leaves in the L2 cache must not serve the next.
        """
        if self.rehearsal:
            return self._host_seconds(calls)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self.seconds(graph.replay, repeats) / len(calls)

    def seconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """Median seconds of `call` on the device, after three calls that do not count."""
        if self.rehearsal:
            return self._host_seconds([call])
        for _ in range(3):
            call()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def synchronize(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize()

    @staticmethod
    def _host_seconds(calls: Sequence[Callable[[], object]]) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a device copy far larger than any cache."""
        source = torch.empty(1 << (16 if self.rehearsal else 32), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source))

    def product_flops(self) -> float:
        """Floating-point operations per second of a large matrix product of random numbers."""
        n = 64 if self.rehearsal else 8192
        a, b = (torch.randn(n, n, device=self.device).to(self.dtype) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: a @ b)

    def launch_floor(self, kernels: int) -> float:
        """Seconds that a graph of so many kernels takes if each of them does nothing worth mentioning."""
        x = torch.zeros(1, device=self.device)
        return kernels * self.graph_seconds([lambda: x.add_(1)] * kernels)
