"""Attention kernels: right (against float64 on the same device), and how near to the ceilings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from gpu_sections.measure import Rig
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch
from minipaged.ops.triton import flashinfer_backend
from minipaged.ops.triton.backend import TritonBackend
from minipaged.ops.triton.flashinfer_backend import FlashInferBackend

REHEARSING = triton.knobs.runtime.interpret
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 16) if REHEARSING else (16, 8, 128)  # of Qwen3-0.6B
DECODE_SHAPES = ((1, 32768), (16, 1024), (64, 4096), (256, 1024))
DECODE_AIMS = {(64, 4096): 0.75, (16, 1024): 0.45}
PREFILL_SHAPES = ((8192, 0), (2048, 6144))  # (queries, history)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Problem:
    """Sequences with shuffled blocks, NaN in every slot that holds no token, rubbish in the tables' padding."""

    def __init__(
        self, rig: Rig, lengths: list[int], query_lens: list[int], *, block_size: int, heads: int = HEADS,
        kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, dtype: torch.dtype | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        dtype, device = dtype or rig.dtype, rig.device
        needed = [-(-length // block_size) for length in lengths]
        order = random.Random(seed).sample(range(sum(needed) + 2), sum(needed))
        table = torch.full((len(lengths), max(needed) + 1), 2**31 - 1, dtype=torch.int32)
        taken = 0
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor(order[taken : taken + count], dtype=torch.int32)
            taken += count
        generator = torch.Generator(device).manual_seed(seed)
        shape = (sum(needed) + 2, kv_heads, block_size, head_dim)
        tensors = []
        for _ in range(2):
            tensor = torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
            unused = torch.ones(shape[0], block_size, dtype=torch.bool)
            for row, length in enumerate(lengths):
                for logical in range(needed[row]):
                    unused[int(table[row, logical]), : length - logical * block_size] = False
            tensor.transpose(1, 2)[unused.to(device)] = torch.nan
            tensors.append(tensor)
        self.cache = PagedKVCache.from_tensors(*tensors)
        self.table = table
        starts = [0]
        for count in query_lens:
            starts.append(starts[-1] + count)
        self.lengths, self.starts = lengths, starts
        self.query = torch.randn(starts[-1], heads, head_dim, device=device, generator=generator).to(dtype)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        decodes = next((row for row, count in enumerate(query_lens) if count != 1), len(query_lens))
        self.batch = AttentionBatch(
            nothing, nothing, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device), max(query_lens), max(lengths), decodes,
        )  # fmt: skip

    def caller(self, backend: TritonBackend, out: Tensor | None = None) -> Callable[[], Tensor]:
        plan = backend.plan(self.batch)
        out = torch.empty_like(self.query) if out is None else out
        return lambda: backend.attention(self.query, self.cache, plan, out=out)

    def expected(self) -> Tensor:
        """Plain softmax attention in float64."""
        rows = []
        for row, length in enumerate(self.lengths):
            q = self.query[self.starts[row] : self.starts[row + 1]].double().transpose(0, 1)
            k, v = self.cache.gather(self.table[row], length)
            group = q.shape[0] // k.shape[1]
            k, v = (t.double().transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
            scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
            sees = torch.arange(length - q.shape[1], length, device=q.device)[:, None]
            scores = scores.masked_fill(torch.arange(length, device=q.device) > sees, -torch.inf)
            rows.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(rows)


def check(rig: Rig, backend: TritonBackend) -> Iterator[dict[str, Any]]:
    """Every kind of shape against float64, and the same bits for a sequence alone and among others."""
    dtypes = (rig.dtype,) if rig.rehearsal else (torch.bfloat16, torch.float16, torch.float32)
    kinds = ((128, 16, (16, 8)), (128, 64, (32, 8)), (80, 3, (28, 4)), (256, 1, (4, 1)), (16, 256, (6, 6)))
    if rig.rehearsal:
        kinds = ((128, 16, (4, 2)),)
    shapes = [(dtype, *kind) for dtype in dtypes for kind in kinds]
    lengths, queries = [700, 33, 17, 400, 130, 1500], [1, 1, 17, 150, 130, 70]
    if rig.rehearsal:
        lengths, queries = [70, 17], [1, 9]
    for dtype, head_dim, block_size, (heads, kv_heads) in shapes:
        problem = Problem(
            rig, lengths, queries, block_size=block_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
        )
        got = problem.caller(backend)().double()
        error = float((got - problem.expected()).abs().max())  # NaN if anything that must not be read was read
        alone = Problem(
            rig, lengths, [1] * len(lengths), block_size=block_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype,
        )  # fmt: skip
        together = alone.caller(backend)()
        first = AttentionBatch(
            alone.batch.positions, alone.batch.slot_mapping, alone.batch.block_tables[:1], alone.batch.seq_lens[:1],
            alone.batch.query_start_loc[:2], 1, lengths[0], 1,
        )  # fmt: skip
        same = torch.equal(backend.attention(alone.query[:1], alone.cache, backend.plan(first)), together[:1])
        yield {
            "check": f"attention {dtype} D={head_dim} Bs={block_size} heads={heads}/{kv_heads}",
            "error": error, "limit": TOLERANCE[dtype], "same_bits_alone": same,
            "passed": error <= TOLERANCE[dtype] and same,
        }  # fmt: skip


def decode(rig: Rig, backend: TritonBackend, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Decode attention inside a CUDA graph: bytes of K and V per second, as a share of the copy's rate."""
    for batch, length in ((2, 40),) if rig.rehearsal else DECODE_SHAPES:
        for block_size in (16, 64):
            # Several layers, so that the cache of one layer is not still in L2 at the next replay.
            bytes_per_layer = 2 * batch * length * KV_HEADS * HEAD_DIM * rig.dtype.itemsize
            layers = 2 if rig.rehearsal else max(2, min(16, -(-(1 << 30) // bytes_per_layer)))
            problems = [
                Problem(rig, [length] * batch, [1] * batch, block_size=block_size, seed=n) for n in range(layers)
            ]
            seconds = rig.graph_seconds([problem.caller(backend) for problem in problems])
            rate = bytes_per_layer / seconds
            yield {
                "decode attention": f"batch {batch}, length {length}, block {block_size}",
                "us": seconds * 1e6, "GB/s": rate / 1e9, "share_of_copy": rate / bandwidth,
                "must": DECODE_AIMS.get((batch, length)),
                "yardsticks_us": _decode_yardsticks(rig, problems, batch, length),
            }  # fmt: skip
            del problems


def _decode_yardsticks(rig: Rig, problems: list[Problem], batch: int, length: int) -> dict[str, Any]:
    shape = (batch, KV_HEADS, length, HEAD_DIM)
    contiguous = [
        (problem.query.unsqueeze(2), torch.randn(shape, device=rig.device).to(rig.dtype),
         torch.randn(shape, device=rig.device).to(rig.dtype))
        for problem in problems
    ]  # fmt: skip
    calls = [
        lambda q=q, k=k, v=v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        for q, k, v in contiguous
    ]
    found: dict[str, Any] = {"SDPA, contiguous K/V": rig.graph_seconds(calls) * 1e6}
    try:
        found["FlashInfer"] = _flashinfer_us(rig, problems)
    except Exception as error:  # a yardstick: its build may fail in its own ways, and ours is still worth reporting
        found["FlashInfer"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found


def _flashinfer_us(rig: Rig, problems: list[Problem]) -> float | str:
    """Of one call, through our own back end "flashinfer"; planning is not part of it."""
    reason = flashinfer_backend.unavailable_reason(rig.device)
    if reason is not None:
        return reason
    calls = []
    for problem in problems:
        call = problem.caller(FlashInferBackend())
        call()  # plans; what follows is the same step again
        calls.append(call)
    return rig.seconds(lambda: [call() for call in calls]) * 1e6 / len(problems)


def prefill(rig: Rig, backend: TritonBackend, flops: float) -> Iterator[dict[str, Any]]:
    """Chunked prefill: useful floating-point operations (causal half only) per second."""
    for queries, history in ((32, 16),) if rig.rehearsal else PREFILL_SHAPES:
        problem = Problem(rig, [queries + history], [queries], block_size=16)
        seconds = rig.seconds(problem.caller(backend))
        keys = queries * history + queries * (queries + 1) // 2
        rate = 4 * keys * HEADS * HEAD_DIM / seconds
        yardstick = None
        if history == 0:
            q = problem.query.transpose(0, 1)[None]
            k = torch.randn(1, KV_HEADS, queries, HEAD_DIM, device=rig.device).to(rig.dtype)
            sdpa = partial(functional.scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=True)
            yardstick = rig.seconds(sdpa) * 1e6
        yield {
            "prefill attention": f"{queries} queries after {history} tokens", "us": seconds * 1e6,
            "TFLOP/s": rate / 1e12, "share_of_product": rate / flops, "SDPA, contiguous K/V, us": yardstick,
        }  # fmt: skip
