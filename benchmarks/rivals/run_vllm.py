"""vLLM on the CPU. `compare.py` preloads tcmalloc and libiomp and binds both cores: without them it is half as fast."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

import harness

from minipaged.bench.workloads import BenchRequest


class Vllm:
    """`--options`: keywords of vLLM's `LLM`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import vllm

        options = {"dtype": "bfloat16", "max_model_len": 9216, "enable_prefix_caching": False, "max_num_seqs": 32}
        self._engine = vllm.LLM(model=arguments.model, **{**options, **arguments.options}).llm_engine
        self._sampling = vllm.SamplingParams
        self._runs = 0
        self.facts = {"version": f"vllm {vllm.__version__}", "precision": "bfloat16 weights and KV cache"}

    def run(self, requests: Sequence[BenchRequest]) -> harness.Timing:
        self._runs += 1
        names = [f"{self._runs}-{index}" for index in range(len(requests))]
        counts = dict.fromkeys(names, 0)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        begin = time.perf_counter()
        for name, request in zip(names, requests):  # noqa: B905 - equal by construction
            params = self._sampling(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            )
            self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                count = len(output.outputs[0].token_ids)
                if count > counts[output.request_id]:
                    counts[output.request_id] = count
                    first.setdefault(output.request_id, now)
                    last[output.request_id] = now
        end = time.perf_counter()
        wanted = [request.output_tokens for request in requests]
        if list(counts.values()) != wanted:
            raise RuntimeError(f"token counts {list(counts.values())} instead of {wanted}")
        return harness.Timing(begin, end, [first[name] for name in names], [last[name] for name in names])


if __name__ == "__main__":  # it starts processes that import this file
    harness.main(Vllm)
