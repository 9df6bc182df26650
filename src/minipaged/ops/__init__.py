"""Operations on the paged cache and the back ends that implement them.

`paged_attention` holds the functions for users and tests, `backend` the interface through which the model reaches
kernels, `registry` the list of back ends. Everything loads on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipaged._lazy import lazy_exports

if TYPE_CHECKING:
    from minipaged.ops.backend import (
        AttentionBatch,
        AttentionMetadata,
        AttentionPlan,
        Backend,
        PackedLinear,
        QKNormRoPE,
        RMSNorm,
        RotaryTable,
    )
    from minipaged.ops.merge import merge_attention_states
    from minipaged.ops.paged_attention import (
        paged_attention_online,
        paged_attention_reference,
        paged_attention_varlen,
        write_kv_cache,
    )
    from minipaged.ops.registry import available_backends, get_backend

_HOME = {
    "AttentionBatch": "backend",
    "AttentionMetadata": "backend",
    "AttentionPlan": "backend",
    "Backend": "backend",
    "PackedLinear": "backend",
    "QKNormRoPE": "backend",
    "RMSNorm": "backend",
    "RotaryTable": "backend",
    "available_backends": "registry",
    "get_backend": "registry",
    "merge_attention_states": "merge",
    "paged_attention_online": "paged_attention",
    "paged_attention_reference": "paged_attention",
    "paged_attention_varlen": "paged_attention",
    "write_kv_cache": "paged_attention",
}

__all__ = [
    "AttentionBatch",
    "AttentionMetadata",
    "AttentionPlan",
    "Backend",
    "PackedLinear",
    "QKNormRoPE",
    "RMSNorm",
    "RotaryTable",
    "available_backends",
    "get_backend",
    "merge_attention_states",
    "paged_attention_online",
    "paged_attention_reference",
    "paged_attention_varlen",
    "write_kv_cache",
]

__getattr__, __dir__ = lazy_exports(__name__, {name: f"{__name__}.{module}" for name, module in _HOME.items()})
