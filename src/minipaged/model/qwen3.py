"""Qwen3: the forward pass, written once on top of a `Backend`, and how its weights get there.

T tokens of a step (all sequences end to end), Hq / Hkv query / key-value heads, D head_dim, R rows that want logits,
V vocabulary. A layer is two residual blocks:

    hidden += out(attention(rope(qk_norm(qkv(norm(hidden))))))       K and V go through the paged cache
    hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from minipaged.model.activations import ActivationBuffers
from minipaged.model.config import ModelConfig
from minipaged.model.dtypes import resolve_dtype
from minipaged.model.parameters import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_LINEARS,
    LAYER_NORMS,
    TensorSource,
    layer_prefix,
)
from minipaged.model.rope import rotary_table
from minipaged.model.source import ModelSource
from minipaged.ops.backend import AttentionPlan, Backend, PackedLinear, RMSNorm

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `parameters.py` says which checkpoint tensors each field is made of."""

    attention_norm: RMSNorm
    qkv: PackedLinear  # hidden -> (Hq + 2 Hkv) D
    query_norm: RMSNorm  # over D, before RoPE
    key_norm: RMSNorm
    out: PackedLinear  # Hq D -> hidden
    mlp_norm: RMSNorm
    gate_up: PackedLinear  # hidden -> 2 intermediate, gate rows first
    down: PackedLinear  # intermediate -> hidden


class Qwen3Model:
    """A loaded model: weights in the back end's layout, the rotary table, and the buffers between operations.

    Build one with `from_folder` or `load`. `forward` is not re-entrant: one step at a time per model.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        embedding: PackedLinear,
        layers: list[Layer],
        final_norm: RMSNorm,
        head: PackedLinear,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        self.config, self.backend = config, backend
        self.dtype, self.device = dtype, device
        self.embedding, self.layers, self.final_norm, self.head = embedding, layers, final_norm, head
        self.max_model_len = max_model_len
        self.rope = rotary_table(config, max_model_len, device)
        self._buffers = ActivationBuffers(
            config, dtype, device, max_tokens=max_tokens, row_padding_bytes=backend.row_padding_bytes
        )

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        plan: AttentionPlan,
        caches: Sequence[PagedKVCache],
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step and write its K/V to `caches` (one per layer).

        token_ids int64 [T], in the order of `plan.batch`; logits_rows int64 [R], the rows of T whose next token is
        wanted (None = all).
        Returns float32 [R, V], a view of a persistent buffer: valid until the next call.
        """
        return self.logits(self.hidden_states(token_ids, plan, caches), logits_rows)

    @torch.no_grad()
    def hidden_states(self, token_ids: Tensor, plan: AttentionPlan, caches: Sequence[PagedKVCache]) -> Tensor:
        """All layers without the head: [T, hidden] in the model's dtype, before the final norm.

        Valid until the next step. With `logits`, the two halves of `forward`: a caller that wants the logits of many
        rows (prompt log-probabilities) can take them in slices instead of in one huge tensor.
        """
        backend, batch = self.backend, plan.batch
        act = self._buffers.views(token_ids.shape[0])
        hidden = backend.embed(token_ids, self.embedding, out=act.hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            qkv = backend.linear(hidden, layer.qkv, norm=layer.attention_norm, out=act.qkv)
            query = backend.qk_norm_rope_write(
                qkv,
                layer.query_norm,
                layer.key_norm,
                self.rope,
                batch.positions,
                cache,
                batch.slot_mapping,
                out=act.query,
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

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        backend: Backend,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        max_model_len: int | None = None,
        max_tokens: int = 0,
        progress: bool = True,
    ) -> Qwen3Model:
        """Load a Hugging Face folder: config.json and safetensors, checked against each other before anything is
        loaded.

        Errors as `ModelConfig.from_folder`, `Checkpoint` and `resolve_dtype`; the rest as `load`.
        """
        source = ModelSource.from_folder(folder)
        return cls.load(
            source.config,
            source.tensors,
            backend,
            dtype=resolve_dtype(dtype, source.dtype, device=device, fast_bfloat16=backend.fast_bfloat16),
            device=device,
            max_model_len=max_model_len,
            max_tokens=max_tokens,
            progress=progress,
        )

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        source: TensorSource,
        backend: Backend,
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        max_model_len: int | None = None,
        max_tokens: int = 0,
        progress: bool = True,
    ) -> Qwen3Model:
        """Hand every weight of `source` to `backend`, one matrix at a time.

        max_model_len: positions in the rotary table (None = what the config is made for). max_tokens: size the
        buffers for steps of this many tokens now; larger steps grow them. progress: a bar on stderr if that is a
        terminal.

        Beyond the packed weights, at most the tensors of one layer are in memory. The embedding table, which is
        larger than a layer, comes first: while it exists twice, nothing else does.
        """
        device = torch.device(device)
        weights = _WeightLoader(source, backend, config, dtype, device)
        with tqdm(
            total=config.num_hidden_layers + 1,
            desc="Loading weights",
            unit="layer",
            leave=False,
            disable=not (progress and sys.stderr.isatty()),
        ) as bar:
            embedding = weights.linear(EMBEDDING, use="both" if config.tie_word_embeddings else "embed")
            head = embedding if config.tie_word_embeddings else weights.linear(HEAD)
            bar.update()
            layers = []
            for index in range(config.num_hidden_layers):
                layers.append(weights.layer(layer_prefix(index)))
                bar.update()
        return cls(
            config,
            backend,
            dtype=dtype,
            device=device,
            embedding=embedding,
            layers=layers,
            final_norm=weights.norm(FINAL_NORM),
            head=head,
            max_model_len=max_model_len or config.max_context,
            max_tokens=max_tokens,
        )


