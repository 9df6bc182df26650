"""The largest steps that may come, run once before the KV pool is sized: what they need is then known, and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from minipaged.kv import PagedKVCache
from minipaged.kv.address import num_logical_blocks
from minipaged.ops.backend import AttentionBatch
from minipaged.sampling.device_sample import sample_on_device
from minipaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minipaged.model.qwen3 import Qwen3Model

_SAMPLED = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, min_p=0.0)


@torch.inference_mode()
def warm_up(
    model: Qwen3Model, *, num_tokens: int, num_seqs: int, block_size: int, kv_dtype: torch.dtype | None = None
) -> None:
    """A prefill step of `num_tokens` tokens, logits for `num_seqs` of them, and a decode step of `num_seqs` sequences
    of the longest length; a token is sampled from each row of logits.

    Kernels are compiled, scratch and activations grow to their final size, and torch's allocator keeps the rest of the
    peak, so that the device's free memory afterwards is free indeed. Needs no pool: all tables point at one block of
    zeros, and nothing is written. kv_dtype: of the pool that comes, None = the activations'.
    """
    config, device = model.config, model.device
    longest = model.max_model_len
    shape = (1, config.num_key_value_heads, block_size, config.head_dim)
    cache = PagedKVCache(*shape, dtype=kv_dtype or model.activation_dtype, device=device)
    caches = [cache] * config.num_hidden_layers
    chunks = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
    for lens, query_lens in ((chunks, chunks), ([longest] * num_seqs, [1] * num_seqs)):
        tokens = sum(query_lens)
        batch = AttentionBatch(
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(
                len(lens), num_logical_blocks(max(lens), block_size), dtype=torch.int32, device=device
            ),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0).int(),
            max_query_len=max(query_lens),
            max_seq_len=max(lens),
            num_decode_rows=num_seqs if query_lens[0] == 1 else 0,
        )
        rows = torch.arange(min(num_seqs, tokens), device=device)
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        logits = model.forward(ids, model.backend.plan(batch), caches, rows)
        sample_on_device(logits, [_SAMPLED] * len(rows), np.full(len(rows), 0.5))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
