"""Decode attention: one query per sequence over its paged K and V, the article's sections 13 and 14 on the GPU.

A sequence is cut every `SPLIT` positions, always and at the same places, so that long sequences use the whole GPU and
nothing depends on who else is in the batch. A program owns one (kv head, sequence) and a share of its splits: all query
heads of the group are rows of one small matrix, so each element of K and V is read once. It leaves each split's
attention and log-sum-exp; a second kernel joins them from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.triton.kernels.cache_write import cache_strides
from minipaged.ops.triton.kernels.launch import BATCH_TENSORS, Launch, block_of, compute_type
from minipaged.ops.triton.kernels.softmax import attend_tile
from minipaged.ops.triton.kernels.tuning import LOG2_E, Tile, decode_tile

SPLIT = 512  # positions; changing it changes the last bits of results
JOIN = 16  # splits that are joined at a time: their loads overlap
DOT_ROWS = 16  # smallest number of rows that the matrix units take
PROGRAMS = 4096  # more do not fill a GPU better; a captured graph, whose grid is fixed, would pay for idle ones


@triton.jit(do_not_specialize=["table_row", "max_splits"], do_not_specialize_on_alignment=BATCH_TENSORS)
def decode_attention_kernel(
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, partial, partial_lse,
    query_token, query_head, table_row,
    key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
    scale_log2, num_heads, max_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, B, lanes): program (h, b, i) computes splits i, i + lanes, ... of sequence b for the heads of h."""
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_loc + row).to(tl.int64)
    has_query = tl.load(query_start_loc + row + 1) > token
    seq_len = tl.where(has_query, tl.load(seq_lens + row), 0)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + r
    real = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    table = block_tables + row * table_row

    for split in range(tl.program_id(2), tl.cdiv(seq_len, SPLIT), tl.num_programs(2)):
        q_at = query + token * query_token + head[:, None] * query_head + d[None, :]
        q = tl.load(q_at, mask=real, other=0.0).to(COMPUTE)
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        first = split * SPLIT
        for start in range(first, tl.minimum(first + SPLIT, seq_len), TILE):
            position = start + tl.arange(0, TILE)
            in_head = position < seq_len
            m, total, acc = attend_tile(
                q, m, total, acc,
                key_cache, value_cache, table, kv_head, position, in_head[None, :], in_head,
                key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
                scale_log2, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, True,
            )  # fmt: skip
        place = (row * num_heads + head) * max_splits + split
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=real)
        tl.store(partial_lse + place, m + tl.log2(total), mask=r < GROUP)


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=BATCH_TENSORS[1:])
def join_splits_kernel(
    partial, partial_lse, seq_lens, query_start_loc, out, out_token, out_head, num_heads, max_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Grid (B, Hq): the splits of one head of one sequence, `JOIN` at a time from the left; zeros if there are none."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_loc + row).to(tl.int64)
    if tl.load(query_start_loc + row + 1) > token:
        num_splits = tl.cdiv(tl.load(seq_lens + row), SPLIT)
        d = tl.arange(0, BLOCK_D)
        base = (row * num_heads + head) * max_splits
        m = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, num_splits, JOIN):
            split = first + tl.arange(0, JOIN)
            there = split < num_splits
            lse = tl.load(partial_lse + base + split, mask=there, other=-float("inf"))
            o_at = partial + (base + split)[:, None] * HEAD_DIM + d[None, :]
            o = tl.load(o_at, mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(lse, 0))
            weight = tl.exp2(lse - m_new)
            rescale = tl.exp2(m - m_new)
            total = total * rescale + tl.sum(weight, 0)
            acc = acc * rescale + tl.sum(o * weight[:, None], 0)
            m = m_new
        result = acc / tl.where(total > 0, total, 1.0)  # nothing seen: zeros
        tl.store(out + token * out_token + head * out_head + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with at most one query each. max_splits: splits of the longest one, or any number above."""

    block_tables: Tensor  # int32 [B, M]
    seq_lens: Tensor  # int32 [B]
    query_start_loc: Tensor  # int32 [B + 1]
    max_splits: int


def splits_of(max_seq_len: int) -> int:
    """How many splits a sequence of this length has."""
    return -(-max_seq_len // SPLIT)


def decode_launches(
    query: Tensor,
    cache: PagedKVCache,
    rows: DecodeRows,
    scale: float,
    out: Tensor,
    partial: Tensor,
    lse: Tensor,
    tile: Tile | None = None,
) -> tuple[Launch, Launch]:
    """query, out [T, Hq, D]; partial float32 [B, Hq, max_splits, D] and lse [B, Hq, max_splits] are scratch. tile: not
    the tuned one, for measuring.
    """
    num_heads, head_dim = query.shape[1:]
    num_rows, group = rows.seq_lens.shape[0], num_heads // cache.num_kv_heads
    # Programs take splits in turns: how many programs there are changes nothing in the result.
    products = torch.promote_types(query.dtype, cache.dtype)
    tile = tile or decode_tile(head_dim, products, cache.block_size, group)
    both = {
        "seq_lens": rows.seq_lens, "query_start_loc": rows.query_start_loc,
        "partial": partial, "partial_lse": lse, "num_heads": num_heads, "max_splits": rows.max_splits,
    }  # fmt: skip
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": block_of(head_dim, 16), "SPLIT": SPLIT}
    attend = Launch(
        decode_attention_kernel,
        (cache.num_kv_heads, num_rows, min(rows.max_splits, max(1, PROGRAMS // (num_rows * cache.num_kv_heads)))),
        {
            **both, "query": query, "key_cache": cache.key_cache, "value_cache": cache.value_cache,
            "block_tables": rows.block_tables, "table_row": rows.block_tables.stride(0),
            "query_token": query.stride(0), "query_head": query.stride(1),
            "scale_log2": scale * LOG2_E, **cache_strides(cache),
        },
        {
            **shape, "GROUP": group, "ROWS": block_of(group, DOT_ROWS), "BLOCK_SIZE": cache.block_size,
            "TILE": tile.keys, "COMPUTE": compute_type(query.dtype, cache.dtype),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    join = Launch(
        join_splits_kernel,
        (num_rows, num_heads),
        {**both, "out": out, "out_token": out.stride(0), "out_head": out.stride(1)},
        {**shape, "JOIN": JOIN},
        num_warps=2,
    )
    return attend, join
