"""The tensors of a dense Qwen3 as data: names in a checkpoint, shapes, and which are stacked into one matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minipaged.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# One matrix product each per layer: field of `qwen3.Layer` -> the projections whose rows are stacked, in this order.
LAYER_LINEARS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LAYER_NORMS: dict[str, str] = {
    "attention_norm": "input_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}


class TensorSource(Protocol):
    """Where weights come from, one tensor at a time: a checkpoint on disk, or random numbers."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, on the CPU, in the source's dtype. May be a view of a file: read-only, and gone
        when dropped.
        """


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor that a checkpoint must hold."""

    name: str
    shape: tuple[int, ...]


def layer_prefix(index: int) -> str:
    """What the names of layer `index` (from 0) start with in a checkpoint."""
    return f"model.layers.{index}."


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Every tensor that `config` needs, by name: embedding first, then layer after layer. A tied head has no tensor
    of its own.
    """
    H, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * D, config.num_key_value_heads * D
    matrices = {
        "self_attn.q_proj": (q_rows, H),
        "self_attn.k_proj": (kv_rows, H),
        "self_attn.v_proj": (kv_rows, H),
        "self_attn.o_proj": (H, q_rows),
        "mlp.gate_proj": (F, H),
        "mlp.up_proj": (F, H),
        "mlp.down_proj": (H, F),
    }
    norms = {"input_layernorm": H, "self_attn.q_norm": D, "self_attn.k_norm": D, "post_attention_layernorm": H}

    found = [Parameter(EMBEDDING, (config.vocab_size, H))]
    for index in range(config.num_hidden_layers):
        prefix = layer_prefix(index)
        for name, (rows, columns) in matrices.items():
            found.append(Parameter(f"{prefix}{name}.weight", (rows, columns)))
            if config.attention_bias and name.startswith("self_attn."):
                found.append(Parameter(f"{prefix}{name}.bias", (rows,)))
        found += [Parameter(f"{prefix}{name}.weight", (size,)) for name, size in norms.items()]
    found.append(Parameter(FINAL_NORM, (H,)))
    if not config.tie_word_embeddings:
        found.append(Parameter(HEAD, (config.vocab_size, H)))
    return {parameter.name: parameter for parameter in found}


def num_weights(config: ModelConfig) -> int:
    """Numbers in all tensors of `parameters`."""
    return sum(math.prod(parameter.shape) for parameter in parameters(config).values())


def weight_bytes_per_step(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that a decode step must read: everything once, but of an untied embedding table only a row per
    token.
    """
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (num_weights(config) - unread) * itemsize
