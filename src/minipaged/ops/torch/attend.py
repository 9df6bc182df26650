"""Dense attention with its log-sum-exp: the piece from which the torch back end builds paged attention.

On the CPU torch's own flash kernel computes it block by block; scores, softmax and sums are float32 there for every
16-bit type. It is private to torch, so its presence is checked and its results are tried out before use; elsewhere
two float32 matrix products do the same, with the scores written out.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Attended:
    """softmax(q k^T * scale + mask) v and its log-sum-exp, natural: [U, H, R, D] and [U, H, R].

    q [U, H, R, D], k and v [U, H, L, D]; batch strides may be 0. causal: query i sees keys 0..i (R = L).
    mask [U, 1, 1, L]: 0 or -inf, in q's dtype (the flash kernel reads another one as if it were). At least one key per
    query must be visible.
    """
    if flash_works(q.dtype, q.device.type):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result: Attended = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return result
    return attend_plain(q, k, v, scale=scale, causal=causal, mask=mask)


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Attended:
    """As `attend`, on any device; holds the scores [U, H, R, L] in float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(dtype) * scale, k.to(dtype).transpose(-1, -2))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights, v.to(dtype)).to(q.dtype), lse


@cache
def flash_works(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch's CPU flash kernel exists, takes this dtype and agrees with `attend_plain`; tried once."""
    if device_type != "cpu" or not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # Strides and batch expansion as the back end uses them; values that are exact in every type.
    values = torch.arange(2 * 2 * 5 * 16.0).remainder(13).sub(6).div(4).to(dtype)
    q = values.view(5, 2, 2, 16).permute(2, 1, 0, 3)
    k = values[:160].view(1, 2, 5, 16).expand(2, 2, 5, 16)
    v = values[160:].view(1, 2, 5, 16).expand(2, 2, 5, 16)
    mask = torch.zeros(2, 1, 1, 5, dtype=dtype)
    mask[1, ..., 3:] = -torch.inf
    try:
        for causal, bias in ((False, None), (True, None), (False, mask)):
            o, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=0.25)
            expected_o, expected_lse = attend_plain(q, k, v, scale=0.25, causal=causal, mask=bias)
            if not torch.allclose(o.float(), expected_o.float(), rtol=0.02, atol=0.02):
                return False
            if lse.shape != expected_lse.shape or not torch.allclose(lse.float(), expected_lse.float(), atol=1e-3):
                return False
    except RuntimeError:  # this build has no such kernel for the type
        return False
    return True
