"""Linear layers of the torch back end: oneDNN-prepacked weights where this torch has them, plain ones elsewhere.

A plain linear on the CPU re-orders the weight in every call; packed once, a row reads up to twice as fast.
The packed operators are private to torch, so their presence is checked and their results are tried out before use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(slots=True)
class TorchWeight:
    """weight [out, in] row-major, or packed by oneDNN, or both (a tied embedding)."""

    rows: Tensor | None
    packed: Tensor | None
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def load(cls, weight: Tensor, bias: Tensor | None, *, use: str) -> TorchWeight:
        """Copy weight [out, in] and bias [out] into the layout that `use` asks for (see `Backend.pack_linear`)."""
        weight = weight.detach()
        pack = use != "embed" and weight.device.type == "cpu" and packing_works(weight.dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if pack else None
        rows = weight.clone(memory_format=torch.contiguous_format) if packed is None or use == "both" else None
        return cls(rows, packed, None if bias is None else bias.detach().clone(), weight.dtype)

    def row_major(self) -> Tensor:
        """The weight as a table; unpacked (and kept from then on) if nobody said that it would be needed."""
        if self.rows is None:
            assert self.packed is not None
            self.rows = self.packed.to_dense()
        return self.rows

    def apply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """x [T, in] -> x @ weight.T + bias (+ residual [T, out]), a new tensor."""
        if self.packed is not None:
            ops = torch.ops.mkldnn._linear_pointwise
            y: Tensor
            if residual is None:
                y = ops(x, self.packed, self.bias, "none", [], "")
            else:
                y = ops.binary(x, residual.contiguous(), self.packed, self.bias, "add")
            return y
        y = functional.linear(x, self.row_major(), self.bias)
        return y if residual is None else y.add_(residual)


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether torch can pack a weight of this dtype and computes the right thing with it; tried once."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    # Small integers: exact in bfloat16, so a right result is equal, not just close.
    values = torch.arange(-96.0, 96.0).remainder(7).sub(3)
    weight, bias, x = (
        values.view(12, 16).to(dtype),
        values[:12].to(dtype),
        values[50:146].view(3, 32)[:, 5:21].to(dtype),
    )
    residual = values[20:56].view(3, 12).to(dtype)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    try:
        packed = TorchWeight(None, ops._reorder_linear_weight(weight), bias, dtype)
        return (
            torch.equal(packed.apply(x, None).double(), expected.to(dtype).double())
            and torch.equal(packed.apply(x, residual).double(), (expected + residual.double()).to(dtype).double())
            and torch.equal(packed.row_major(), weight)
        )
    except RuntimeError:  # this build or this processor cannot
        return False
