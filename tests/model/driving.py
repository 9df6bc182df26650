"""Drives a `Qwen3Model` by hand, without an engine: shuffled blocks, NaN in every unused slot, rubbish in the table
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.model.qwen3 import Qwen3Model
from minipaged.ops.backend import AttentionBatch


@dataclass
class Driver:
    """Feeds pieces of sequences to the model; each `step` is one forward pass over a mixed batch."""

    model: Qwen3Model
    block_size: int
    num_blocks: int = 300
    kv_dtype: torch.dtype | None = None  # of the activations
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        self.free = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.caches = [
            PagedKVCache(
                self.num_blocks,
                config.num_key_value_heads,
                self.block_size,
                config.head_dim,
                dtype=self.kv_dtype or self.model.activation_dtype,
            )
            for _ in self.model.layers
        ]
        for cache in self.caches:
            cache.fill_(float("nan"))

    def step(self, pieces: dict[int, Sequence[int]], rows: Sequence[int] | None = None) -> Tensor:
        """pieces: sequence -> its next tokens. Returns a copy of the logits, float32 [R, V]."""
        bs = self.block_size
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, tokens in pieces.items():
            table, start = self.tables.setdefault(sequence, []), self.lengths.get(sequence, 0)
            for position in range(start, start + len(tokens)):
                if position // bs == len(table):
                    table.append(self.free.pop())
                positions.append(position)
                slots.append(table[position // bs] * bs + position % bs)
            self.lengths[sequence] = start + len(tokens)
            starts.append(len(positions))
        width = max(len(self.tables[s]) for s in pieces) + 2
        batch = AttentionBatch(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(
                [self.tables[s] + [999] * (width - len(self.tables[s])) for s in pieces], dtype=torch.int32
            ),
            seq_lens=torch.tensor([self.lengths[s] for s in pieces], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            max_query_len=max(len(tokens) for tokens in pieces.values()),
            max_seq_len=max(self.lengths[s] for s in pieces),
        )
        token_ids = torch.tensor([token for tokens in pieces.values() for token in tokens])
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.int64)
        return self.model.forward(token_ids, self.model.backend.plan(batch), self.caches, wanted).clone()
