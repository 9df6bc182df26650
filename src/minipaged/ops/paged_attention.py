"""Paged attention and cache writes for users and tests: arguments are checked, then a back end does the work.

Shapes: B sequences, T query tokens, Hq / Hkv query / key-value heads, D head_dim, N blocks of Bs slots, M table width.
Caches are [N, Hkv, Bs, D]. `backend` is a name ("reference", "cpu", "torch", "triton", "flashinfer"), a `Backend`
object, or None for the best one that can run on the query's device. An unknown name is a ValueError, one that cannot
run here a BackendUnavailableError. No function tracks gradients.
"""

from __future__ import annotations

import threading
from itertools import pairwise

import torch
from torch import Tensor

from minipaged.kv.address import num_logical_blocks
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch, Backend
from minipaged.ops.merge import merge_attention_states
from minipaged.ops.reference import attend_batch
from minipaged.ops.registry import get_backend

__all__ = [
    "merge_attention_states",
    "paged_attention_online",
    "paged_attention_reference",
    "paged_attention_varlen",
    "write_kv_cache",
]

_thread = threading.local()  # back ends own scratch memory: one of each per thread


@torch.no_grad()
def write_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: str | Backend | None = None,
) -> None:
    """Store one token per slot: key, value [T, Hkv, D] into key_cache, value_cache at slots int64 [T].

    Slot = block * Bs + offset (the article's section 12). -1 skips a token; a slot below -1 or >= N * Bs raises
    IndexError before anything is written. Wrong shapes raise ValueError.
    """
    cache = PagedKVCache.from_tensors(key_cache, value_cache)
    _backend(backend, key).write_kv(key, value, cache, slot_mapping)


@torch.no_grad()
def paged_attention_online(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    backend: str | Backend | None = None,
) -> Tensor:
    """Decode: one query per sequence over its seq_lens[b] cached tokens (the article's sections 13 and 14).

    query [B, Hq, D], block_tables int32 [B, M], seq_lens int32 [B] -> [B, Hq, D] in query's dtype (or that of `out`).
    scale None = 1 / sqrt(D). A sequence of length 0 gives zeros. Nothing beyond seq_lens is read: unused slots may hold
    NaN, table entries after the last needed one any number. Raises ValueError for shapes, dtypes or lengths that do not
    fit together and IndexError for a needed block outside the pool.
    """
    starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device) if query.dim() == 3 else None
    return _attention(query, key_cache, value_cache, block_tables, seq_lens, starts, scale, out, backend)


@torch.no_grad()
def paged_attention_varlen(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    backend: str | Backend | None = None,
) -> Tensor:
    """Mixed prefill and decode: row b owns queries query_start_loc[b] : query_start_loc[b + 1], its LAST tokens.

    query [T, Hq, D], query_start_loc int32 [B + 1] from 0 to T -> [T, Hq, D]; the queries' K/V is already in the cache.
    Causal, aligned lower right: the i-th of q queries sees keys 0 .. seq_len - q + i. More queries than seq_len is a
    ValueError, except that a row of length 0 gives zeros. Otherwise as `paged_attention_online`.
    """
    return _attention(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale, out, backend)


@torch.no_grad()
def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """The article's loop with its online softmax, token by token, in float64: what every back end is measured against.

    Decode without query_start_loc (query [B, Hq, D]), else as `paged_attention_varlen`. Returns float64, unrounded.
    """
    if query_start_loc is None and query.dim() == 3:
        query_start_loc = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    cache, batch = _checked(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    return attend_batch(query, cache, batch, scale)


def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float | None,
    out: Tensor | None,
    backend: str | Backend | None,
) -> Tensor:
    cache, batch = _checked(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    if out is not None and (out.shape != query.shape or not out.is_floating_point() or out.device != query.device):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, expected a floating-point tensor of query's shape "
            f"{tuple(query.shape)} on {query.device}"
        )
    kernels = _backend(backend, query)
    return kernels.attention(query, cache, kernels.plan(batch), scale=scale, out=out)


def _backend(backend: str | Backend | None, tensor: Tensor) -> Backend:
    if isinstance(backend, Backend):
        return backend
    made: dict[tuple[str | None, str], Backend] = _thread.__dict__.setdefault("backends", {})
    key = (backend, str(tensor.device))
    if key not in made:
        made[key] = get_backend(backend, tensor.device)
    return made[key]


