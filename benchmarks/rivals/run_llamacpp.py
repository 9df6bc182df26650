"""llama.cpp through llama-cpp-python's low-level API, batched by hand as its own server does: one `llama_decode`
per step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import harness
import llama_cpp
import numpy as np

from minipaged.bench.workloads import BenchRequest, workload

BATCH = 2048  # tokens handed over at once
MICRO_BATCH = 512  # tokens computed at once
MOST_SEQUENCES = 32
STREAM = 768  # cells of one sequence where each has a stream of its own: W3's longest request

Item = tuple[int, int, int, bool]  # token, position, sequence, logits wanted


class LlamaCpp:
    def __init__(self, arguments: argparse.Namespace) -> None:
        requests = workload(arguments.workload).requests
        llama_cpp.llama_backend_init()
        model_options = llama_cpp.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(arguments.model.encode(), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_batch, options.n_ubatch = BATCH, MICRO_BATCH
        options.n_threads = options.n_threads_batch = arguments.threads
        # Its fastest settings for each case: one sequence in one cache, or a stream of its own for each of many.
        options.kv_unified = len(requests) == 1
        options.n_seq_max = 1 if len(requests) == 1 else MOST_SEQUENCES
        options.n_ctx = 8448 if len(requests) == 1 else MOST_SEQUENCES * STREAM
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp could not load {arguments.model}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        weights = "q8_0" if "q8_0" in arguments.model else "bf16"
        self.facts = {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "precision": f"{weights} weights, KV cache f16 (its default)",
        }

    def run(self, requests: Sequence[BenchRequest]) -> harness.Timing:
        llama_cpp.llama_memory_clear(self._memory, True)
        counts = [0] * len(requests)
        first, last, newest = [0.0] * len(requests), [0.0] * len(requests), [0] * len(requests)

        def step(items: list[Item]) -> None:
            tokens = self._decode(items)
            now = time.perf_counter()
            for sequence, token in tokens.items():
                if counts[sequence] == 0:
                    first[sequence] = now
                last[sequence], newest[sequence] = now, token
                counts[sequence] += 1

        begin = time.perf_counter()
        prompts = [
            (token, position, sequence, position == len(request.prompt) - 1)
            for sequence, request in enumerate(requests)
            for position, token in enumerate(request.prompt)
        ]
        for start in range(0, len(prompts), BATCH):
            step(prompts[start : start + BATCH])
        active = [s for s, request in enumerate(requests) if counts[s] < request.output_tokens]
        while active:
            step([(newest[s], len(requests[s].prompt) + counts[s] - 1, s, True) for s in active])
            for sequence in active:
                if counts[sequence] == requests[sequence].output_tokens:
                    llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            active = [s for s in active if counts[s] < requests[s].output_tokens]
        end = time.perf_counter()
        return harness.Timing(begin, end, first, last)

    def _decode(self, items: list[Item]) -> dict[int, int]:
        """One call; the most likely next token of each sequence that wanted logits."""
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        tokens = {}
        for i, (_, _, sequence, wanted) in enumerate(items):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, i)
                tokens[sequence] = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        return tokens


if __name__ == "__main__":
    harness.main(LlamaCpp)
