"""Log-probabilities of the raw distribution: log_softmax of the logits as the model gave them, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipaged.engine.draw import stable_topk
from minipaged.engine.outputs import Logprob

_MAX_ELEMENTS = 1 << 22  # of logits that are worked on at a time: bounds the temporaries


def token_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """For each row of logits [R, V] the log-probabilities of `token_ids[row]`, which comes first, and of the k most
    likely tokens.

    k = 0: only the token itself; -1, or more than there are: the whole vocabulary. Equal logits are ranked by id.
    `decoded_token` is left None.
    """
    vocab_size = logits.shape[1]
    if len(token_ids) != len(logits):
        raise ValueError(f"{len(token_ids)} token ids for {len(logits)} rows of logits")
    width = vocab_size if k < 0 else min(k, vocab_size)
    step = max(1, _MAX_ELEMENTS // vocab_size)
    results: list[dict[int, Logprob]] = []
    for start in range(0, len(logits), step):
        rows = logits[start : start + step].float()
        tokens = torch.tensor(token_ids[start : start + step], device=logits.device)[:, None]
        values = torch.log_softmax(rows, dim=1)
        own = rows.gather(1, tokens)
        columns = torch.arange(vocab_size, device=logits.device)
        ranks = 1 + ((rows > own) | ((rows == own) & (columns < tokens))).sum(dim=1)
        own_values = values.gather(1, tokens)[:, 0]
        ids = stable_topk(rows, width)[1] if width else tokens[:, :0]
        columns_of = zip(
            tokens[:, 0].tolist(),
            own_values.tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.gather(1, ids).tolist(),
            strict=True,
        )
        for token, value, rank, top_ids, top_values in columns_of:
            entry = {token: Logprob(value, rank)}
            for top_rank, (top_id, top_value) in enumerate(zip(top_ids, top_values, strict=True), start=1):
                if top_id != token:
                    entry[top_id] = Logprob(top_value, top_rank)
            results.append(entry)
    return results


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """Log-probabilities of prompt tokens: logits [T, V] at positions s : s + T, next_token_ids the tokens at s + 1 : s
    + T + 1."""
    return token_logprobs(logits, next_token_ids, k)