Use = Literal["linear", "embed", "both"]  # of `Backend.pack_linear`


class _WeightLoader:
    """Fetches tensors, converts and stacks them, and hands them to the back end."""

    def __init__(
        self, source: TensorSource, backend: Backend, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source, self._backend, self._config = source, backend, config
        self._dtype, self._device = dtype, device
        self._staging = torch.empty(0, dtype=dtype, device=device)

    def layer(self, prefix: str) -> Layer:
        biased = ("qkv", "out") if self._config.attention_bias else ()
        linears = {
            field: self.linear(
                *(f"{prefix}{part}.weight" for part in parts),
                biases=[f"{prefix}{part}.bias" for part in parts] if field in biased else [],
                gated=field == "gate_up",
            )
            for field, parts in LAYER_LINEARS.items()
        }
        norms = {field: self.norm(f"{prefix}{name}.weight") for field, name in LAYER_NORMS.items()}
        return Layer(
            attention_norm=norms["attention_norm"],
            qkv=linears["qkv"],
            query_norm=norms["query_norm"],
            key_norm=norms["key_norm"],
            out=linears["out"],
            mlp_norm=norms["mlp_norm"],
            gate_up=linears["gate_up"],
            down=linears["down"],
        )

    def linear(
        self, *weights: str, biases: Sequence[str] = (), gated: bool = False, use: Use = "linear"
    ) -> PackedLinear:
        bias = self._own(biases) if biases else None
        return self._backend.pack_linear(self._weight(weights), bias, gated=gated, use=use)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._own([name]), self._config.rms_norm_eps)

    def _weight(self, names: Sequence[str]) -> Tensor:
        """[sum of rows, in] for `pack_linear`: a view of the file, or a reused buffer, if the back end copies anyway.

        Fresh memory costs more than the copy into it (a page fault every 4 KiB), hence the reuse.
        """
        if not self._backend.copies_weights:
            return self._own(names)
        if len(names) == 1:
            return self._source.tensor(names[0]).to(self._device, self._dtype)
        return self._stack(names, self._reuse)

    def _own(self, names: Sequence[str]) -> Tensor:
        """The tensors on top of each other in memory of their own, independent of the file."""
        return self._stack(names, lambda shape: torch.empty(shape, dtype=self._dtype, device=self._device))

    def _stack(self, names: Sequence[str], allocate: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        parts = [self._source.tensor(name) for name in names]
        stacked = allocate((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        start = 0
        for part in parts:
            stacked[start : start + part.shape[0]].copy_(part)  # converts and moves to the device on the way
            start += part.shape[0]
        return stacked

    def _reuse(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        if self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=self._dtype, device=self._device)
        return self._staging[:size].view(shape)
