"""The two limits that results are compared with, measured beside them: read bandwidth of memory, and rate of matrix
products.

The native back end brings probes of its own (streams over huge pages, its product kernel on data in the L1 cache).
Elsewhere torch operators stand in: they may miss some percent of what the machine can do, and `method` says that they
were used.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from minipaged.bench.machine import last_level_cache_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minipaged.ops.cpu.probes import NativeProbes

HUGE_PAGE = 2 << 20
CACHES = 8  # the buffer is at least this many times the last-level cache
PASSES = 5  # one probe is the median of so many passes
LEAST_BUFFER = 512 << 20
CPU_SQUARES, GPU_SQUARES = (512, 1024, 2048), (8192,)  # sides of the matrices that torch multiplies
LONG_PRODUCT = 0.1  # seconds


class Probes:
    """Owns the buffer that is read. threads: those of the measurement, which must be torch's own number too."""

    def __init__(self, *, threads: int, device: str = "cpu", buffer_bytes: int | None = None) -> None:
        nbytes = buffer_bytes or max(LEAST_BUFFER, CACHES * (last_level_cache_bytes() or 0))
        self.device = device
        self._buffer, pages = _buffer(nbytes, device)
        self._native = _native() if device == "cpu" else None
        if self._native is not None:
            how, self._pass = f"native kernel ({self._native.isa})", self._native_pass
        else:
            how, self._pass = self._fastest_torch_pass()
        self.method = f"{how}, {pages}, {nbytes >> 20} MiB, {threads} threads, median of {PASSES} passes"

    def read_bandwidth(self) -> float:
        """Bytes per second."""
        return self._buffer.nbytes / statistics.median(self._seconds(self._pass) for _ in range(PASSES))

    def matrix_peak(self, dtype: torch.dtype) -> tuple[float, str]:
        """Floating-point operations per second of matrix products in `dtype`, a product and a sum count as two, and
        what reached them.

        The limit is the machine's and not that of one kernel: the native product kernel and torch's (which may use a
        matrix unit that ours does not) are both tried, the faster one counts.
        """
        import torch

        found: dict[str, float] = {}
        for n in CPU_SQUARES if self.device == "cpu" else GPU_SQUARES:
            rate = found[f"torch.mm of {n} x {n}"] = self._torch_products(n, dtype)
            if 2.0 * n**3 / rate > LONG_PRODUCT:
                break  # a larger one would take seconds: torch has no fast path for this type here
        if self._native is not None and dtype in (torch.bfloat16, torch.float32):
            native = self._native
            rates = [native.matrix_peak(dtype) for _ in range(PASSES)]
            found[f"native kernel ({native.isa})"] = statistics.median(rates)
        best = max(found, key=lambda name: found[name])
        return found[best], best

    def _torch_products(self, n: int, dtype: torch.dtype) -> float:
        import torch

        a = torch.randn(n, n, device=self.device).to(dtype)
        out = torch.empty_like(a)
        torch.mm(a, a, out=out)
        seconds = statistics.median(self._seconds(lambda: torch.mm(a, a, out=out)) for _ in range(PASSES))
        return 2.0 * n**3 / seconds

    def _native_pass(self) -> object:
        import torch

        return self._native and self._native.read_bandwidth(buffer=self._buffer.view(torch.uint8))

    def _fastest_torch_pass(self) -> tuple[str, Callable[[], object]]:
        """Reductions differ by tens of percent between machines; the fastest is nearest to the limit."""
        import torch

        numbers = self._buffer
        candidates: dict[str, Callable[[], object]] = {
            "torch.sum": numbers.sum,
            "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(numbers),
        }
        for run in candidates.values():
            run()
        best = min(candidates, key=lambda name: min(self._seconds(candidates[name]) for _ in range(3)))
        return best, candidates[best]

    def _seconds(self, run: Callable[[], object]) -> float:
        self._synchronise()
        start = time.perf_counter()
        run()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)


def _native() -> NativeProbes | None:
    from minipaged.ops.registry import available_backends

    if available_backends()["cpu"] is not None:
        return None
    from minipaged.ops.cpu.backend import NativeBackend

    return NativeBackend().probes


def _buffer(nbytes: int, device: str) -> tuple[Tensor, str]:
    """float32 numbers that were written once, and what kind of memory they are in."""
    import torch

    if device != "cpu":
        return torch.ones(nbytes // 4, device=device), "device memory"
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.ones(nbytes // 4), "ordinary pages"
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = "huge pages"
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel that was built without them
        pages = "ordinary pages"
    return torch.frombuffer(memory, dtype=torch.float32)[: nbytes // 4].fill_(1), pages
