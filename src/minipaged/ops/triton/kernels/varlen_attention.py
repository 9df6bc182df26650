"""Chunked prefill: the last tokens of each sequence attend to its whole paged history, causally.

Flash attention (Dao, arXiv:2307.08691) whose keys are found through a block table. A program owns `ROWS` rows of one kv
head: consecutive queries times the heads of the group, so that a tile of K and V serves all of them. Tiles of keys lie
at absolute positions, so a query's result does not depend on how its prompt was cut into chunks.
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
from minipaged.ops.triton.kernels.tuning import LOG2_E, Tile, arch_of, varlen_tile


@triton.jit
def row_of_tile(query_start_loc, first_token, num_rows, tile, QUERIES: tl.constexpr):
    """The sequence to which a tile belongs, by binary search: sequence b's tiles start at start_b // QUERIES + b.

    That leaves at least enough tiles for each sequence (some stay empty), and needs no table of tiles.
    """
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        starts_at = (tl.load(query_start_loc + middle) - first_token) // QUERIES + middle
        if starts_at <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["table_row", "num_rows"], do_not_specialize_on_alignment=BATCH_TENSORS)
def varlen_attention_kernel(
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, out, num_rows,
    query_token, query_head, out_token, out_head, table_row,
    key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
    scale_log2,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, Hkv). Late tiles, which see most keys, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    first_token = tl.load(query_start_loc)
    row = row_of_tile(query_start_loc, first_token, num_rows, tile, QUERIES)
    start = tl.load(query_start_loc + row)
    num_queries = tl.load(query_start_loc + row + 1) - start
    first = (tile - ((start - first_token) // QUERIES + row)) * QUERIES  # of this tile's queries within the sequence
    if first < num_queries:
        seq_len = tl.load(seq_lens + row)
        r = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        mine = first + r // GROUP
        head = kv_head * GROUP + r % GROUP
        real = ((r < QUERIES * GROUP) & (mine < num_queries))[:, None] & (d < HEAD_DIM)[None, :]
        token = (start + mine).to(tl.int64)
        q_at = query + token[:, None] * query_token + head[:, None] * query_head + d[None, :]
        q = tl.load(q_at, mask=real, other=0.0).to(COMPUTE)
        table = block_tables + row.to(tl.int64) * table_row

        history = seq_len - num_queries
        sees = history + mine + 1  # keys that each row sees
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        seen_by_all = tl.maximum(history + first + 1, 0) // TILE * TILE
        for begin in range(0, seen_by_all, TILE):
            position = begin + tl.arange(0, TILE)
            m, total, acc = attend_tile(
                q, m, total, acc,
                key_cache, value_cache, table, kv_head, position, True, True,
                key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
                scale_log2, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, False,
            )  # fmt: skip
        for begin in range(seen_by_all, tl.minimum(history + first + QUERIES, seq_len), TILE):
            position = begin + tl.arange(0, TILE)
            visible = position[None, :] < sees[:, None]
            m, total, acc = attend_tile(
                q, m, total, acc,
                key_cache, value_cache, table, kv_head, position, visible, position < seq_len,
                key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
                scale_log2, HEAD_DIM, BLOCK_D, BLOCK_SIZE, COMPUTE, True,
            )  # fmt: skip
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # nothing seen: zeros
        out_at = out + token[:, None] * out_token + head[:, None] * out_head + d[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class VarlenRows:
    """Sequences of any number of queries; query_start_loc counts tokens of the whole batch and may start above 0."""

    block_tables: Tensor  # int32 [B, M]
    seq_lens: Tensor  # int32 [B]
    query_start_loc: Tensor  # int32 [B + 1]
    tokens_before: int  # query_start_loc[0]


def varlen_launch(
    query: Tensor, cache: PagedKVCache, rows: VarlenRows, scale: float, out: Tensor, tile: Tile | None = None
) -> Launch:
    """query, out [T, Hq, D]: rows query_start_loc[0] : query_start_loc[B] of out are written. tile: not the tuned one,
    for measuring.
    """
    num_heads, head_dim = query.shape[1:]
    num_rows, group = rows.seq_lens.shape[0], num_heads // cache.num_kv_heads
    products = torch.promote_types(query.dtype, cache.dtype)
    tile = tile or varlen_tile(head_dim, products, cache.block_size, group, arch_of(query.device))
    matrix_rows = block_of(group, tile.rows)
    queries = matrix_rows // group
    return Launch(
        varlen_attention_kernel,
        ((query.shape[0] - rows.tokens_before) // queries + num_rows, cache.num_kv_heads),
        {
            "query": query, "key_cache": cache.key_cache, "value_cache": cache.value_cache,
            "block_tables": rows.block_tables, "seq_lens": rows.seq_lens, "query_start_loc": rows.query_start_loc,
            "out": out, "num_rows": num_rows, "table_row": rows.block_tables.stride(0),
            "query_token": query.stride(0), "query_head": query.stride(1),
            "out_token": out.stride(0), "out_head": out.stride(1),
            "scale_log2": scale * LOG2_E, **cache_strides(cache),
        },
        {
            "GROUP": group, "QUERIES": queries, "ROWS": matrix_rows, "HEAD_DIM": head_dim,
            "BLOCK_D": block_of(head_dim, 16), "BLOCK_SIZE": cache.block_size, "TILE": tile.keys,
            "COMPUTE": compute_type(query.dtype, cache.dtype),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
