"""Joining attention over two disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def merge_attention_states(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the result over each.

    o1, o2 [..., D]: softmax-weighted sums of V; lse1, lse2 [...]: natural logarithm of the sum of exp(score).
    With m = max(lse1, lse2) and w_i = exp(lse_i - m): o = (w1 o1 + w2 o2) / (w1 + w2), lse = m + log(w1 + w2)
    (the online softmax of Milakov and Gimelshein, arXiv:1805.02867, applied to whole sets).
    An empty set is (anything, -inf) and changes nothing; two empty sets give (0, -inf). Computed in float32 (float64
    if an input is float64); o has the dtype of o1 and o2 promoted. Raises ValueError for shapes that do not fit.
    """
    if o1.shape != o2.shape or lse1.shape != lse2.shape or o1.shape[:-1] != lse1.shape:
        raise ValueError(
            "merge_attention_states needs o1 and o2 [..., D], lse1 and lse2 [...] of equal leading shape, got "
            f"{tuple(o1.shape)}, {tuple(lse1.shape)}, {tuple(o2.shape)}, {tuple(lse2.shape)}"
        )
    result_dtype = torch.promote_types(o1.dtype, o2.dtype)
    dtype = torch.float32
    for tensor in (o1, lse1, o2, lse2):
        dtype = torch.promote_types(dtype, tensor.dtype)
    lse1, lse2 = lse1.to(dtype), lse2.to(dtype)
    lse = torch.logaddexp(lse1, lse2)
    # Where both are empty, lse - lse would be nan: any finite number in its place gives weights of exp(-inf) = 0.
    reference = torch.where(torch.isneginf(lse), 0.0, lse)
    w1 = torch.exp(lse1 - reference).unsqueeze(-1)
    w2 = torch.exp(lse2 - reference).unsqueeze(-1)
    # An empty set's output may be anything, NaN included, so a weight of zero must not be multiplied with it.
    o = torch.where(w1 == 0, 0.0, w1 * o1) + torch.where(w2 == 0, 0.0, w2 * o2)
    return o.to(result_dtype), lse
