"""Drawing from logits: argmax, and inverse CDF after temperature, top-k, top-p and min-p, without sorting the
vocabulary.

Every result depends on its own row only, to the last bit: the operations used either work row by row (softmax and
cumulative sums over the last dimension) or are exactly rounded per element. A row's window widths follow from the row
alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BLOCK = 128  # columns per block of the two-level inverse CDF
_MIN_WIDTH = 64  # of a window of most likely tokens
_WIDTH_GROWTH = 16
_MAX_ELEMENTS = 1 << 22  # of logits that are worked on at a time: bounds the temporaries


class Knobs(NamedTuple):
    """Per row, all [R]: float32 temperature > 0, int64 top_k (< 1 or >= V is off), float64 top_p, float32 min_p, and
    the uniform number in [0, 1), float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def take(self, rows: Tensor) -> Knobs:
        return Knobs(*(field[rows] for field in self))


def row_argmax(logits: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The lowest id among the largest logits of each row, and that logit (NaN if the row holds one): int64 [R], float32
    [R]."""
    if logits.device.type == "cpu":
        # numpy's argmax takes the first of equals and finds NaN like torch's, several times faster
        rows = logits.detach().numpy()
        ids = rows.argmax(axis=1)
        return ids, rows[np.arange(len(rows)), ids]
    values, indices = logits.max(dim=1)
    return indices.cpu().numpy(), values.cpu().numpy()


def stable_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k of a stable descending sort of each row (equal logits by id): values and int64 ids, [R, k]. No NaN in
    `logits`."""
    if 4 * k >= logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    values, ids = logits.topk(k + 1, dim=1)  # one more than asked for shows whether equals were left outside
    split = (values[:, k - 1] == values[:, k]).nonzero().flatten().tolist()
    ids, order = ids[:, :k].sort(dim=1)
    values, order = values[:, :k].gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    for row in split:
        border = values[row, -1]
        count = int((values[row] == border).sum())
        ids[row, k - count :] = (logits[row] == border).nonzero().flatten()[:count]
    return values, ids


def draw(logits: Tensor, top: Tensor, knobs: Knobs) -> Tensor:
    """One token id per row, int64 [R]. logits float32 [R, V] without NaN, top [R] the largest of each row, finite.

    Temperature, then top-k, top-p, min-p; then the first token, in id order, at which the cumulative probability of the
    tokens that are left exceeds `uniform` times their sum. Top-k and top-p take tokens in the order of `stable_topk`;
    top-p takes each token that is preceded by less than top_p of probability (after top-k).
    """
    num_rows, vocab_size = logits.shape
    step = max(1, _MAX_ELEMENTS // vocab_size)
    if num_rows > step:
        parts = [slice(i, i + step) for i in range(0, num_rows, step)]
        return torch.cat([draw(logits[p], top[p], Knobs(*(field[p] for field in knobs))) for p in parts])
    groups: dict[int, list[int]] = {}  # window width (0 = none) -> rows
    for row, (k, p) in enumerate(zip(knobs.top_k.tolist(), knobs.top_p.tolist(), strict=True)):
        limited = 0 < k < vocab_size
        width = min(vocab_size, max(_MIN_WIDTH, 1 << (k - 1).bit_length())) if limited else 0 if p >= 1 else -1
        groups.setdefault(width, []).append(row)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for width, members in groups.items():
        rows = torch.tensor(members, device=logits.device)
        whole = len(members) == num_rows
        args = (logits, top, knobs) if whole else (logits[rows], top[rows], knobs.take(rows))
        tokens[rows] = _draw_top_k(*args, width) if width > 0 else _draw_top_p(*args) if width else _draw_all(*args)
    return tokens


def _scaled(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    # The maximum is subtracted before the division: no temperature can overflow it. 1e-30 is greedy already.
    return (logits - top[:, None]) / temperature.clamp_min(1e-30)[:, None]


def _draw_all(logits: Tensor, top: Tensor, knobs: Knobs) -> Tensor:
    probs = torch.softmax(_scaled(logits, top, knobs.temperature), dim=1)
    if bool((knobs.min_p > 0).any()):
        probs = probs.masked_fill(probs < knobs.min_p[:, None] * probs.amax(dim=1, keepdim=True), 0.0)
    return _pick_blocked(probs, knobs.uniform)


def _draw_top_k(logits: Tensor, top: Tensor, knobs: Knobs, width: int) -> Tensor:
    values, ids = stable_topk(logits, width)
    beyond = torch.arange(width, device=logits.device) >= knobs.top_k[:, None]
    probs = torch.softmax(_scaled(values, top, knobs.temperature).masked_fill(beyond, -torch.inf), dim=1)
    return _draw_sorted(probs, probs.cumsum(dim=1, dtype=torch.float64), ids, knobs)


def _draw_top_p(logits: Tensor, top: Tensor, knobs: Knobs) -> Tensor:
    """The window grows until it holds the nucleus, at last to the whole vocabulary."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    probs = torch.softmax(_scaled(logits, top, knobs.temperature), dim=1)
    rows = torch.arange(num_rows, device=logits.device)
    width = _MIN_WIDTH
    while len(rows):
        width = vocab_size if 4 * width >= vocab_size else width
        _, ids = stable_topk(logits, width)
        window = probs.gather(1, ids)
        sums = window.cumsum(dim=1, dtype=torch.float64)
        found = sums[:, -1] >= knobs.top_p if width < vocab_size else torch.ones_like(rows, dtype=torch.bool)
        tokens[rows[found]] = _draw_sorted(window[found], sums[found], ids[found], knobs.take(found))
        left = (~found).nonzero().flatten()
        rows, logits, probs, knobs = rows[left], logits[left], probs[left], knobs.take(left)
        width *= _WIDTH_GROWTH
    return tokens


def _draw_sorted(probs: Tensor, sums: Tensor, ids: Tensor, knobs: Knobs) -> Tensor:
    """top-p, min-p and the draw, for probabilities in descending order with their cumulative sums and token ids, all
    [R, W]."""
    top_p = knobs.top_p[:, None]
    keep = torch.ones_like(probs, dtype=torch.bool)  # the first one always
    keep[:, 1:] = (sums[:, :-1] < top_p) | (top_p >= 1)
    keep &= probs >= knobs.min_p[:, None] * probs[:, :1]
    ids, order = ids.sort(dim=1)
    weights = torch.where(keep, probs, 0.0).gather(1, order)
    return ids.gather(1, _pick(weights, knobs.uniform)[:, None])[:, 0]


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF: the first column of each row at which the cumulative weight exceeds uniform * total; never one of
    weight 0."""
    sums = weights.cumsum(dim=1, dtype=torch.float64)
    return _search(sums, uniform * sums[:, -1])


def _pick_blocked(weights: Tensor, uniform: Tensor) -> Tensor:
    """`_pick` over many columns: the block first, by the sums of the blocks, then the column in it."""
    num_rows, num_columns = weights.shape
    full = num_columns // _BLOCK
    sums = weights[:, : full * _BLOCK].reshape(num_rows, full, _BLOCK).sum(dim=2)
    if full * _BLOCK < num_columns:
        sums = torch.cat([sums, weights[:, full * _BLOCK :].sum(dim=1, keepdim=True)], dim=1)
    sums = sums.cumsum(dim=1, dtype=torch.float64)
    target = uniform * sums[:, -1]
    block = _search(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = columns < num_columns
    inner = weights.gather(1, columns.clamp_max(num_columns - 1)).where(inside, 0.0).cumsum(dim=1, dtype=torch.float64)
    return block * _BLOCK + _search(inner, target - before)


def _search(sums: Tensor, target: Tensor) -> Tensor:
    # Rounding may lift the target to the total or above it: the last column that adds anything is the limit.
    found = torch.searchsorted(sums, target[:, None], right=True)
    return torch.minimum(found, torch.searchsorted(sums, sums[:, -1:].contiguous()))[:, 0]
