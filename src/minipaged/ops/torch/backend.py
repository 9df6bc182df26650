"""Vectorised back end in plain torch operators: serves where the native one cannot, on any device."""

from __future__ import annotations

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
from minipaged.ops.torch.attention import PagedAttention, StepRows
from minipaged.ops.torch.linear import TorchWeight


class TorchBackend(Backend):
    """float32, bfloat16, float16, float64. Results depend on the batch in the last bits (1e-4 in float32), not more.

    Owns its scratch memory: one object per thread.
    """

    name = "torch"
    copies_weights = True

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._attention = PagedAttention(self._scratch)

    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        use: Literal["linear", "embed", "both"] = "linear",
    ) -> PackedLinear:
        out_features, in_features = weight.shape
        data = TorchWeight.load(weight, bias, use=use)
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
        weight: TorchWeight = w.data
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: input is {x.dtype}, the weight {weight.dtype}; convert one of them")
        if x.shape[0] == 0:
            return x.new_empty(0, w.out_features // (2 if act else 1)) if out is None else out
        if norm is not None:
            x = self.rms_norm(x, norm, out=self._scratch.get("norm", tuple(x.shape), x.dtype, x.device))
        if act is None:
            y = weight.apply(x, residual if residual is None else residual.to(x.dtype))
            return y if out is None else out.copy_(y)
        gate, up = weight.apply(x, None).chunk(2, dim=-1)
        y = functional.silu(gate, inplace=True)
        if residual is not None:
            y = y.mul_(up).add_(residual)
            return y.contiguous() if out is None else out.copy_(y)
        if out is None or out.dtype != y.dtype:
            y = y * up
            return y if out is None else out.copy_(y)
        return torch.mul(y, up, out=out)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        table = w.data.row_major()
        if out is None or out.dtype != table.dtype:
            rows = table.index_select(0, token_ids)
            return rows if out is None else out.copy_(rows)
        return torch.index_select(table, 0, token_ids, out=out)

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        # Without a weight, functional.rms_norm computes in float32 and rounds to x's dtype: Hugging Face's order.
        y = functional.rms_norm(x, x.shape[-1:], None, norm.eps)
        if out is None or out.dtype != torch.promote_types(y.dtype, norm.weight.dtype):
            y = (y * norm.weight).to(x.dtype if out is None else out.dtype)
            return y if out is None else out.copy_(y)
        return torch.mul(y, norm.weight, out=out)

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
        q, k, v = rotary.split(qkv)
        if rotary.q_norm is not None and rotary.k_norm is not None:
            q, k = self.rms_norm(q, rotary.q_norm), self.rms_norm(k, rotary.k_norm)
        cos = rotary.rope.cos.index_select(0, positions).unsqueeze(1)
        sin = rotary.rope.sin.index_select(0, positions).unsqueeze(1)
        key = self._rotated("key", k, cos, sin)
        self.write_kv(key, v, cache, slot_mapping)
        query = self._rotated("query", q, cos, sin)
        return query.to(qkv.dtype, copy=True) if out is None else out.copy_(query)

    def _rotated(self, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H, D] with its (x[i], x[i + D/2]) pairs turned, in float32 scratch: valid until the next call."""
        dtype = torch.promote_types(x.dtype, cos.dtype)
        rotated = self._scratch.get(name, tuple(x.shape), dtype, x.device)
        first, second = x.to(dtype).chunk(2, dim=-1)
        out_first, out_second = rotated.chunk(2, dim=-1)
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        return rotated

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch, StepRows.of(batch))

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
        self._attention.run(query, cache, plan.data, query.shape[-1] ** -0.5 if scale is None else scale, out)
        return out
