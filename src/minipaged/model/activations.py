"""The buffers between the operations of a forward pass: allocated once, grown when a step is larger than any before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minipaged.model.config import ModelConfig


@dataclass(slots=True)
class Activations:
    """Views for T tokens, all in the model's dtype. Contents live until the next step."""

    hidden: Tensor  # [T, hidden], the residual stream
    qkv: Tensor  # [T, (Hq + 2 Hkv) D]
    query: Tensor  # [T, Hq, D]
    context: Tensor  # [T, Hq, D], what attention returns
    context_rows: Tensor  # [T, Hq D], the same memory
    inner: Tensor  # [T, intermediate]


class ActivationBuffers:
    """Owns the memory behind `Activations` and the logits."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, max_tokens: int, row_padding_bytes: int
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._padding = row_padding_bytes
        self._max_tokens = 0
        self._logits = torch.empty(0, config.vocab_size, device=device)
        self._current: Activations | None = None
        if max_tokens:
            self.views(max_tokens)

    def views(self, tokens: int) -> Activations:
        """Buffers for exactly `tokens` rows; decoding asks for the same number step after step and gets the same
        views.
        """
        if tokens > self._max_tokens:
            self._allocate(tokens)
        if self._current is None or self._current.hidden.shape[0] != tokens:
            heads = (self._config.num_attention_heads, self._config.head_dim)
            hidden, qkv, query, context, inner = (buffer[:tokens] for buffer in self._buffers)
            self._current = Activations(
                hidden, qkv, query.view(tokens, *heads), context.view(tokens, *heads), context, inner
            )
        return self._current

    def logits(self, rows: int) -> Tensor:
        """float32 [rows, vocab]."""
        if rows > self._logits.shape[0]:
            self._logits = torch.empty(rows, self._config.vocab_size, device=self._device)
        return self._logits[:rows]

    def _allocate(self, tokens: int) -> None:
        config = self._config
        attention = config.num_attention_heads * config.head_dim
        qkv = attention + 2 * config.num_key_value_heads * config.head_dim
        widths = (config.hidden_size, qkv, attention, attention, config.intermediate_size)
        self._buffers = [self._rows(tokens, width) for width in widths]
        self._max_tokens, self._current = tokens, None

    def _rows(self, tokens: int, width: int) -> Tensor:
        itemsize = self._dtype.itemsize
        padding = self._padding // itemsize if width * itemsize % 4096 == 0 else 0
        return torch.empty(tokens, width + padding, dtype=self._dtype, device=self._device)[:, :width]
