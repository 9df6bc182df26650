"""Whole decode steps and prefill of a model with random weights, next to the read bandwidth of the same run.

Also prints how much of a step is spent outside the kernels: the same calls are timed with kernels that return at once.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.model.qwen3 import Qwen3Model
from minipaged.model.random_weights import QWEN3_SHAPES, RandomWeights
from minipaged.model.weights import load_model
from minipaged.ops.backend import AttentionBatch, AttentionPlan
from minipaged.ops.cpu.backend import NativeBackend
from minipaged.ops.cpu.library import huge_page_tensor


def batch_of(sequences: int, context: int, queries: int, block_size: int) -> AttentionBatch:
    per = -(-context // block_size)
    tables = torch.randperm(sequences * per, dtype=torch.int32).view(sequences, per)
    positions = torch.arange(context - queries, context).repeat(sequences)
    rows = torch.arange(sequences).repeat_interleave(queries)
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    starts = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32)
    return AttentionBatch(
        positions, slots, tables, torch.full((sequences,), context, dtype=torch.int32), starts, queries, context
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(QWEN3_SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    arguments = parser.parse_args()
    config, block_size = QWEN3_SHAPES[arguments.shape], 16
    backend = NativeBackend(threads=arguments.threads)
    clock = time.thread_time if backend.threads == 1 else time.perf_counter
    start = time.perf_counter()
    model = load_model(config, RandomWeights(config), backend, activation_dtype=torch.bfloat16, max_model_len=16384)
    print(f"{arguments.shape}: loaded in {time.perf_counter() - start:.1f} s, {backend.isa}, {backend.threads} threads")
    layers, kv_heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    weight_bytes = sum(
        2 * w.in_features * w.out_features
        for layer in model.layers
        for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    weight_bytes += 2 * model.head.in_features * model.head.out_features
    buffer = huge_page_tensor((1 << 29,), torch.uint8).fill_(1)

    for sequences, context, queries in [(b, arguments.context, 1) for b in arguments.batches] + [
        (1, n, n) for n in arguments.prefill
    ]:
        blocks = sequences * -(-context // block_size)
        caches = []
        for _ in range(layers):
            caches.append(PagedKVCache(blocks, kv_heads, block_size, dim))
            caches[-1].fill_(0.01)
        batch = batch_of(sequences, context, queries, block_size)
        tokens = torch.randint(0, config.vocab_size, (sequences * queries,))
        rows = torch.arange(sequences) * queries + queries - 1
        seconds, bandwidth = [], []
        for _ in range(arguments.rounds):
            bandwidth.append(backend.probes.read_bandwidth(buffer=buffer, clock=clock))
            start = clock()
            model.forward(tokens, backend.plan(batch), caches, rows)
            seconds.append(clock() - start)
        step, read = statistics.median(seconds), statistics.median(bandwidth)
        label = f"decode {sequences} x {context}" if queries == 1 else f"prefill {queries}"
        line = f"{label:18s} {step * 1e3:8.2f} ms  {sequences * queries / step:8.1f} tok/s"
        if queries == 1:
            need = weight_bytes + 2 * 2 * sequences * context * kv_heads * dim * layers
            line += f"  {need / step / 1e9:5.1f} of {read / 1e9:.1f} GB/s ({need / step / read:.0%})"
            line += f"  outside kernels {outside(model, backend, tokens, batch, caches, rows) * 1e3:.2f} ms"
        print(line)


def outside(
    model: Qwen3Model,
    backend: NativeBackend,
    tokens: torch.Tensor,
    batch: AttentionBatch,
    caches: list[PagedKVCache],
    rows: torch.Tensor,
) -> float:
    """Seconds of a step when every kernel returns at once."""
    names = ("_linear", "_attention", "_rope_write", "_rms_norm", "_embed")
    kept = {name: getattr(backend, name) for name in names}
    nothing = backend.empty_call
    times = []
    try:
        for name in names:
            setattr(backend, name, nothing)
        for _ in range(20):
            start = time.thread_time()
            plan: AttentionPlan = backend.plan(batch)
            model.forward(tokens, plan, caches, rows)
            times.append(time.thread_time() - start)
    finally:
        for name in names:
            setattr(backend, name, kept[name])
    return statistics.median(times)


if __name__ == "__main__":
    main()
