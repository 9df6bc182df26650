"""The promise on a whole model: logits do not depend on chunks, batch mates, block size, placement or threads."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from paged_problem import same_bits

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.model.config import ModelConfig
from minipaged.model.qwen3 import Qwen3Model
from minipaged.model.random_weights import RandomWeights
from minipaged.model.weights import load_model
from minipaged.ops.backend import AttentionBatch
from minipaged.ops.cpu.backend import NativeBackend

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=208,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope_theta=1e6,
    dtype="float32",
)


@dataclass
class Run:
    """One way of running: pieces of sequences go in, logits of every token come out."""

    model: Qwen3Model
    block_size: int
    seed: int
    kv_dtype: torch.dtype | None = None  # of the activations
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = 1500 // self.block_size + 8
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.caches = [
            PagedKVCache(blocks, 2, self.block_size, 64, dtype=self.kv_dtype or self.model.activation_dtype)
            for _ in range(3)
        ]
        for cache in self.caches:
            cache.fill_(float("nan"))

    def step(self, pieces: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        positions, slots, starts = [], [], [0]
        for s, tokens in pieces:
            table = self.tables.setdefault(s, [])
            for p in range(self.lengths.get(s, 0), self.lengths.get(s, 0) + len(tokens)):
                if p // self.block_size == len(table):
                    table.append(self.free.pop())
                positions.append(p)
                slots.append(table[p // self.block_size] * self.block_size + p % self.block_size)
            self.lengths[s] = self.lengths.get(s, 0) + len(tokens)
            starts.append(len(positions))
        width = max(len(t) for t in self.tables.values())
        batch = AttentionBatch(
            torch.tensor(positions),
            torch.tensor(slots),
            torch.tensor([(self.tables[s] + [-1] * width)[:width] for s, _ in pieces], dtype=torch.int32),
            torch.tensor([self.lengths[s] for s, _ in pieces], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            max(len(tokens) for _, tokens in pieces),
            max(self.lengths[s] for s, _ in pieces),
        )
        plan = self.model.backend.plan(batch)
        logits = self.model.forward(torch.cat([tokens for _, tokens in pieces]), plan, self.caches).clone()
        return list(logits.split([len(tokens) for _, tokens in pieces]))


@pytest.mark.parametrize("kv_dtype", [None, torch.float32], ids=["", "f32 KV"])
def test_logits_do_not_depend_on_how_they_are_computed(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    models = [
        load_model(CONFIG, RandomWeights(CONFIG, dtype=dtype), NativeBackend(threads=n), activation_dtype=dtype)
        for n in (1, 2)
    ]
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 320, (n,), generator=g) for n in (600, 90, 17)]
    whole = [Run(models[0], 16, s, kv_dtype).step([(s, tokens)])[0] for s, tokens in enumerate(prompts)]
    assert all(bool(torch.isfinite(x).all()) for x in whole)
    for seed, (chunk, block_size) in enumerate(((600, 1), (100, 32), (64, 7), (37, 128))):
        run = Run(models[seed % 2], block_size, seed, kv_dtype)
        for start in range(0, 600, chunk):
            pieces = [(s, t[start : start + chunk]) for s, t in enumerate(prompts) if start < len(t)]
            for (s, tokens), logits in zip(pieces, run.step(pieces), strict=True):
                assert same_bits(logits, whole[s][start : start + len(tokens)]), f"chunk {chunk} at {start} of {s}"
    run = Run(models[1], 5, 9, kv_dtype)  # a short prefill, then decode next to a prefill that goes on
    run.step([(1, prompts[1][:30])])
    for step in range(30, 60):
        first, second = run.step([(1, prompts[1][step : step + 1]), (0, prompts[0][(step - 30) * 9 : (step - 29) * 9])])
        assert same_bits(first, whole[1][step : step + 1])
        assert same_bits(second, whole[0][(step - 30) * 9 : (step - 29) * 9])
