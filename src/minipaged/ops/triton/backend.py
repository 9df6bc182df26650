"""The GPU back end: Triton kernels for everything between the matrix products, which are cuBLAS' through torch.

Under `TRITON_INTERPRET=1` (set before this is imported) the same kernels run on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import (
    AttentionBatch,
    AttentionMetadata,
    Backend,
    PackedLinear,
    QKNormRoPE,
    RMSNorm,
    Scratch,
    dtype_name,
)
from minipaged.ops.triton.kernels import cache_write, decode_attention, dense, varlen_attention
from minipaged.ops.triton.kernels.decode_attention import DecodeRows, splits_of
from minipaged.ops.triton.kernels.launch import INTERPRETED, TYPES, rows_contiguous
from minipaged.ops.triton.kernels.varlen_attention import VarlenRows


def unavailable_reason(device: torch.device | str) -> str | None:
    """Why this back end cannot run on `device`, or None."""
    kind = torch.device(device).type
    if kind == "cpu":
        return None if INTERPRETED else "it takes CPU tensors only if TRITON_INTERPRET=1 was set before it was imported"
    if kind != "cuda":
        return f"it runs on CUDA devices, not on {kind}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if INTERPRETED:
        return "its kernels were built for the interpreter: unset TRITON_INTERPRET"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0 or higher, this GPU has {major}.{minor}"


@dataclass(frozen=True, slots=True)
class _StepRows:
    """The rows of a step by kernel; either part may be missing."""

    decode: DecodeRows | None
    varlen: VarlenRows | None


class TritonBackend(Backend):
    """float32, bfloat16, float16. Attention and the fused operations give a row the same bits whatever its batch
    mates; the matrix products are cuBLAS', which chooses its kernels by the number of rows, so `batch_invariant` is
    False.

    Owns its scratch memory: one object per thread.
    """

    name = "triton"
    capturable = True

    def __init__(self) -> None:
        self._scratch = Scratch(keep_replaced=True)

    # ---- matrix products

    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        use: Literal["linear", "embed", "both"] = "linear",
    ) -> PackedLinear:
        out_features, in_features = weight.shape
        data = weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        return PackedLinear(in_features, out_features, gated, dtype_name(weight.dtype), data)

    def linear(
        self,
        x: Tensor,
        w: PackedLinear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        act: Literal["silu_mul"] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        weight, bias = w.data
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: input is {x.dtype}, the weight {weight.dtype}; convert one of them")
        if norm is not None:
            x = self.rms_norm(x, norm, out=self._scratch.get("norm", tuple(x.shape), x.dtype, x.device))
        if act is None:
            return _product(x, weight, bias, residual, out)
        gate_up = self._scratch.get("gate_up", (x.shape[0], w.out_features), x.dtype, x.device)
        _product(x, weight, bias, None, gate_up)
        y = x.new_empty(x.shape[0], w.out_features // 2) if out is None else out
        dense.silu_mul_launch(gate_up, y).run()
        return y if residual is None else y.add_(residual)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        table: Tensor = w.data[0]
        if out is None or out.dtype != table.dtype:
            rows = table.index_select(0, token_ids)
            return rows if out is None else out.copy_(rows)
        return torch.index_select(table, 0, token_ids, out=out)

    # ---- between them

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        rows = rows_contiguous(x.reshape(-1, x.shape[-1]))
        in_place = out is not None and out.dim() == 2 and out.stride(-1) == 1
        y = out if in_place and out is not None else torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        dense.rms_norm_launch(rows, norm, y).run()
        if in_place:
            return y
        return y.view(x.shape) if out is None else out.copy_(y.view(x.shape))

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        rotary: QKNormRoPE,
        cache: PagedKVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        query = qkv.new_empty(qkv.shape[0], rotary.num_heads, rotary.head_dim) if out is None else out
        qkv = rows_contiguous(qkv)
        dense.qk_norm_rope_write_launch(qkv, rotary, cache, positions, slot_mapping, query).run()
        return query

    # ---- the cache

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """As promised by `Backend`, IndexError included, which takes a look at the slots: the engine, which has
        checked them on the host, writes through `qk_norm_rope_write`."""
        cache.check_write(key, value, slot_mapping)
        cache_write.write_launch(key, value, cache, slot_mapping).run()

    def copy_blocks(self, caches: Sequence[PagedKVCache], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        if not all(cache_write.copies_directly(cache, pairs) for cache in caches):
            super().copy_blocks(caches, pairs)
            return
        for cache in caches:
            cache.check_copies(pairs)
        sources, destinations = cache_write.pair_tensors(pairs, caches[0].device)
        for cache in caches:
            cache_write.copy_launch(cache, sources, destinations).run()

    # ---- attention

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """No look at the device: which kernel serves which rows follows from numbers that the host knows."""
        num_rows = batch.seq_lens.shape[0]
        single = num_rows if batch.max_query_len <= 1 else batch.num_decode_rows
        decode = varlen = None
        if single:
            decode = DecodeRows(
                batch.block_tables[:single],
                batch.seq_lens[:single],
                batch.query_start_loc[: single + 1],
                max(1, splits_of(batch.max_seq_len)),
            )
        if single < num_rows:
            varlen = VarlenRows(
                batch.block_tables[single:], batch.seq_lens[single:], batch.query_start_loc[single:], single
            )
        return AttentionMetadata(batch, _StepRows(decode, varlen))

    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionMetadata,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        dense_query = rows_contiguous(query)
        result = out if out.stride(-1) == 1 and out.dtype in TYPES else torch.empty_like(dense_query)
        rows: _StepRows = plan.data
        if rows.decode is not None:
            shape = (rows.decode.seq_lens.shape[0], query.shape[1], rows.decode.max_splits)
            partial = self._scratch.get("partial", (*shape, query.shape[2]), torch.float32, query.device)
            lse = self._scratch.get("lse", shape, torch.float32, query.device)
            for launch in decode_attention.decode_launches(
                dense_query, cache, rows.decode, scale, result, partial, lse
            ):
                launch.run()
        if rows.varlen is not None and query.shape[0]:
            varlen_attention.varlen_launch(dense_query, cache, rows.varlen, scale, result).run()
        return out if result is out else out.copy_(result)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Tensor:
    """x @ weight.T + bias + residual; float32 sums where out is float32, else rounded to x's dtype."""
    same_type = out is None or out.dtype == x.dtype
    if residual is not None and bias is None and residual.dtype == x.dtype and same_type:
        # One product with the residual as its starting value; `out` may be the residual itself.
        return torch.addmm(residual, x, weight.t(), out=out)
    if out is not None and out.dtype == torch.float32 != x.dtype and bias is None and residual is None:
        if wide_results_work(x.dtype, x.device.type):
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return out.copy_(functional.linear(x, weight))
    if out is not None and same_type and residual is None:  # straight into its place
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    y = functional.linear(x, weight, bias)
    if residual is not None:
        y.add_(residual)
    return y if out is None else out.copy_(y)


@functools.cache
def wide_results_work(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch multiplies 16-bit matrices into a float32 one, and does it right; tried once."""
    if device_type != "cuda":
        return False
    weight = torch.arange(-32.0, 32.0, device=device_type).view(4, 16).to(dtype)
    for x in (weight[:1], weight):  # one row may take another way
        try:
            out = torch.empty(len(x), 4, device=device_type)
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        except (RuntimeError, TypeError):
            return False
        if not torch.equal(out, x.float() @ weight.float().t()):
            return False
    return True
