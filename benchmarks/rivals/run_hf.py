"""Hugging Face transformers: `generate` with left padding, which is how it batches. It stops for nobody: all rows
run to the longest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import harness
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from minipaged.bench.workloads import BenchRequest


class Clock(BaseStreamer):
    """Notes when each token of a single row is handed out; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(arguments.threads)
        attention = arguments.options.get("attention", "sdpa")
        dtype = arguments.options.get("dtype", "bfloat16")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, dtype), attn_implementation=attention
        ).eval()
        self._model.generation_config.eos_token_id = None
        self.facts = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "precision": f"{dtype} weights and KV cache, {attention} attention",
        }

    def run(self, requests: Sequence[BenchRequest]) -> harness.Timing:
        length = max(len(request.prompt) for request in requests)
        count = max(request.output_tokens for request in requests)
        ids = torch.zeros((len(requests), length), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, length - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, length - len(request.prompt) :] = 1
        clock = Clock() if len(requests) == 1 else None
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, streamer=clock, pad_token_id=0
            )
        end = time.perf_counter()
        if output.shape[1] != length + count:
            raise RuntimeError(f"{output.shape[1] - length} of {count} tokens were generated")
        if clock is None:
            return harness.Timing(begin, end)
        return harness.Timing(begin, end, [clock.times[1]], [clock.times[-1]])


if __name__ == "__main__":
    harness.main(Transformers)
