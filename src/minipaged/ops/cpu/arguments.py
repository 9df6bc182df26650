"""What the C++ kernels are given: the layouts of their argument structs, and the structs that outlive one call.

The layouts are those of native/api.h, where every field is 8 bytes wide.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minipaged.ops.backend import AttentionBatch

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The types that the kernels compute with, and their numbers in the structs."""

# P pointer, q int64, d double: see native/api.h for the fields.
WEIGHT = struct.Struct("PPqqqq")
PACK = struct.Struct("PPqq")
EMBED = struct.Struct("PPqPqq")
LINEAR = struct.Struct("PPqqPdPqPqqq")
RMS_NORM = struct.Struct("PqqqPdPqqq")
CACHE = struct.Struct("PPqqqqqqqqqqq")
ROPE_WRITE = struct.Struct("PqqqPPddPPqPPPPqq")
BATCH = struct.Struct("PqqPPq")
PROBE = struct.Struct("PqqqP")
ATTENTION = struct.Struct("PPPqqqPqqdq")


@dataclass(slots=True)
class CacheStruct:
    """One layer's cache as C++ sees it: the struct, its address, and what it was made from."""

    header: ctypes.Array[ctypes.c_char]
    address: int
    key_pointer: int
    value_pointer: int
    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class BatchStruct:
    """A step's batch as C++ sees it: the struct, its address, and the number of query tokens."""

    header: ctypes.Array[ctypes.c_char]
    address: int
    tokens: int


def describe_cache(cache: PagedKVCache) -> CacheStruct | None:
    """The struct of a cache, valid until its memory moves; None if no kernel takes its type, head_dim or strides."""
    key, value = cache.key_cache, cache.value_cache
    blocks, heads, block_size, dim = key.shape
    if key.dtype not in TYPES or dim % 8 or not 8 <= dim <= 256 or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    strides = key.stride()[:3] + value.stride()[:3]
    header = ctypes.create_string_buffer(
        CACHE.pack(key.data_ptr(), value.data_ptr(), *strides, blocks, heads, block_size, dim, TYPES[key.dtype])
    )
    return CacheStruct(header, ctypes.addressof(header), key.data_ptr(), value.data_ptr(), key.dtype, heads, dim)


def bind_batch(batch: AttentionBatch) -> tuple[AttentionBatch, BatchStruct]:
    """The batch in the types that C++ reads, and its struct, which holds the addresses of those tensors."""
    tables, lengths, starts = batch.block_tables, batch.seq_lens, batch.query_start_loc
    count = lengths.shape[0]
    if tables.shape[0] != count or starts.shape[0] != count + 1:
        raise ValueError(f"{count} sequences, but {tables.shape[0]} block tables and {starts.shape[0]} query starts")
    tables, lengths, starts = as_rows(tables, torch.int32), as_flat(lengths, torch.int32), as_flat(starts, torch.int32)
    header = ctypes.create_string_buffer(
        BATCH.pack(tables.data_ptr(), tables.stride(0), tables.shape[1], lengths.data_ptr(), starts.data_ptr(), count)
    )
    kept = AttentionBatch(
        batch.positions, batch.slot_mapping, tables, lengths, starts, batch.max_query_len, batch.max_seq_len
    )
    return kept, BatchStruct(header, ctypes.addressof(header), int(starts[-1]))


def as_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that type with its last dimension contiguous: itself nearly always."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def as_flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that type, contiguous: itself nearly always."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()
