"""How many threads to compute with: the processors this process may really use, set once before the first tensor is
touched.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from pathlib import Path

from minipaged import cgroup
from minipaged._warnings import warn

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_chosen: int | None = None
_process = 0
"""The one that chose: threads do not survive a fork."""
MOST_THREADS = 1024


def available_processors() -> int:
    """Processors in this process's affinity mask, or of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(proc: Path = cgroup.PROC, root: Path = cgroup.CGROUP) -> int:
    """min(processors in the affinity mask, whole processors in the control group's quota), at least 1.

    torch counts the processors of the host; in a container with a smaller quota its lock-step threads would be
    throttled.
    """
    affinity = available_processors()
    quota = cgroup.cpu_quota(proc, root)
    return max(1, affinity if quota is None else min(affinity, math.floor(quota)))


def openmp_threads() -> int | None:
    """What OMP_NUM_THREADS asks for (a list gives the outermost level first), None if it holds no such number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def set_threads(threads: int | None = None) -> int:
    """Fix the number of compute threads of this process and return it; the first call decides.

    threads: what the user wants, at least 1; None = what is set already, else `default_threads()`, or OMP_NUM_THREADS
    if that is less. A later, different number only warns: the thread pool is shared by everything in the process.
    RuntimeError in a fork of a process that computed with several.
    """
    global _chosen, _process  # noqa: PLW0603 - the thread count is the process's, not an engine's
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads must be an integer of at least 1 or left out, got {threads!r}")
    if threads is not None and threads > MOST_THREADS:
        raise ValueError(f"threads must be at most {MOST_THREADS}, got {threads}: more than any machine's processors")
    with _lock:
        if _chosen is not None:
            if _process != os.getpid() and _chosen > 1:
                raise RuntimeError(
                    f"this process was forked from one that computed with {_chosen} threads, which are not here: a "
                    "computation would wait for them for ever; start it with multiprocessing's method 'spawn'"
                )
            if threads is not None and threads != _chosen:
                warn(f"threads = {threads} has no effect: this process already computes with {_chosen}")
            return _chosen
        import torch

        _process = os.getpid()
        _chosen = threads or min(default_threads(), openmp_threads() or sys.maxsize)
        torch.set_num_threads(_chosen)
        logger.info("computing with %d threads", _chosen)
        return _chosen
