"""OpenVINO GenAI: ContinuousBatchingPipeline on a bf16 export of the model (`export_openvino.py`)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import harness
import numpy as np
import openvino
import openvino_genai

from minipaged.bench.workloads import BenchRequest


class OpenVino:
    """`--options`: properties of the CPU plugin, e.g. KV_CACHE_PRECISION; MAX_NUM_BATCHED_TOKENS is the scheduler's."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        properties = {"INFERENCE_NUM_THREADS": arguments.threads, **arguments.options}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 3  # GiB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = int(properties.pop("MAX_NUM_BATCHED_TOKENS", 2048))
        scheduler.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self._next_id = 0
        cache = properties.get("KV_CACHE_PRECISION", "u8 (its default)")
        self.facts = {
            "version": f"openvino {openvino.__version__}, openvino_genai {openvino_genai.__version__}",
            "precision": f"bf16 weights, KV cache {cache}",
        }

    def run(self, requests: Sequence[BenchRequest]) -> harness.Timing:
        handles, counts = [], [0] * len(requests)
        first, last = [0.0] * len(requests), [0.0] * len(requests)
        begin = time.perf_counter()
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request.output_tokens
            config.ignore_eos = True
            config.do_sample = False
            prompt = openvino.Tensor(np.array([request.prompt], np.int64))
            handles.append(self._pipeline.add_request(self._next_id, prompt, config))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    if counts[index] == 0:
                        first[index] = now
                    counts[index] += sum(len(output.generated_ids) for output in handle.read().values())
                    last[index] = now
        end = time.perf_counter()
        wanted = [request.output_tokens for request in requests]
        if counts != wanted:
            raise RuntimeError(f"token counts {counts} instead of {wanted}")
        return harness.Timing(begin, end, first, last)


if __name__ == "__main__":
    harness.main(OpenVino)
