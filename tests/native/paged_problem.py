"""Sequences with random K and V, laid out in a cache in any way; everything that must not be read is poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch, Backend

RUBBISH = (-1, 0, 999_999, 2**31 - 1, -(2**31))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, signs of zeros included."""
    as_int = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(as_int), b.view(as_int))


@dataclass
class Problem:
    """query, key, value per sequence: [L, Hq, D], [L, Hkv, D] twice."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def random(
        cls, lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
    ) -> Problem:
        g = torch.Generator().manual_seed(seed)

        def tensors(h: int) -> list[Tensor]:
            return [torch.randn(n, h, dim, generator=g).to(dtype) for n in lengths]

        return cls(tensors(heads), tensors(kv_heads), tensors(kv_heads))

    def run(
        self,
        backend: Backend,
        spans: list[tuple[int, int, int]],
        *,
        block_size: int = 16,
        seed: int = 0,
        scale: float | None = None,
    ) -> list[Tensor]:
        """Queries first..last of a sequence for each span (sequence, first, last), as one batch."""
        rng = torch.Generator().manual_seed(seed)
        needed = [-(-last // block_size) for _, _, last in spans]
        kv_heads, dim = self.keys[0].shape[1:]
        pool = torch.randperm(sum(needed) + 2, generator=rng).tolist()
        cache = PagedKVCache(len(pool), kv_heads, block_size, dim, dtype=self.keys[0].dtype)
        cache.fill_(float("nan"))
        width = max(needed) + 1
        tables = torch.tensor([RUBBISH[i % len(RUBBISH)] for i in range(len(spans) * width)], dtype=torch.int32)
        tables = tables.view(len(spans), width)
        for row, (s, _, last) in enumerate(spans):
            blocks = torch.tensor([pool.pop() for _ in range(needed[row])], dtype=torch.int64)
            tables[row, : needed[row]] = blocks.int()
            position = torch.arange(last)
            slots = blocks[position // block_size] * block_size + position % block_size if last else position
            cache.write(self.keys[s][:last], self.values[s][:last], slots)
        counts = [last - first for _, first, last in spans]
        batch = AttentionBatch(
            positions=torch.empty(0, dtype=torch.int64),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            block_tables=tables,
            seq_lens=torch.tensor([last for _, _, last in spans], dtype=torch.int32),
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            max_query_len=max(counts),
            max_seq_len=max(last for _, _, last in spans),
        )
        query = torch.cat([self.queries[s][first:last] for s, first, last in spans])
        return list(backend.attention(query, cache, backend.plan(batch), scale=scale).split(counts))

    def exact(self, s: int, first: int, last: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Softmax attention written out, in float64; in another type: torch's own error for comparison."""
        k, v = (x[s][:last].to(dtype) for x in (self.keys, self.values))
        q = self.queries[s][first:last].to(dtype)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = torch.arange(last) > torch.arange(first, last)[:, None]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # four dimensions: torch's flash kernel
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)[0].transpose(0, 1)
