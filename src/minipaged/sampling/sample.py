"""From logits to token ids: argmax, and inverse CDF after temperature, top-k, top-p, min-p.

Only top-p without top-k sorts: the tokens likely enough for the nucleus, in a flat distribution all of the vocabulary.
Every result depends on its own row only, to the last bit: what is done for several rows at once either works row by row
(softmax over the last dimension, sums of fixed blocks) or is exactly rounded per element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from minipaged.ops.transfer import upload
from minipaged.sampling_params import SamplingParams

Array: TypeAlias = "np.ndarray[Any, Any]"

_BLOCK = 128  # columns per block of the two-level searches
_MAX_ELEMENTS = 1 << 20  # of logits that are worked on at a time: temporaries stay in the cache
_MIN_TEMPERATURE = 1e-30  # is greedy already, for any float32 logits that differ


def on_host(tensor: Tensor) -> bool:
    """Whether numpy can work on the tensor's memory, which for searches in single rows is several times faster."""
    return tensor.device.type == "cpu"


def row_argmax(logits: Tensor) -> tuple[Array, Array]:
    """The lowest id among the largest logits of each row, and that logit (NaN if the row holds one): [R], [R]."""
    if on_host(logits):  # numpy's argmax takes the first of equals and finds NaN, as torch's
        rows = logits.numpy()
        ids = rows.argmax(axis=1)
        return ids, rows[np.arange(len(rows)), ids]
    values, indices = logits.max(dim=1)
    return indices.cpu().numpy(), values.cpu().numpy()


def largest(logits: Tensor, counts: Sequence[int]) -> Iterator[tuple[Array, Array]]:
    """For each row of logits [R, V] the ids of its `counts[row]` largest logits in ascending order, and these logits.

    Among equals the lower ids are taken, as by a stable descending sort. No NaN in `logits`; 1 <= counts <= V.
    """
    num_rows, vocab_size = logits.shape
    if not counts:
        return
    if not on_host(logits):
        values, ids = (tensor.cpu().numpy() for tensor in stable_topk(logits, max(counts)))
        for row, count in enumerate(counts):
            order = np.argsort(ids[row, :count])
            yield ids[row, :count][order], values[row, :count][order]
        return
    rows = logits.numpy()
    num_blocks = vocab_size // _BLOCK
    blocks = logits[:, : num_blocks * _BLOCK].reshape(num_rows, num_blocks, _BLOCK)
    maxima = blocks.amax(dim=2).numpy() if num_blocks > min(counts) else None
    for row, count in enumerate(counts):
        if maxima is not None and count < num_blocks:
            # `count` blocks hold a logit at least as large as the count-th largest maximum: none below it is needed
            floor = np.partition(maxima[row], num_blocks - count)[num_blocks - count]
            ids = np.flatnonzero(rows[row] >= floor)
        else:
            ids = np.arange(vocab_size)
        values = rows[row][ids]
        keep = first_of_sort(values, count)
        yield ids[keep], values[keep]


def first_of_sort(values: Array, count: int) -> Array:
    """bool [n]: which of `values` a stable descending sort puts first. 1 <= count."""
    if count >= len(values):
        return np.ones(len(values), dtype=bool)
    cut = np.partition(values, len(values) - count)[len(values) - count]
    keep: Array = values > cut
    keep[np.flatnonzero(values == cut)[: count - np.count_nonzero(keep)]] = True
    return keep


def stable_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k of a stable descending sort of each row, in that order: values and int64 ids, [R, k]. No NaN."""
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


def sample(logits: Tensor, top: Array, params: Sequence[SamplingParams], uniform: Array) -> Array:
    """One token id per row, int64 [R].

    logits float32 [R, V] without NaN; top [R] the largest of each row, finite; params resolved, temperature above 0;
    uniform float64 [R] in [0, 1). In this order: temperature; the `top_k` largest logits; of these each token that is
    preceded, in descending order, by less than `top_p` of their probability; of these the tokens at least `min_p` times
    as likely as the first. Then the first token, in id order, at which the cumulative probability of what is left
    exceeds `uniform` times its sum. Equals are ordered by id.
    """
    num_rows, vocab_size = logits.shape
    tokens = np.empty(num_rows, dtype=np.int64)
    limited = [row for row, p in enumerate(params) if 0 < (p.top_k or 0) < vocab_size]
    candidates = largest(rows_of(logits, limited), [params[row].top_k or 0 for row in limited])
    for row, (ids, values) in zip(limited, candidates, strict=True):
        weights = np.exp((values.astype(np.float64) - float(top[row])) / _temperature(params[row]))
        tokens[row] = ids[_pick(_restricted(weights, float(weights.sum()), params[row]), uniform[row])]
    others = sorted(set(range(num_rows)).difference(limited))
    step = max(1, _MAX_ELEMENTS // vocab_size)
    for start in range(0, len(others), step):
        rows = others[start : start + step]
        part = [params[row] for row in rows]
        tokens[rows] = _sample_unlimited(rows_of(logits, rows), top[rows], part, uniform[rows])
    return tokens


def rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, ascending, of logits [R, V]: themselves if they are all, else a copy."""
    if len(rows) == len(logits):
        return logits
    return logits.index_select(0, upload(torch.tensor(rows, dtype=torch.int64), logits.device))


