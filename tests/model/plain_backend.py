"""The shortest `Backend` that can be right: plain torch, one sequence at a time. Judges the model apart from any real
back end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minipaged.ops.backend import AttentionBatch, AttentionPlan, Backend, PackedLinear, RMSNorm, RotaryTable


def _fill(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


class PlainBackend(Backend):
    name = "plain"

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, use: str = "linear"
    ) -> PackedLinear:
        return PackedLinear(weight.shape[1], weight.shape[0], gated, (weight, bias))

    def linear(
        self,
        x: Tensor,
        w: PackedLinear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        act: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        y = functional.linear(x if norm is None else self.rms_norm(x, norm), *w.data)
        if act == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        return _fill(y if residual is None else y + residual, out)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return _fill(functional.embedding(token_ids, w.data[0]), out)

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        return _fill(norm.weight * wide.to(x.dtype), out)

    def qk_norm_rope_write(  # noqa: PLR0917
        self,
        qkv: Tensor,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        rope: RotaryTable,
        positions: Tensor,
        cache: Any,
        slot_mapping: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        Hkv, D = cache.key_cache.shape[1], cache.key_cache.shape[3]
        heads = qkv.unflatten(1, (-1, D))
        query, key, value = heads[:, : -2 * Hkv], heads[:, -2 * Hkv : -Hkv], heads[:, -Hkv:]
        cos, sin = rope.cos[positions, None], rope.sin[positions, None]

        def rotate(x: Tensor) -> Tensor:
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

        cache.write(rotate(self.rms_norm(key, k_norm)), value, slot_mapping)
        return _fill(rotate(self.rms_norm(query, q_norm)), out)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        return AttentionPlan(batch)

    def attention(
        self, query: Tensor, cache: Any, plan: AttentionPlan, *, scale: float | None = None, out: Tensor | None = None
    ) -> Tensor:
        batch = plan.batch
        out = torch.empty_like(query) if out is None else out
        starts = batch.query_start_loc.tolist()
        for row, length in enumerate(batch.seq_lens.tolist()):
            q = query[starts[row] : starts[row + 1]].transpose(0, 1)
            key, value = cache.gather(batch.block_tables[row], length)
            key, value = (x.transpose(0, 1).repeat_interleave(q.shape[0] // x.shape[1], 0) for x in (key, value))
            hidden = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
            y = functional.scaled_dot_product_attention(q, key, value, attn_mask=hidden, scale=scale)
            out[starts[row] : starts[row + 1]] = y.transpose(0, 1)
        return out
