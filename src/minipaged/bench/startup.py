"""How long a fresh process takes until a model answers, and how much memory it takes: measured in a child process."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.bench.probes import Probes
from minipaged.bench.report_header import Report, report_header
from minipaged.bench.trials import run_trials
from minipaged.threads import set_threads

if TYPE_CHECKING:
    from minipaged.model.source import ModelSource

SAMPLE_SECONDS = 0.004
ALLOWANCE = 300_000_000  # bytes beside packed weights and KV pool
CHUNK = 64 << 20

CHILD = "minipaged.bench.startup_child"


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the start of the process; bytes of anonymous memory (None where /proc does not tell).

    total_s: until the model is ready. torch_s: of that, `import torch`. own_s: the rest. token_s: from ready to the
    first token. anonymous_after_torch: when torch was imported. anonymous_peak: the most seen until the first tokens,
    sampled every 4 ms.
    """

    total_s: float
    torch_s: float
    load_s: float
    token_s: float
    pool_bytes: int
    facts: dict[str, Any]
    anonymous_after_torch: int | None
    anonymous_peak: int | None

    @property
    def own_s(self) -> float:
        """Seconds without `import torch`."""
        return self.total_s - self.torch_s

    @property
    def anonymous_growth(self) -> int | None:
        """Peak of anonymous memory beyond what there was after `import torch`."""
        if self.anonymous_peak is None or self.anonymous_after_torch is None:
            return None
        return self.anonymous_peak - self.anonymous_after_torch


def start_once(folder: Path, options: Mapping[str, Any]) -> Startup:
    """Start a process that loads `folder` with these keywords of `LLM`. RuntimeError with its last words if it
    fails.
    """
    arguments = json.dumps({"model": str(folder), "options": dict(options)})
    marks: dict[str, dict[str, Any]] = {}
    after_torch: int | None = None
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads would stop the child when it is full
        begin = time.monotonic()  # the same clock in both processes
        command = [sys.executable, "-m", CHILD, arguments]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
            _AnonymousMemory(child.pid) as memory,
        ):
            for line in child.stdout or ():
                if line.startswith('{"mark"'):
                    fact = json.loads(line)
                    marks[fact.pop("mark")] = fact
                    if "torch" in marks and after_torch is None:
                        after_torch = memory.now()
        errors.seek(0)
        last = "".join(errors.read().strip().splitlines()[-1:])
    if child.returncode or "end" not in marks:
        raise RuntimeError(f"the process that loads {folder} ended with status {child.returncode}: {last}")
    at = {name: fact.pop("time") for name, fact in marks.items()}
    facts = marks["ready"]
    return Startup(
        total_s=at["ready"] - begin,
        torch_s=at["torch"] - at["python"],
        load_s=at["ready"] - at["minipaged"],
        token_s=at["token"] - at["ready"],
        pool_bytes=facts.pop("pool_bytes"),
        facts=facts,
        anonymous_after_torch=after_torch,
        anonymous_peak=memory.peak,
    )


class _AnonymousMemory:
    """Watches RssAnon of a process from a thread, inside a `with` block."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._stop = threading.Event()
        self.peak: int | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _AnonymousMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> int | None:
        """Bytes; None if the process or /proc is not there."""
        try:
            text = self._status.read_text()
        except OSError:
            return None
        for line in text.splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return None

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            seen = self.now()
            if seen is not None:
                self.peak = max(seen, self.peak or 0)


def warm_page_cache(folder: Path) -> int:
    """Read every weight file once, so that the start does not measure a disk. Returns bytes."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                total += len(chunk)
    return total


def bench_startup(
    source: ModelSource, options: Mapping[str, Any], *, rounds: int, progress: Callable[[str], object]
) -> Report:
    """`start_once`, `rounds` times, from a page-cached file. A source without a folder is written to a temporary one
    first.
    """
    from minipaged.bench.write_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="minipaged-bench-") as temporary:
        folder = source.folder
        if folder is None:
            folder = Path(temporary)
            progress("writing random weights to a temporary folder")
            write_checkpoint(source, folder)
        file_bytes = warm_page_cache(folder)
        probes = Probes(threads=set_threads(options.get("threads")))
        numbers = itertools.count(1)

        def once() -> Startup:
            progress(f"start {next(numbers)}")
            return start_once(folder, options)

        trials = run_trials(once, probes.read_bandwidth, rounds=rounds)
    facts, pool_bytes = trials.all[0].result.facts, trials.all[0].result.pool_bytes
    weight_bytes = _packed_bytes(source, facts["dtype"])
    growths = [a.result.anonymous_growth for a in trials.all]
    growth = max((g for g in growths if g is not None), default=None)
    report = report_header("startup", source.name, trials, probes, None, **facts)
    own_s = trials.median(lambda r: r.own_s)
    return report | {
        "own_s": own_s,
        "import_torch_s": trials.median(lambda r: r.torch_s),
        "total_s": trials.median(lambda r: r.total_s),
        "load_s": trials.median(lambda r: r.load_s),
        "first_token_s": trials.median(lambda r: r.token_s),
        # Weights are read from the page cache and written to their packed place, once each.
        "share_of_limit": (file_bytes + weight_bytes) / trials.probe / own_s,
        "weight_file_bytes": file_bytes,
        "packed_weight_bytes": weight_bytes,
        "kv_pool_bytes": pool_bytes,
        "anonymous_growth_bytes": growth,
        # The pool's pages come into being as tokens are written, so this is what everything but the weights takes.
        "anonymous_overhead_bytes": None if growth is None else growth - weight_bytes,
        "anonymous_allowed_bytes": weight_bytes + pool_bytes + ALLOWANCE,
    }


def _packed_bytes(source: ModelSource, dtype: str) -> int:
    import torch

    from minipaged.model.parameters import parameters

    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize * sum(math.prod(p.shape) for p in parameters(source.config).values())
