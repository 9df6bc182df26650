"""What lies between the matrix products: RMSNorm, SiLU-mul, and QK-norm + RoPE + cache write in one pass.

Sums are float32; rounding follows Hugging Face's order (normalise, round, times weight, round).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import QKNormRoPE, RMSNorm
from minipaged.ops.triton.kernels.cache_write import cache_strides
from minipaged.ops.triton.kernels.launch import Launch, block_of

HEADS = 8  # per program of the QK kernel
SILU_TILE = 1024


@triton.jit
def rms_norm_kernel(x, weight, out, x_row, out_row, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row; the whole row in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * inverse).to(value.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, gate_row, out_row, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid (rows, tiles of columns): out = silu(gate) * up; a row is SIZE gates, then SIZE ups."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    at = gate_up + row * gate_row + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * out_row + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["positions", "slots"])
def qk_norm_rope_write_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slots, num_slots, query, key_cache, value_cache,
    qkv_token, query_token, query_head, cos_row,
    key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
    q_eps, k_eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Grid (T, heads / HEADS). A token's heads are q, then k, then v: q and k are normalised and rotated, v passes.

    Pairs (x[i], x[i + D/2]) turn together, so a head is held as its two halves.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, BLOCK_HALF)[None, :]
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    in_half = i < half
    inside = (is_q | is_k | is_v) & in_half
    at = qkv + token * qkv_token + head * HEAD_DIM + i
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0)

    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1))[:, None] / HEAD_DIM
        inverse = 1.0 / tl.sqrt(mean + tl.where(is_q, q_eps, k_eps))
        q_first = tl.load(q_weight + i, mask=in_half, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight + half + i, mask=in_half, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight + i, mask=in_half, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight + half + i, mask=in_half, other=0.0).to(tl.float32)
        a = (a * inverse).to(first.dtype).to(tl.float32) * tl.where(is_q, q_first, k_first)
        b = (b * inverse).to(first.dtype).to(tl.float32) * tl.where(is_q, q_second, k_second)
        a, b = a.to(first.dtype).to(tl.float32), b.to(first.dtype).to(tl.float32)

    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * cos_row + i, mask=in_half, other=0.0)
    s = tl.load(sin + position * cos_row + i, mask=in_half, other=0.0)
    turned_first, turned_second = a * c - b * s, b * c + a * s

    q_at = query + token * query_token + head * query_head + i
    tl.store(q_at, turned_first.to(query.dtype.element_ty), mask=is_q & in_half)
    tl.store(q_at + half, turned_second.to(query.dtype.element_ty), mask=is_q & in_half)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_at = key_cache + block * key_block + (head - NUM_HEADS) * key_kv_head + offset * key_slot + i
        tl.store(k_at, turned_first.to(key_cache.dtype.element_ty), mask=is_k & in_half)
        tl.store(k_at + half, turned_second.to(key_cache.dtype.element_ty), mask=is_k & in_half)
        v_head = head - NUM_HEADS - NUM_KV_HEADS
        v_at = value_cache + block * value_block + v_head * value_kv_head + offset * value_slot + i
        tl.store(v_at, first.to(value_cache.dtype.element_ty), mask=is_v & in_half)
        tl.store(v_at + half, second.to(value_cache.dtype.element_ty), mask=is_v & in_half)


def rms_norm_launch(x: Tensor, norm: RMSNorm, out: Tensor) -> Launch:
    """x, out [T, n], rows dense."""
    size = x.shape[1]
    return Launch(
        rms_norm_kernel,
        (x.shape[0],),
        {"x": x, "weight": norm.weight, "out": out, "x_row": x.stride(0), "out_row": out.stride(0), "eps": norm.eps},
        {"SIZE": size, "BLOCK": block_of(size)},
        num_warps=max(1, min(16, block_of(size) // 256)),
    )


def silu_mul_launch(gate_up: Tensor, out: Tensor) -> Launch:
    """gate_up [T, 2 I], out [T, I], rows dense."""
    size = gate_up.shape[1] // 2
    return Launch(
        silu_mul_kernel,
        (gate_up.shape[0], -(-size // SILU_TILE)),
        {"gate_up": gate_up, "out": out, "gate_row": gate_up.stride(0), "out_row": out.stride(0)},
        {"SIZE": size, "TILE": SILU_TILE},
    )


def qk_norm_rope_write_launch(
    qkv: Tensor, rotary: QKNormRoPE, cache: PagedKVCache, positions: Tensor, slots: Tensor, query: Tensor
) -> Launch:
    """qkv [T, (Hq + 2 Hkv) D] with dense rows -> query [T, Hq, D] and the cache; slots outside the pool are skipped."""
    all_heads = rotary.num_heads + 2 * rotary.num_kv_heads
    rope, q_norm, k_norm = rotary.rope, rotary.q_norm, rotary.k_norm
    # Without norms, the addresses of their weights are not looked at.
    q_weight, q_eps = (q_norm.weight, q_norm.eps) if q_norm is not None else (rope.cos, 0.0)
    k_weight, k_eps = (k_norm.weight, k_norm.eps) if k_norm is not None else (rope.cos, 0.0)
    return Launch(
        qk_norm_rope_write_kernel,
        (qkv.shape[0], -(-all_heads // HEADS)),
        {
            "qkv": qkv, "q_weight": q_weight, "k_weight": k_weight, "cos": rope.cos, "sin": rope.sin,
            "positions": positions, "slots": slots, "num_slots": cache.num_slots, "query": query,
            "key_cache": cache.key_cache, "value_cache": cache.value_cache,
            "qkv_token": qkv.stride(0), "query_token": query.stride(0), "query_head": query.stride(1),
            "cos_row": rope.cos.stride(0), "q_eps": q_eps, "k_eps": k_eps, **cache_strides(cache),
        },
        {
            "NUM_HEADS": rotary.num_heads, "NUM_KV_HEADS": rotary.num_kv_heads, "HEAD_DIM": rotary.head_dim,
            "BLOCK_HALF": block_of(rotary.head_dim // 2), "BLOCK_SIZE": cache.block_size, "HEADS": HEADS,
            "NORMED": q_norm is not None,
        },
        num_warps=2,
    )  # fmt: skip
