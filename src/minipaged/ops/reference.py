"""The article, executable: sections 12 to 14 as plain loops in float64. The measure for every other back end.

Read `attend_row` beside section 13: for each position of the history it finds the logical block, the physical
block and the offset, reads K and V there, and folds them into an online softmax.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from minipaged.kv.address import block_offset, kv_head_of, logical_block
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import (
    AttentionBatch,
    AttentionMetadata,
    Backend,
    PackedLinear,
    QKNormRoPE,
    RMSNorm,
    RotaryTable,
    dtype_name,
)

F64 = torch.float64


def attend_row(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: list[int], seq_len: int, scale: float
) -> Tensor:
    """The last q tokens of one sequence, query [q, Hq, D], over its seq_len tokens in the cache; float64 [q, Hq, D].

    The i-th of these queries is token seq_len - q + i and sees every position up to its own. The softmax is never
    written down: m (largest score so far), l (sum of exp(score - m)) and acc (sum of exp(score - m) * V) are updated
    position by position, rescaled whenever m grows.
    """
    num_queries, num_q_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    kv_heads = [kv_head_of(head, num_q_heads, num_kv_heads) for head in range(num_q_heads)]
    q = query.to(F64) * scale
    m = torch.full((num_queries, num_q_heads), -torch.inf, dtype=F64, device=query.device)
    l = torch.zeros_like(m)  # noqa: E741
    acc = torch.zeros(num_queries, num_q_heads, head_dim, dtype=F64, device=query.device)

    first_query = seq_len - num_queries  # position of the first query
    for pos in range(seq_len):
        pb = block_table[logical_block(pos, block_size)]
        off = block_offset(pos, block_size)
        k = key_cache[pb, kv_heads, off].to(F64)  # [Hq, D]: query head h reads kv head h // group
        v = value_cache[pb, kv_heads, off].to(F64)

        sees = slice(max(0, pos - first_query), None)  # causal: queries before `pos` do not see it
        score = (q[sees] * k).sum(-1)
        m_new = torch.maximum(m[sees], score)
        rescale = torch.exp(m[sees] - m_new)
        p = torch.exp(score - m_new)
        l[sees] = l[sees] * rescale + p
        acc[sees] = acc[sees] * rescale[..., None] + p[..., None] * v
        m[sees] = m_new
    return torch.where(l[..., None] > 0, acc / l[..., None], 0.0)  # nothing seen: zeros, by definition


def attend_batch(query: Tensor, cache: PagedKVCache, batch: AttentionBatch, scale: float | None) -> Tensor:
    """Every row of the batch on its own; query [T, Hq, D] -> float64 [T, Hq, D]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(query.shape, dtype=F64, device=query.device)
    bounds = batch.query_start_loc.tolist()
    for row, (seq_len, table) in enumerate(zip(batch.seq_lens.tolist(), batch.block_tables.tolist(), strict=True)):
        tokens = slice(bounds[row], bounds[row + 1])
        if seq_len > 0:
            out[tokens] = attend_row(query[tokens], cache.key_cache, cache.value_cache, table, seq_len, scale)
    return out


class ReferenceBackend(Backend):
    """Everything in float64, whatever the inputs; only the result is rounded, to the dtype of `out` or of the input."""

    name = "reference"
    copies_weights = True

    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        use: Literal["linear", "embed", "both"] = "linear",
    ) -> PackedLinear:
        data = (
            weight.detach().to(F64, copy=True),
            None if bias is None else bias.detach().to(F64, copy=True),
            weight.dtype,
        )
        return PackedLinear(weight.shape[1], weight.shape[0], gated, dtype_name(weight.dtype), data)

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
        weight, bias, _ = w.data
        y = functional.linear(_rms_norm(x, norm), weight, bias)
        if act == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            y = gate * torch.sigmoid(gate) * up
        if residual is not None:
            y = y + residual
        return _result(y, x, out)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        table, _, dtype = w.data
        rows: Tensor = table[token_ids].to(dtype)
        return rows if out is None else out.copy_(rows)

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        return _result(_rms_norm(x, norm), x, out)

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
        q = _rotate(_rms_norm(q, rotary.q_norm), rotary.rope, positions)
        k = _rotate(_rms_norm(k, rotary.k_norm), rotary.rope, positions)
        self.write_kv(k, v, cache, slot_mapping)
        return _result(q, qkv, out)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch)

    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionMetadata,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return _result(attend_batch(query, cache, plan.batch, scale), query, out)


def _rms_norm(x: Tensor, norm: RMSNorm | None) -> Tensor:
    x = x.to(F64)
    return x if norm is None else x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.to(F64)


def _rotate(x: Tensor, rope: RotaryTable, positions: Tensor) -> Tensor:
    """x [T, H, D]: each pair (x[i], x[i + D/2]) is turned by its position's angle (RoFormer, arXiv:2104.09864)."""
    cos, sin = rope.cos[positions].to(F64)[:, None], rope.sin[positions].to(F64)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _result(y: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return y.to(x.dtype) if out is None else out.copy_(y)
