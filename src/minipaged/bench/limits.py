"""What a step must read and compute at least: the one definition behind every share of a limit that is printed.

    bytes = every weight once (of an untied embedding only a row per token) + K and V of all tokens of all sequences
    of the step share of bandwidth = bytes * steps per second / median of the read probes before, between and after
    the runs

Activations and logits are not counted: they stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minipaged.model.parameters import EMBEDDING, HEAD, parameters, weight_bytes_per_step

if TYPE_CHECKING:
    from minipaged.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepWork:
    """Size of one step. tokens: computed; cached_tokens: length of all its sequences, computed tokens included;
    query_key_pairs: how many (query, visible key) pairs attention multiplies; logits_rows: rows of the output head."""

    tokens: int
    cached_tokens: int
    query_key_pairs: int
    logits_rows: int

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]], logits_rows: int) -> StepWork:
        """rows: (position of the first computed token, number of computed tokens) of each sequence."""
        tokens = cached = pairs = 0
        for start, count in rows:
            tokens += count
            cached += start + count
            pairs += count * start + count * (count + 1) // 2
        return cls(tokens, cached, pairs, logits_rows)


class Limits:
    """The least cost of a step of one model. itemsize, kv_itemsize: bytes per number of weights and of K/V."""

    def __init__(self, config: ModelConfig, itemsize: int, kv_itemsize: int) -> None:
        matrices = {p.name: math.prod(p.shape) for p in parameters(config).values() if len(p.shape) == 2}
        self.weight_bytes = weight_bytes_per_step(config, itemsize)
        self.kv_bytes_per_token = config.kv_bytes_per_token(kv_itemsize)
        self._per_token = 2 * sum(size for name, size in matrices.items() if name not in (EMBEDDING, HEAD))
        self._per_logits_row = 2 * config.hidden_size * config.vocab_size
        self._per_pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers

    def step_bytes(self, work: StepWork) -> int:
        """Bytes that the step must read from memory."""
        return self.weight_bytes + self.kv_bytes_per_token * work.cached_tokens

    def step_flops(self, work: StepWork) -> int:
        """Floating-point operations: two per weight and token (the head only where logits are wanted), and four per
        layer, head dimension, query head and (query, key) pair: q.k and p.v.
        """
        attention = self._per_pair * work.query_key_pairs
        return self._per_token * work.tokens + self._per_logits_row * work.logits_rows + attention

    def step_seconds(self, work: StepWork, bandwidth: float, peak: float) -> float:
        """The step cannot be faster than its bytes at `bandwidth` (bytes/s) or its operations at `peak` (per
        second).
        """
        return max(self.step_bytes(work) / bandwidth, self.step_flops(work) / peak)
