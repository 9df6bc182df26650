"""Qwen3: the forward pass, written once on top of a `Backend`.

T tokens of a step (all sequences end to end), Hq / Hkv query / key-value heads, D head_dim, R rows that want logits,
V vocabulary. A layer is two residual blocks:

    hidden += out(attention(rope(qk_norm(qkv(norm(hidden))))))       K and V go through the paged cache
    hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minipaged.model.activations import ActivationBuffers
from minipaged.model.config import ModelConfig
from minipaged.ops.backend import AttentionMetadata, Backend, PackedLinear, QKNormRoPE, RMSNorm

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `parameters.py` says which checkpoint tensors each field is made of."""

    attention_norm: RMSNorm
    qkv: PackedLinear  # hidden -> (Hq + 2 Hkv) D
    rotary: QKNormRoPE  # norms of queries and keys over D, and the rotation
    out: PackedLinear  # Hq D -> hidden
    mlp_norm: RMSNorm
    gate_up: PackedLinear  # hidden -> 2 intermediate, gate rows first
    down: PackedLinear  # intermediate -> hidden


class Qwen3Model:
    """A loaded model (`weights.load_model`): weights in the back end's layout, and the buffers between operations.

    Three types, under three names: `weight_form` is what weights are stored as, `activation_dtype` the type of the
    buffers between operations, and the K/V has the dtype of the caches that `forward` is given. `forward` is not
    re-entrant: one step at a time per model.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        *,
        activation_dtype: torch.dtype,
        device: torch.device,
        embedding: PackedLinear,
        layers: list[Layer],
        final_norm: RMSNorm,
        head: PackedLinear,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        self.config, self.backend = config, backend
        self.weight_form, self.activation_dtype, self.device = head.form, activation_dtype, device
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.max_model_len = max_model_len
        self._buffers = ActivationBuffers(
            config, activation_dtype, device, max_tokens=max_tokens, row_padding_bytes=backend.row_padding_bytes
        )

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        plan: AttentionMetadata,
        caches: Sequence[PagedKVCache],
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step and write its K/V to `caches` (one per layer).

        token_ids int64 [T], in the order of `plan.batch`; logits_rows int64 [R], the rows of T whose next token is
        wanted (None = all). Returns float32 [R, V], a view of a persistent buffer: valid until the next call.
        """
        return self.logits(self.hidden_states(token_ids, plan, caches), logits_rows)

    @torch.no_grad()
    def hidden_states(self, token_ids: Tensor, plan: AttentionMetadata, caches: Sequence[PagedKVCache]) -> Tensor:
        """All layers without the head: [T, hidden] in the activations' dtype, before the final norm.

        Valid until the next step. With `logits`, the two halves of `forward`: a caller that wants the logits of many
        rows (prompt log-probabilities) can take them in slices instead of in one huge tensor.
        """
        backend, batch = self.backend, plan.batch
        act = self._buffers.views(token_ids.shape[0])
        hidden = backend.embed(token_ids, self.embedding, out=act.hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            qkv = backend.linear(hidden, layer.qkv, norm=layer.attention_norm, out=act.qkv)
            query = backend.qk_norm_rope_write(
                qkv, layer.rotary, cache, batch.positions, batch.slot_mapping, out=act.query
            )
            backend.attention(query, cache, plan, out=act.context)
            backend.linear(act.context_rows, layer.out, residual=hidden, out=hidden)

            inner = backend.linear(hidden, layer.gate_up, norm=layer.mlp_norm, act="silu_mul", out=act.inner)
            backend.linear(inner, layer.down, residual=hidden, out=hidden)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """Final norm and output head, for the given rows only: [T, hidden] -> float32 [R, V].

        A view of a persistent buffer: valid until the next call.
        """
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        out = self._buffers.logits(hidden.shape[0])
        if hidden.shape[0]:
            self.backend.linear(hidden, self.head, norm=self.final_norm, out=out)
        return out
