"""Weights in the order in which the C++ kernels read them: packed once, when a model is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.ops.backend import PackedLinear, dtype_name
from minipaged.ops.cpu.arguments import PACK, TYPES, WEIGHT
from minipaged.ops.cpu.library import check, huge_page_tensor, load_library

HUGE_FROM = 1 << 20  # bytes; smaller weights would waste most of a 2 MiB page


@dataclass(slots=True)
class WeightStruct:
    """A packed weight as C++ sees it: the struct, its address, and the memory that it points to."""

    header: ctypes.Array[ctypes.c_char]
    address: int
    dtype: torch.dtype
    outputs: int  # of a linear: half as many as rows if gated
    memory: Tensor  # owned here, read by C++
    bias: Tensor | None


def pack(
    kernel: Callable[[bytes], int], weight: Tensor, bias: Tensor | None, *, gated: bool, threads: int
) -> PackedLinear:
    """Take over weight [out, in]; the arguments are those of `Backend.pack_linear`. kernel: the library's `pack`."""
    out_features, in_features = weight.shape
    if gated and out_features % 2:
        raise ValueError(f"a gated weight needs gate rows and as many up rows, not {out_features} in all")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the weight has {out_features} outputs")
    if weight.dtype not in TYPES:
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    shape = (in_features, out_features, gated, TYPES[weight.dtype])
    nbytes = load_library().mp_packed_bytes(WEIGHT.pack(0, 0, *shape))
    allocate = huge_page_tensor if nbytes >= HUGE_FROM else torch.empty
    memory = allocate((nbytes,), dtype=torch.uint8)
    columns = None if bias is None else _packed_columns(bias, gated)
    header = ctypes.create_string_buffer(
        WEIGHT.pack(memory.data_ptr(), 0 if columns is None else columns.data_ptr(), *shape)
    )
    address = ctypes.addressof(header)
    check(kernel(PACK.pack(address, weight.data_ptr(), weight.stride(0), threads)))
    data = WeightStruct(header, address, weight.dtype, out_features // (2 if gated else 1), memory, columns)
    return PackedLinear(in_features, out_features, gated, dtype_name(weight.dtype), data)


def _packed_columns(bias: Tensor, gated: bool) -> Tensor:
    """The bias in float32 and in the order of packed columns: panels of 32, or of 16 gate and 16 up."""
    halves = bias.float().view(2 if gated else 1, -1)
    width = 16 if gated else 32
    padded = torch.nn.functional.pad(halves, (0, -halves.shape[1] % width))
    return padded.view(halves.shape[0], -1, width).transpose(0, 1).contiguous()
