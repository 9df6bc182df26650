"""Attention and matrix products alone, each call against what it must read and compute.

Every case goes through several caches or copies of its weight in turn, together larger than the last-level cache, as
the layers of a model do: nothing is found in the cache that a real step would not find there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minipaged.bench.machine import last_level_cache_bytes
from minipaged.bench.probes import Probes
from minipaged.bench.report_header import Report, case_part, report_header
from minipaged.bench.trials import Trial, Trials, run_trials
from minipaged.kv.address import num_logical_blocks
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.model.dtypes import resolve_dtype
from minipaged.ops.backend import AttentionBatch, Backend
from minipaged.ops.registry import get_backend
from minipaged.threads import set_threads

if TYPE_CHECKING:
    from minipaged.model.config import ModelConfig
    from minipaged.model.source import ModelSource

COVER = 4  # caches or weights together are so many times the last-level cache
LEAST_SECONDS = 0.05  # a case is repeated until it took so long
DEFAULT_CACHE = 32 << 20
# (sequences, context, queries per sequence); the decode of 8 x 2048 is the headline
ATTENTION_CASES = ((1, 256, 1), (8, 256, 1), (8, 2048, 1), (1, 8192, 1), (1, 512, 512), (1, 2048, 2048))
HEADLINE = "attention decode, 8 x 2048"
LINEARS = ("qkv", "out", "gate_up", "down", "head")
LINEAR_ROWS = (1, 8, 32, 512)


@dataclass(slots=True)
class KernelCase:
    """One call: bytes it must read, operations it must do, and `run`, which makes `calls` of them."""

    name: str
    nbytes: int
    flops: int
    calls: int
    run: Callable[[], None]

    def seconds(self, synchronise: Callable[[], None]) -> float:
        """Of one call; repeats until `LEAST_SECONDS` have passed."""
        repeats, begin = 0, time.perf_counter()
        while True:
            self.run()
            synchronise()
            repeats += 1
            passed = time.perf_counter() - begin
            if passed >= LEAST_SECONDS:
                return passed / (repeats * self.calls)


def attention_case(
    backend: Backend,
    config: ModelConfig,
    dtype: torch.dtype,
    case: tuple[int, int, int],
    *,
    block_size: int,
    device: str,
    scattered: bool = False,
) -> KernelCase:
    """Paged attention of `queries` last tokens of each of B sequences of `context` tokens.

    Blocks lie as a fresh pool hands them out to one prompt after the other; `scattered`: in random order, which is the
    worst that a pool can come to.

    Bytes: K and V of every token once. Operations: four per head dimension, query head and visible key.
    """
    sequences, context, queries = case
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    per_sequence = num_logical_blocks(context, block_size)
    nbytes = 2 * sequences * context * kv_heads * dim * dtype.itemsize
    count = _copies(nbytes)
    caches = []
    for _ in range(count):
        cache = PagedKVCache(sequences * per_sequence, kv_heads, block_size, dim, dtype=dtype, device=device)
        cache.key_cache.normal_()
        cache.value_cache.normal_()
        caches.append(cache)
    order = torch.arange(sequences * per_sequence, dtype=torch.int32)
    if scattered:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
    tokens = sequences * queries
    batch = AttentionBatch(
        positions=torch.arange(context - queries, context, device=device).repeat(sequences),
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        block_tables=order.view(sequences, per_sequence).to(device),
        seq_lens=torch.full((sequences,), context, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device),
        max_query_len=queries,
        max_seq_len=context,
    )
    plan = backend.plan(batch)
    query = torch.randn(tokens, heads, dim, device=device).to(dtype)
    out = torch.empty_like(query)

    def run() -> None:
        for cache in caches:
            backend.attention(query, cache, plan, out=out)

    visible = sequences * (queries * (context - queries) + queries * (queries + 1) // 2)
    kind = "decode" if queries == 1 else f"prefill {queries}"
    name = f"attention {kind}, {sequences} x {context}{', scattered blocks' if scattered else ''}"
    return KernelCase(name, nbytes, 4 * visible * heads * dim, count, run)


def linear_cases(
    backend: Backend, config: ModelConfig, dtype: torch.dtype, matrix: str, rows: Sequence[int], *, device: str
) -> list[KernelCase]:
    """One of `LINEARS` at each number of rows. Bytes: the weight. Operations: two per weight and row."""
    n, k = _linear_shape(config, matrix)
    nbytes, gated = n * k * dtype.itemsize, matrix == "gate_up"
    weights = [
        backend.pack_linear(torch.randn(n, k, device=device).mul_(0.02).to(dtype), gated=gated)
        for _ in range(_copies(nbytes))
    ]
    turn = itertools.cycle(weights)
    cases = []
    for count in rows:
        x = torch.randn(count, k, device=device).to(dtype)
        out_dtype = torch.float32 if matrix == "head" else dtype
        out = torch.empty(count, n // 2 if gated else n, dtype=out_dtype, device=device)

        def run(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            backend.linear(x, next(turn), act="silu_mul" if gated else None, out=out)

        cases.append(KernelCase(f"linear {matrix} {k} -> {n}, {count} rows", nbytes, 2 * n * k * count, 1, run))
    return cases


def _linear_shape(config: ModelConfig, matrix: str) -> tuple[int, int]:
    """(out, in) of one of `LINEARS`."""
    H, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    attention = config.num_attention_heads * D
    return {
        "qkv": (attention + 2 * config.num_key_value_heads * D, H),
        "out": (H, attention),
        "gate_up": (2 * F, H),
        "down": (H, F),
        "head": (config.vocab_size, H),
    }[matrix]


def _copies(nbytes: int) -> int:
    return max(1, -(-COVER * (last_level_cache_bytes() or DEFAULT_CACHE) // nbytes))


def bench_kernels(
    benchmark: str,
    source: ModelSource,
    options: Mapping[str, Any],
    *,
    attention: Sequence[tuple[int, int, int]] = (),
    scattered: bool = False,
    rows: Sequence[int] = (),
    rounds: int,
    progress: Callable[[str], object],
) -> Report:
    """ "attention": (sequences, context, queries) cases, `scattered` as in `attention_case`; "linear": the products of
    a layer and the head at so many rows.

    Decode of 8 x 2048, or else the first case, is the headline. Of `source` only the config is used.
    """
    threads = set_threads(options.get("threads"))
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = get_backend(options.get("backend"), device)
    dtype = resolve_dtype(options["dtype"], source.dtype, device=device, fast_bfloat16=backend.fast_bfloat16)
    progress("measuring the machine's limits")
    probes = Probes(threads=threads, device=device)
    peak = probes.matrix_peak(dtype)
    rate = peak[0]
    torch.manual_seed(options["seed"])
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else _nothing
    measured: list[Trial[dict[str, float]]] = []
    results: list[Report] = []

    def measure(cases: Sequence[KernelCase]) -> None:
        progress(cases[0].name)
        for case in cases:
            case.seconds(synchronise)  # buffers grow to their size
        trials = run_trials(
            lambda: {c.name: c.seconds(synchronise) for c in cases}, probes.read_bandwidth, rounds=rounds
        )
        measured.extend(trials.all)
        for case in cases:
            seconds = trials.median(lambda r: r[case.name])  # noqa: B023 - called here and now
            results.append(case_part(case.name, seconds, case.nbytes, case.flops, trials.probe, rate))

    with torch.inference_mode():
        for shape in attention:  # one after the other: together their caches might be larger than memory
            block_size = options["block_size"]
            sizes = {"block_size": block_size, "device": device, "scattered": scattered}
            measure([attention_case(backend, source.config, dtype, shape, **sizes)])
        if rows:
            for matrix in LINEARS:
                measure(linear_cases(backend, source.config, dtype, matrix, rows, device=device))
    first = next((r for r in results if r["case"] == HEADLINE), results[0])
    report = report_header(
        benchmark,
        source.name,
        Trials(measured),
        probes,
        peak,
        threads=threads,
        backend=backend.name,
        dtype=str(dtype),
        device=device,
    )
    return report | {
        "headline": first["case"],
        "gb_s": first["gb_s"],
        "share_of_bandwidth": first["share_of_bandwidth"],
        "share_of_limit": first["share_of_limit"],
        "cases": results,
        "block_size": options["block_size"],
    }


def _nothing() -> None:
    pass
