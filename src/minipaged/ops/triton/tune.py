"""Which tile sizes are fastest on this GPU: every candidate is checked, timed, and the best one put into a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.triton.kernels import decode_attention, varlen_attention
from minipaged.ops.triton.kernels.tuning import Tile, arch_of, candidates, decode_tile, tile_key, varlen_tile

Timer = Callable[[Callable[[], Any]], float]
"""Seconds of a call on the device."""
WORKLOADS = {"decode": ((16, 1, 1024), (64, 1, 4096)), "varlen": ((1, 4096, 4096), (4, 512, 4096))}
"""(sequences, queries of each, length of each); a candidate's time is the sum over them."""
TOLERANCE = 0.02  # of a candidate against the default, relative to the largest result: rounding, not errors


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate: seconds, or why it is out."""

    key: str
    tile: Tile
    seconds: float | None
    problem: str | None = None


def tune(
    shapes: Sequence[tuple[int, int, int]],
    block_sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    workloads: Mapping[str, Sequence[tuple[int, int, int]]] = WORKLOADS,
) -> Iterator[Measured]:
    """Measure both attention kernels for shapes (Hq, Hkv, D) and block sizes; the default tile comes first of each."""
    for num_heads, num_kv_heads, head_dim in dict.fromkeys(shapes):
        for block_size in block_sizes:
            group, arch = num_heads // num_kv_heads, arch_of(device)
            shape = (head_dim, dtype, block_size, group)
            for kind, default in (("decode", decode_tile(*shape)), ("varlen", varlen_tile(*shape, arch))):
                key = tile_key(kind, head_dim, dtype, block_size, group)
                problems = [
                    _Problem(kind, work, num_heads, num_kv_heads, head_dim, block_size, dtype, device)
                    for work in workloads[kind]
                ]
                expected = [problem.run(default).clone() for problem in problems]
                for tile in dict.fromkeys([default, *candidates(kind, head_dim, dtype, arch)]):
                    yield _measure(key, tile, problems, expected, timer)


def best(measured: Sequence[Measured]) -> dict[str, Tile]:
    """The fastest tile of each key."""
    fastest: dict[str, Measured] = {}
    for one in measured:
        old = fastest.get(one.key)
        if one.seconds is not None and (old is None or old.seconds is None or one.seconds < old.seconds):
            fastest[one.key] = one
    return {key: one.tile for key, one in fastest.items()}


def gpu_timer(call: Callable[[], Any]) -> float:
    """Median seconds, by Triton's own benchmark helper (the L2 cache is cleared between calls)."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=40, return_mode="median")) / 1e3


def _measure(key: str, tile: Tile, problems: Sequence[_Problem], expected: Sequence[Tensor], timer: Timer) -> Measured:
    try:
        for problem, wanted in zip(problems, expected, strict=True):
            error = float((problem.run(tile).float() - wanted.float()).abs().max() / wanted.float().abs().max())
            if not error <= TOLERANCE:
                return Measured(key, tile, None, f"wrong: error {error:.2g}")
        return Measured(key, tile, sum(timer(lambda p=problem: p.run(tile)) for problem in problems))  # type: ignore[misc]
    except Exception as error:  # too much shared memory, a compiler's failure: the others go on
        return Measured(key, tile, None, f"{type(error).__name__}: {error}".splitlines()[0])


class _Problem:
    """One workload with random K and V in shuffled blocks."""

    def __init__(
        self, kind: str, work: tuple[int, int, int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        count, queries, length = work
        blocks = -(-length // block_size)
        shape = (count * blocks, num_kv_heads, block_size, head_dim)
        generator = torch.Generator(device).manual_seed(0)
        k, v = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
        self._cache = PagedKVCache.from_tensors(k, v)
        self._query = torch.randn(count * queries, num_heads, head_dim, device=device, generator=generator).to(dtype)
        self._out = torch.empty_like(self._query)
        order = torch.randperm(count * blocks, device=device, generator=generator).int().view(count, blocks)
        lens = torch.full((count,), length, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * queries
        self._decode = self._varlen = None
        if kind == "decode":
            splits = decode_attention.splits_of(length)
            self._decode = decode_attention.DecodeRows(order, lens, starts, splits)
            self._partial = torch.empty(count, num_heads, splits, head_dim, device=device)
            self._lse = torch.empty(count, num_heads, splits, device=device)
        else:
            self._varlen = varlen_attention.VarlenRows(order, lens, starts, tokens_before=0)

    def run(self, tile: Tile) -> Tensor:
        scale = self._query.shape[-1] ** -0.5
        if self._decode is not None:
            for launch in decode_attention.decode_launches(
                self._query, self._cache, self._decode, scale, self._out, self._partial, self._lse, tile
            ):
                launch.run()
        elif self._varlen is not None:
            varlen_attention.varlen_launch(self._query, self._cache, self._varlen, scale, self._out, tile).run()
        return self._out