def _checked(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
) -> tuple[PagedKVCache, AttentionBatch]:
    """The arguments as a cache and a batch, or an error that says which of them is wrong."""
    if query.dim() != 3 or not query.is_floating_point():
        raise ValueError(
            f"query must be floating point [tokens, Hq, D], got {query.dtype} with shape {tuple(query.shape)}"
        )
    cache = PagedKVCache.from_tensors(key_cache, value_cache)
    num_heads, head_dim = query.shape[1:]
    if head_dim != cache.head_dim:
        raise ValueError(f"query has head_dim {head_dim}, the cache {cache.head_dim}")
    if num_heads == 0 or num_heads % cache.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {cache.num_kv_heads} kv heads evenly: Hq must be a multiple of Hkv"
        )
    for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}")
    if cache.device != query.device:
        raise ValueError(f"the cache is on {cache.device}, query on {query.device}")
    if seq_lens.dim() != 1 or block_tables.dim() != 2 or block_tables.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            "block_tables must be [B, M] and seq_lens [B] for the same B, got "
            f"{tuple(block_tables.shape)} and {tuple(seq_lens.shape)}"
        )
    assert query_start_loc is not None
    lengths = _check_rows(query, seq_lens, query_start_loc)
    _check_tables(cache, block_tables, lengths)
    starts = query_start_loc.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    device = query.device
    # Attention needs neither positions nor slots: they belong to writing.
    no_tokens = torch.empty(0, dtype=torch.int64, device=device)
    batch = AttentionBatch(
        positions=no_tokens,
        slot_mapping=no_tokens,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max(counts, default=0),
        max_seq_len=max(lengths, default=0),
        num_decode_rows=next((row for row, count in enumerate(counts) if count != 1), len(counts)),
    )
    return cache, batch


def _check_rows(query: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> list[int]:
    num_rows, num_tokens = seq_lens.shape[0], query.shape[0]
    starts: list[int] = query_start_loc.tolist()
    if query_start_loc.dim() != 1 or len(starts) != num_rows + 1:
        raise ValueError(
            f"{num_rows} sequences need a query_start_loc of {num_rows + 1} entries (decode: one query per sequence), "
            f"got shape {tuple(query_start_loc.shape)} for {num_tokens} query tokens"
        )
    if starts[0] != 0 or starts[-1] != num_tokens:
        raise ValueError(
            f"query_start_loc must run from 0 to {num_tokens} tokens, it runs from {starts[0]} to {starts[-1]}"
        )
    for row, (start, stop) in enumerate(pairwise(starts)):
        if start > stop:
            raise ValueError(f"query_start_loc falls from {start} to {stop} at sequence {row}")
    lengths: list[int] = seq_lens.tolist()
    for row, length in enumerate(lengths):
        count = starts[row + 1] - starts[row]
        if length < 0:
            raise ValueError(f"seq_lens[{row}] is {length}, must be at least 0")
        if count > length > 0:
            raise ValueError(
                f"sequence {row} has {count} queries but seq_lens[{row}] is {length}: "
                "seq_lens counts all tokens, queries included"
            )
    return lengths


def _check_tables(cache: PagedKVCache, block_tables: Tensor, lengths: list[int]) -> None:
    """Needed entries only; anything may stand behind them."""
    width = block_tables.shape[1]
    needed = [num_logical_blocks(length, cache.block_size) for length in lengths]
    for row, blocks in enumerate(needed):
        if blocks > width:
            raise ValueError(
                f"seq_lens[{row}] = {lengths[row]} needs {blocks} blocks of {cache.block_size}, "
                f"block_tables has {width} columns"
            )
    columns = torch.arange(width, device=block_tables.device)
    used = columns < torch.tensor(needed, dtype=torch.int64, device=block_tables.device)[:, None]
    wrong = used & ((block_tables < 0) | (block_tables >= cache.num_blocks))
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise IndexError(
            f"block_tables[{row}, {column}] is {int(block_tables[row, column])}, outside the pool of "
            f"{cache.num_blocks} blocks, and seq_lens[{row}] = {lengths[row]} needs it"
        )
