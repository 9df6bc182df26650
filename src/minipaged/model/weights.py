"""Weights on their way from a checkpoint to the back end: fetched, converted, stacked, packed, one after the other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

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
from minipaged.model.qwen3 import Layer, Qwen3Model
from minipaged.model.rope import rotary_table
from minipaged.model.source import ModelSource
from minipaged.ops.backend import Backend, PackedLinear, QKNormRoPE, RMSNorm, RotaryTable

Use = Literal["linear", "embed", "both"]  # of `Backend.pack_linear`
BIASED = ("qkv", "out")  # linears that have a bias where config.attention_bias says so


def load_folder(
    folder: str | Path,
    backend: Backend,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    max_tokens: int = 0,
    progress: bool = True,
) -> Qwen3Model:
    """A model from a Hugging Face folder: config.json and safetensors, checked against each other before anything is
    loaded.

    Errors as `ModelConfig.from_folder`, `Checkpoint` and `resolve_dtype`; the rest as `load_model`.
    """
    source = ModelSource.from_folder(folder)
    return load_model(
        source.config,
        source.tensors,
        backend,
        activation_dtype=resolve_dtype(dtype, source.dtype, device=device, fast_bfloat16=backend.fast_bfloat16),
        device=device,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        progress=progress,
    )


def load_model(
    config: ModelConfig,
    source: TensorSource,
    backend: Backend,
    *,
    activation_dtype: torch.dtype,
    device: str | torch.device = "cpu",
    max_model_len: int | None = None,
    max_tokens: int = 0,
    progress: bool = True,
) -> Qwen3Model:
    """Hand every weight of `source` to `backend`, in the form that `activation_dtype` names, one matrix at a time.

    max_model_len: positions in the rotary table (None = what the config is made for). max_tokens: size the buffers for
    steps of this many tokens now; larger steps grow them. progress: a bar on stderr if that is a terminal.

    Beyond the packed weights, at most the tensors of one layer are in memory. The embedding table, which is larger than
    a layer, comes first: while it exists twice, nothing else does.
    """
    device = torch.device(device)
    max_model_len = max_model_len or config.max_context
    weights = WeightLoader(source, backend, config, activation_dtype, device)
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
        rope = rotary_table(config, max_model_len, device)
        layers = []
        for index in range(config.num_hidden_layers):
            layers.append(weights.layer(index, rope))
            bar.update()
    return Qwen3Model(
        config,
        backend,
        activation_dtype=activation_dtype,
        device=device,
        embedding=embedding,
        layers=layers,
        final_norm=weights.norm(FINAL_NORM),
        head=head,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
    )


class WeightLoader:
    """Fetches tensors, converts them to `dtype` on `device`, stacks them, and hands them to the back end."""

    def __init__(
        self, source: TensorSource, backend: Backend, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source, self._backend, self._config = source, backend, config
        self._dtype, self._device = dtype, device
        self._staging = torch.empty(0, dtype=dtype, device=device)

    def layer(self, index: int, rope: RotaryTable) -> Layer:
        """Decoder layer `index`, from 0; all layers share one rotary table."""
        config, prefix = self._config, layer_prefix(index)
        linears = {
            field: self.linear(
                *(f"{prefix}{part}.weight" for part in parts),
                biases=[f"{prefix}{part}.bias" for part in parts] if config.attention_bias and field in BIASED else [],
                gated=field == "gate_up",
            )
            for field, parts in LAYER_LINEARS.items()
        }
        norms = {field: self.norm(f"{prefix}{name}.weight") for field, name in LAYER_NORMS.items()}
        heads = config.num_attention_heads, config.num_key_value_heads
        return Layer(
            attention_norm=norms["attention_norm"],
            qkv=linears["qkv"],
            rotary=self._backend.pack_rotary(QKNormRoPE(norms["query_norm"], norms["key_norm"], rope, *heads)),
            out=linears["out"],
            mlp_norm=norms["mlp_norm"],
            gate_up=linears["gate_up"],
            down=linears["down"],
        )

    def linear(
        self, *weights: str, biases: Sequence[str] = (), gated: bool = False, use: Use = "linear"
    ) -> PackedLinear:
        """These matrices on top of each other, with their biases."""
        bias = self._own(biases) if biases else None
        return self._backend.pack_linear(self._weight(weights), bias, gated=gated, use=use)

    def norm(self, name: str) -> RMSNorm:
        """That norm's weight, with the model's epsilon."""
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
