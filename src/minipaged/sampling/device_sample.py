"""`sample` where the logits live: no look at the device until the sampled ids leave it.

The same rules in tensor operations over whole rows. What top-k, top-p and min-p keep is described by a value and a
number of equals (the lowest ids of those), so nothing is gathered or put back in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minipaged.ops.transfer import upload
from minipaged.sampling_params import SamplingParams

_BLOCK = 128  # columns per block of the two-level search
_MIN_TEMPERATURE = 1e-30


def sample_on_device(
    logits: Tensor, params: Sequence[SamplingParams], uniform: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Tensor:
    """One token id per row, int64 [R], on the device of `logits` float32 [R, V]. The rules of `sample.sample`.

    params resolved, temperature above 0; uniform [R] in [0, 1). A row without a finite maximum gives any valid id: the
    caller looks at the maximum and reports it.
    """
    vocab_size = logits.shape[1]
    asked = [p.top_k or 0 for p in params]
    top_k = [k if 0 < k < vocab_size else 0 for k in asked]
    numbers = np.array(
        [
            [max(p.temperature or 0.0, _MIN_TEMPERATURE) for p in params],
            [1.0 if p.top_p is None else p.top_p for p in params],
            [p.min_p or 0.0 for p in params],
            top_k,
            uniform,
        ]
    )
    temperature, top_p, min_p, k, u = upload(numbers, logits.device)
    top = logits.amax(dim=1, keepdim=True)
    # the maximum is subtracted before the division, so that no temperature can overflow it
    weights = ((logits - top) / temperature.float()[:, None]).exp_()
    if any(top_k) or any(p.top_p is not None and p.top_p < 1.0 for p in params):
        widest = max(top_k) if all(top_k) else vocab_size
        limit = torch.where(k > 0, k, float(vocab_size)).long()
        floor, count = _nucleus(logits, top, temperature, top_p, limit, widest)
        above = logits > floor
        equal = logits == floor
        room = (count - above.sum(dim=1))[:, None]
        weights = weights.where(above | (equal & (equal.cumsum(dim=1) <= room)), 0.0)
    if any(p.min_p for p in params):
        weights = weights.where(weights >= min_p.float()[:, None], 0.0)  # the largest weight is 1
    return _pick(weights, u)


def _nucleus(
    logits: Tensor, top: Tensor, temperature: Tensor, top_p: Tensor, limit: Tensor, widest: int
) -> tuple[Tensor, Tensor]:
    """The smallest logit [R, 1] that top-k and top-p keep, and how many tokens [R] they keep together."""
    values = logits.topk(widest, dim=1).values
    weights = ((values - top).double() / temperature[:, None]).exp_()
    ranks = torch.arange(widest, device=logits.device)
    weights = weights.where(ranks < limit[:, None], 0.0)
    sums = weights.cumsum(dim=1)
    # A token stays if those before it hold less than top_p; the first one always does.
    count = 1 + (sums[:, :-1] < top_p[:, None] * sums[:, -1:]).sum(dim=1)
    count = torch.where(top_p < 1.0, torch.minimum(count, limit), limit)
    return values.gather(1, (count - 1)[:, None]), count


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF per row: the first column at which the cumulative weight exceeds uniform * total; never one of
    weight 0."""
    num_rows, num_columns = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -num_columns % _BLOCK)).view(num_rows, -1, _BLOCK)
    sums = padded.sum(dim=2).double().cumsum(dim=1)
    target = uniform * sums[:, -1]
    block = _search(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    inner = padded.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(dim=1)
    column = _search(inner, target - before)
    return (block * _BLOCK + column).clamp_max(num_columns - 1)


def _search(sums: Tensor, target: Tensor) -> Tensor:
    found = torch.searchsorted(sums, target[:, None], right=True)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())  # rounding may lift the target to the total
    return torch.minimum(found, last)[:, 0].clamp_max(sums.shape[1] - 1)
