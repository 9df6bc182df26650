"""minipaged itself, through its engine's public face."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import harness

from minipaged.bench.workloads import BenchRequest


class Minipaged:
    """`--options`: keywords of `LLM`. The prefix cache is off; the pool has 3 GiB, as OpenVINO's has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from minipaged import LLM, __version__
        from minipaged.bench.limits import Limits

        options: dict[str, Any] = {"enable_prefix_caching": False, "kv_cache_memory": 3 << 30, "max_model_len": 16384}
        self._llm = LLM(arguments.model, threads=arguments.threads, **{**options, **arguments.options})
        loaded = self._llm.loaded
        kind = str(loaded.model.activation_dtype).removeprefix("torch.")
        itemsize = loaded.model.activation_dtype.itemsize
        self._limits = Limits(loaded.model.config, itemsize, loaded.caches[0].key_cache.dtype.itemsize)
        self.facts = {
            "version": f"minipaged {__version__}, torch {torch.__version__}",
            "precision": f"{kind} weights and KV cache",
            "backend": loaded.model.backend.name,
            "options": arguments.options,
        }

    def run(self, requests: Sequence[BenchRequest]) -> harness.Timing:
        from minipaged.bench.measure import run_requests

        run = run_requests(self._llm.engine, requests)
        first, last = [times[0] for times in run.token_times], [times[-1] for times in run.token_times]
        return harness.Timing(0.0, run.seconds, first, last, {"bytes_per_step": run.bytes_per_step(self._limits)})


if __name__ == "__main__":
    harness.main(Minipaged)
