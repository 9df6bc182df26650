"""Micro benchmarks of the native kernels, next to the limits of the same run.

Every round measures read bandwidth, matrix peak and each kernel once, so that all see the same disturbance; medians
over the rounds are printed as a share of the limit. `--json FILE` keeps them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minipaged.ops.backend import AttentionBatch
from minipaged.ops.native import NativeBackend, huge_page_tensor, kv_cache_storage

LINEARS = {"qkv/gate size": (1024, 4096), "head": (1024, 151936)}


@dataclass
class Case:
    """One kernel call: `amount` bytes or operations against the limit of that name."""

    label: str
    limit: str
    amount: float
    run: Callable[[], object]
    repeats: int
    rates: list[float] = field(default_factory=list)

    def measure(self, clock: Callable[[], float]) -> None:
        start = clock()
        for _ in range(self.repeats):
            self.run()
        self.rates.append(self.amount * self.repeats / (clock() - start))


class Cache:
    """Key and value memory of one layer, as `PagedKVCache` has them."""

    def __init__(self, blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype) -> None:
        self.key_cache, self.value_cache = kv_cache_storage(blocks, heads, block_size, dim, dtype)
        self.key_cache.normal_()
        self.value_cache.normal_()


def linear_cases(backend: NativeBackend, dtype: torch.dtype, rows: list[int]) -> list[Case]:
    cases = []
    for name, (k, n) in LINEARS.items():
        weights = [backend.pack_linear(torch.randn(n, k).div_(32).to(dtype)) for _ in range(1 if n > 100000 else 12)]
        turn = iter(range(1 << 60))  # a different weight each time: none is left in the L3 cache
        nbytes = n * k * dtype.itemsize
        for m in rows:
            x, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)

            def run(x=x, out=out, w=weights, turn=turn):  # type: ignore[no-untyped-def]
                backend.linear(x, w[next(turn) % len(w)], out=out)

            cases.append(Case(f"linear {k}->{n} ({name}) rows {m}", "read", nbytes, run, max(1, int(3e8 / nbytes))))
    k, n, m = 1024, 4096, 2048
    w = backend.pack_linear(torch.randn(n, k).div_(32).to(dtype))
    x, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
    cases.append(Case(f"linear {k}->{n} rows {m}", "peak", 2.0 * m * n * k, lambda: backend.linear(x, w, out=out), 2))
    return cases


def attention_cases(backend: NativeBackend, dtype: torch.dtype, block_size: int) -> list[Case]:
    query_heads, kv_heads, dim = 16, 8, 128
    cases = []
    for label, sequences, context, queries in (
        ("decode", 1, 256, 1),
        ("decode", 8, 256, 1),
        ("decode", 8, 2048, 1),
        ("decode", 1, 8192, 1),
        ("prefill", 1, 512, 512),
        ("prefill", 1, 2048, 2048),
        ("prefill", 1, 8192, 512),
    ):
        per = -(-context // block_size)
        layers = max(1, int(3e8 / (sequences * context * kv_heads * dim * 2 * dtype.itemsize))) if queries == 1 else 1
        layers = min(layers, 40)
        caches = [Cache(sequences * per, kv_heads, block_size, dim, dtype) for _ in range(layers)]
        tables = torch.randperm(sequences * per, dtype=torch.int32).view(sequences, per)
        tokens = sequences * queries
        batch = AttentionBatch(
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int64),
            tables,
            torch.full((sequences,), context, dtype=torch.int32),
            torch.arange(0, tokens + 1, queries, dtype=torch.int32),
            queries,
            context,
        )
        plan = backend.plan(batch)
        query = torch.randn(tokens, query_heads, dim).to(dtype)
        out = torch.empty_like(query)

        def run(query=query, caches=caches, plan=plan, out=out):  # type: ignore[no-untyped-def]
            for cache in caches:
                backend.attention(query, cache, plan, out=out)

        name = f"attention {label} {sequences} x {context} queries {queries}"
        if queries == 1:
            amount = 2.0 * sequences * context * kv_heads * dim * dtype.itemsize * layers
            cases.append(Case(name, "read", amount, run, 1))
        else:
            seen = queries * (context - queries) + queries * (queries + 1) / 2
            cases.append(Case(name, "peak", 4.0 * seen * query_heads * dim, run, 2))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    backend = NativeBackend(threads=arguments.threads)
    clock = time.thread_time if backend.threads == 1 else time.perf_counter
    dtype = getattr(torch, arguments.dtype)
    cases = []
    if arguments.only in "linear" or "linear" in arguments.only:
        cases += linear_cases(backend, dtype, arguments.rows)
    if "linear" not in arguments.only:
        cases += attention_cases(backend, dtype, arguments.block_size)
    cases = [case for case in cases if arguments.only in case.label]
    buffer = huge_page_tensor((1 << 29,), torch.uint8).fill_(1)
    limits: dict[str, list[float]] = {"read": [], "peak": []}
    for _ in range(arguments.rounds):
        for case in cases:
            limits["read"].append(backend.read_bandwidth(buffer=buffer, clock=clock))
            case.measure(clock)
        limits["peak"].append(backend.matrix_peak(dtype, clock=clock))
    medians = {name: statistics.median(rates) for name, rates in limits.items()}
    print(f"{platform.machine()}, isa {backend.isa}, {backend.threads} threads, {dtype}, torch {torch.__version__}")
    for name, rates in limits.items():
        print(f"{name} limit {medians[name] / 1e9:.1f} G/s (from {min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f})")
    report = {"isa": backend.isa, "threads": backend.threads, "dtype": str(dtype), "limits": medians, "cases": {}}
    for case in cases:
        rate = statistics.median(case.rates)
        share = rate / medians[case.limit]
        print(f"{case.label:50s} {rate / 1e9:7.1f} G/s   {share:6.1%} of {case.limit}")
        report["cases"][case.label] = {"rate": rate, "limit": case.limit, "share": share, "rates": case.rates}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
