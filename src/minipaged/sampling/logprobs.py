"""Log-probabilities of the raw distribution: log_softmax of the logits as the model gave them, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minipaged.outputs import Logprob
from minipaged.sampling import sample

_MAX_ELEMENTS = 1 << 20  # of logits that are worked on at a time: temporaries stay in the cache


@torch.inference_mode()
def token_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """For each row of logits [R, V] the log-probabilities of `token_ids[row]`, which comes first, and of the k largest.

    k = 0: only the token itself; -1, or more than there are: the whole vocabulary. Equal logits are ranked by id.
    `decoded_token` is left None. ValueError unless there is one token per row.
    """
    vocab_size = logits.shape[1]
    if len(token_ids) != len(logits):
        raise ValueError(f"{len(token_ids)} token ids for {len(logits)} rows of logits")
    width = vocab_size if k < 0 else min(k, vocab_size)
    step = max(1, _MAX_ELEMENTS // vocab_size)
    results: list[dict[int, Logprob]] = []
    for start in range(0, len(logits), step):
        rows = logits[start : start + step].detach().float()
        tokens = torch.tensor(token_ids[start : start + step], device=logits.device)[:, None]
        values = torch.log_softmax(rows, dim=1)
        entries = [
            {token: Logprob(value, rank)}
            for token, value, rank in zip(
                tokens[:, 0].tolist(), values.gather(1, tokens)[:, 0].tolist(), _ranks(rows, tokens), strict=True
            )
        ]
        if width:
            candidates = sample.largest(rows, [width] * len(rows))
            for row, (entry, (unordered, logits_of)) in enumerate(zip(entries, candidates, strict=True)):
                ids = unordered[np.argsort(-logits_of, kind="stable")]
                top_values = values[row, torch.from_numpy(ids).to(values.device)].tolist()
                for rank, (token_id, value) in enumerate(zip(ids.tolist(), top_values, strict=True), start=1):
                    if token_id not in entry:
                        entry[token_id] = Logprob(value, rank)
        results += entries
    return results


def _ranks(rows: Tensor, tokens: Tensor) -> list[int]:
    """One more than the number of tokens before each one in a stable descending sort of its row."""
    if sample.on_host(rows):
        own = [(row, token, row[token]) for row, token in zip(rows.numpy(), tokens[:, 0].tolist(), strict=True)]
        return [1 + int(np.count_nonzero(row > x) + np.count_nonzero(row[:t] == x)) for row, t, x in own]
    own_values = rows.gather(1, tokens)
    earlier = torch.arange(rows.shape[1], device=rows.device) < tokens
    ranks: list[int] = (1 + ((rows > own_values) | ((rows == own_values) & earlier)).sum(dim=1)).tolist()
    return ranks