def _temperature(params: SamplingParams) -> float:
    if params.temperature is None:
        raise ValueError("sampling parameters must be resolved before sampling: temperature is None")
    return max(params.temperature, _MIN_TEMPERATURE)


def _sample_unlimited(logits: Tensor, top: Array, params: Sequence[SamplingParams], uniform: Array) -> Array:
    """`sample` without top-k: the probabilities of the whole vocabulary are needed."""
    temperature = torch.tensor([_temperature(p) for p in params], dtype=torch.float32, device=logits.device)
    # the maximum is subtracted before the division, so that no temperature can overflow it
    scaled = torch.sub(logits, torch.from_numpy(top).to(logits.device)[:, None]).div_(temperature[:, None])
    probs = torch.softmax(scaled, dim=1)
    tokens = np.empty(len(params), dtype=np.int64)
    whole = [row for row, p in enumerate(params) if p.top_p == 1.0]
    if whole:
        tokens[whole] = _sample_whole(
            rows_of(probs, whole), [params[row].min_p or 0.0 for row in whole], uniform[whole]
        )
    for row in sorted(set(range(len(params))).difference(whole)):
        ids, weights = _nucleus_candidates(probs[row], params[row].top_p or 0.0)
        tokens[row] = ids[_pick(_restricted(weights, 1.0, params[row]), uniform[row])]
    return tokens


def _nucleus_candidates(probs: Tensor, top_p: float) -> tuple[Array, Array]:
    """Ids in ascending order, and probabilities, of a superset of the nucleus.

    V tokens below (1 - top_p) / 2V sum to less than half of what the nucleus may lack; the other half is for rounding.
    """
    floor = 0.0 if top_p > 0.9999 else (1.0 - top_p) / (2 * len(probs))
    if on_host(probs):
        row = probs.numpy()
        ids = np.flatnonzero(row >= floor)
        return ids, row[ids]
    kept = (probs >= floor).nonzero().flatten()
    return kept.cpu().numpy(), probs[kept].cpu().numpy()


def _restricted(weights: Array, total: float, params: SamplingParams) -> Array:
    """`weights` with 0 for what top-p and min-p exclude; `total`: the weight that top-p is a share of."""
    keep = np.ones(len(weights), dtype=bool)
    if params.top_p is not None and params.top_p < 1.0:
        sums = np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
        keep = first_of_sort(weights, 1 + int(np.searchsorted(sums[:-1], params.top_p * total)))
    if params.min_p:
        keep &= weights >= params.min_p * weights.max()
    return np.where(keep, weights, 0.0)


def _pick(weights: Array, uniform: float) -> int:
    """Inverse CDF: the first index at which the cumulative weight exceeds uniform * total; never one of weight 0."""
    sums = np.cumsum(weights, dtype=np.float64)
    found = np.searchsorted(sums, uniform * sums[-1], side="right")
    return int(min(found, np.searchsorted(sums, sums[-1])))  # rounding may lift the target to the total


def _sample_whole(probs: Tensor, min_p: Sequence[float], uniform: Array) -> Array:
    """`_pick` for rows of the whole vocabulary, at once: first the block by the blocks' sums, then the column in it."""
    if any(min_p):
        share = torch.tensor(min_p, dtype=torch.float32, device=probs.device)
        probs = probs.masked_fill(probs < share[:, None] * probs.amax(dim=1, keepdim=True), 0.0)
    num_rows, num_columns = probs.shape
    full = num_columns // _BLOCK
    sums = probs[:, : full * _BLOCK].reshape(num_rows, full, _BLOCK).sum(dim=2)
    if full * _BLOCK < num_columns:
        sums = torch.cat([sums, probs[:, full * _BLOCK :].sum(dim=1, keepdim=True)], dim=1)
    sums = sums.cumsum(dim=1, dtype=torch.float64)
    target = torch.from_numpy(uniform).to(probs.device) * sums[:, -1]
    block = _search(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inner = probs.gather(1, columns.clamp_max(num_columns - 1)).where(columns < num_columns, 0.0)
    chosen: Array = (block * _BLOCK + _search(inner.cumsum(dim=1, dtype=torch.float64), target - before)).cpu().numpy()
    return chosen


def _search(sums: Tensor, target: Tensor) -> Tensor:
    found = torch.searchsorted(sums, target[:, None], right=True)
    return torch.minimum(found, torch.searchsorted(sums, sums[:, -1:].contiguous()))[:, 0]
