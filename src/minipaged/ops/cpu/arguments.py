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

from minipaged.ops.backend import AttentionBatch, QKNormRoPE

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
ROPE_TOKENS, ROPE_LAYER, ROPE_PLACES = struct.Struct("Pqq"), struct.Struct("qPPddPPq"), struct.Struct("PPPPqq")
"""mp_rope_write in three parts, one after the other: the middle one belongs to a layer and is packed once."""
BATCH = struct.Struct("PqqPPq")
PROBE = struct.Struct("PqqqP")
ATTENTION = struct.Struct("PPPqqqPqqdq")


@dataclass(slots=True)
class CacheStruct:
    """One layer's cache as C++ sees it: the struct, its address, and what it was made from."""

    header: ctypes.Array[ctypes.c_char]
    address: int
    pointers: tuple[int, int]
    dtype: torch.dtype
    shape: tuple[int, int]  # kv heads, head_dim


@dataclass(slots=True)
class RotaryStruct:
    """One layer's constants as C++ sees them, by the type of the computation, and the memory that they point to."""

    parts: dict[torch.dtype, bytes]
    num_heads: int
    shape: tuple[int, int]  # kv heads, head_dim
    memory: list[Tensor]


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
    pointers = key.data_ptr(), value.data_ptr()
    strides = key.stride()[:3] + value.stride()[:3]
    header = ctypes.create_string_buffer(
        CACHE.pack(*pointers, *strides, blocks, heads, block_size, dim, TYPES[key.dtype])
    )
    return CacheStruct(header, ctypes.addressof(header), pointers, key.dtype, (heads, dim))


def bind_rotary(rotary: QKNormRoPE) -> RotaryStruct:
    """A layer's constants with the addresses of its norms and tables. ValueError without norms: no kernel does that."""
    if rotary.q_norm is None or rotary.k_norm is None:
        raise ValueError(
            "the kernels of back end 'cpu' normalise queries and keys; without QK-norm, backend='torch' can"
        )
    tables = [as_flat(table, torch.float32) for table in (rotary.rope.cos, rotary.rope.sin)]
    memory, parts = tables, {}
    for dtype in TYPES:
        weights = [as_flat(norm.weight, dtype) for norm in (rotary.q_norm, rotary.k_norm)]
        pointers = [tensor.data_ptr() for tensor in (*weights, *tables)]
        eps = rotary.q_norm.eps, rotary.k_norm.eps
        parts[dtype] = ROPE_LAYER.pack(rotary.num_heads, *pointers[:2], *eps, *pointers[2:], len(tables[0]))
        memory = memory + weights
    return RotaryStruct(parts, rotary.num_heads, (rotary.num_kv_heads, rotary.head_dim), memory)


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
