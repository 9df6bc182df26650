"""One step of the online softmax over a tile of keys, shared by decode and prefill."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    q, m, total, acc,
    key_cache, value_cache, table, kv_head, position, visible, in_head,
    key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
    scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys at `position` [TILE] into (m, total, acc) of the query rows q [R, D].

    m [R] is the largest score so far in log2 units, total [R] the sum of 2^(score - m), acc [R, D] that of
    2^(score - m) * V (Milakov and Gimelshein, arXiv:1805.02867). `table` points at the row's block table; neighbouring
    positions of small blocks are gathered into one tile. MASKED: only `visible` [R, TILE] counts, and keys at
    positions that `in_head` leaves out are not read; V is zero there, since 0 * NaN would be NaN.
    """
    d = tl.arange(0, BLOCK_D)
    if MASKED:
        block = tl.load(table + position // BLOCK_SIZE, mask=in_head, other=0).to(tl.int64)
        readable = in_head[:, None] & (d < HEAD_DIM)[None, :]
    else:
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        readable = (position >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    offset = (position % BLOCK_SIZE).to(tl.int64)
    k_row = block * key_block + kv_head * key_kv_head + offset * key_slot
    v_row = block * value_block + kv_head * value_kv_head + offset * value_slot
    k_at = key_cache + k_row[:, None] + d[None, :]
    v_at = value_cache + v_row[:, None] + d[None, :]
    if MASKED or HEAD_DIM != BLOCK_D:  # noqa: SIM108
        k = tl.load(k_at, mask=readable, other=0.0)
    else:
        k = tl.load(k_at)
    score = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee") * scale_log2
    if MASKED:
        score = tl.where(visible, score, -float("inf"))
    m_new = tl.maximum(m, tl.max(score, 1))
    # A row that has seen nothing has m = -inf, and -inf - -inf would be NaN: any finite number serves in its place.
    reference = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(score - reference[:, None])
    rescale = tl.exp2(m - reference)
    if MASKED or HEAD_DIM != BLOCK_D:  # noqa: SIM108
        v = tl.load(v_at, mask=readable, other=0.0)
    else:
        v = tl.load(v_at)
    total = total * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(COMPUTE), v.to(COMPUTE), acc * rescale[:, None], input_precision="ieee")
    return m_new, total, acc
