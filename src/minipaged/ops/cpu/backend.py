"""Back end "cpu": the C++ kernels of `native/`, called through ctypes (which releases the interpreter lock).

Logits are bit-identical whatever the batch: every output element is one chain of operations in a fixed order
(`batch_invariant`). bfloat16 and float32 are supported. Each call packs its arguments into one small struct; the
layouts are in `native_arguments`, packed weights in `native_weights`.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minipaged.errors import BackendUnavailableError
from minipaged.ops.backend import AttentionBatch, AttentionPlan, Backend, PackedLinear, RMSNorm, RotaryTable
from minipaged.ops.cpu.arguments import (
    ATTENTION,
    EMBED,
    LINEAR,
    RMS_NORM,
    ROPE_WRITE,
    TYPES,
    CacheStruct,
    as_flat,
    as_rows,
    bind_batch,
    describe_cache,
)
from minipaged.ops.cpu.library import check, huge_page_tensor, instruction_sets, load_library, unavailable_reason
from minipaged.ops.cpu.probes import NativeProbes
from minipaged.ops.cpu.weights import WeightStruct, pack
from minipaged.ops.torch.backend import TorchBackend

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache

ISA_VARIABLE = "MINIPAGED_CPU_ISA"


class NativeBackend(Backend):
    """Kernels in C++. `isa`, or the environment variable MINIPAGED_CPU_ISA, picks an instruction set by name."""

    name = "cpu"
    batch_invariant = True
    fast_bfloat16 = True
    copies_weights = True
    row_padding_bytes = 64  # rows a multiple of 4 KiB apart would meet in the same sets of the L1 cache

    def __init__(self, *, threads: int | None = None, isa: str | None = None) -> None:
        isa = isa or os.environ.get(ISA_VARIABLE, "")
        found = load_library().mp_find(isa.encode())
        if not found:
            raise BackendUnavailableError(
                f"{ISA_VARIABLE}={isa}: not an instruction set that runs here; available: "
                + ", ".join(name for name, runs in instruction_sets().items() if runs)
            )
        self._kernels = found.contents
        self.isa: str = self._kernels.name.decode()
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.threads = threads or torch.get_num_threads()
        self._torch: TorchBackend | None = None
        self._caches: weakref.WeakKeyDictionary[PagedKVCache, CacheStruct] = weakref.WeakKeyDictionary()
        # Bound once: a lookup in the ctypes structure builds a new function object each time.
        self._linear, self._attention = self._kernels.linear, self._kernels.attention
        self._rope_write, self._rms_norm = self._kernels.rope_write, self._kernels.rms_norm
        self._embed, self._pack = self._kernels.embed, self._kernels.pack
        self.probes = NativeProbes(self._kernels, self.threads)
        self.empty_call = self._kernels.nothing  # for benchmarks: what a call costs by itself

    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        use: Literal["linear", "embed", "both"] = "linear",
    ) -> PackedLinear:
        """Take over weight [out, in]. Types other than bfloat16 are kept in float32. One copy serves all uses."""
        return pack(self._pack, weight, bias, gated=gated, threads=self.threads)

    def linear(
        self,
        x: Tensor,
        w: PackedLinear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        act: Literal["silu_mul"] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """act(norm(x) @ weight.T + bias) + residual, rounded once. `out` may be float32 where weights are bfloat16."""
        data: WeightStruct = w.data
        rows, features = x.shape
        width = w.out_features // 2 if w.gated else w.out_features
        if features != w.in_features or w.gated != (act == "silu_mul"):
            raise ValueError(f"x has {features} features, the weight {w.in_features}; gated={w.gated} with act={act!r}")
        if out is None:
            out = torch.empty((rows, width), dtype=x.dtype)
        elif out.shape != (rows, width):
            raise ValueError(f"out has shape {tuple(out.shape)}, needed {(rows, width)}")
        x = as_rows(x, data.dtype)
        result = out if out.stride(1) == 1 and out.dtype in TYPES else torch.empty((rows, width), dtype=data.dtype)
        weight = None if norm is None else as_rows(norm.weight, data.dtype)
        if residual is not None:
            if residual.shape != out.shape:
                raise ValueError(f"residual has shape {tuple(residual.shape)}, needed {(rows, width)}")
            residual = as_rows(residual, result.dtype)
        code = self._linear(
            LINEAR.pack(
                data.address,
                x.data_ptr(),
                x.stride(0),
                rows,
                0 if weight is None else weight.data_ptr(),
                0.0 if norm is None else norm.eps,
                0 if residual is None else residual.data_ptr(),
                0 if residual is None else residual.stride(0),
                result.data_ptr(),
                result.stride(0),
                TYPES[result.dtype],
                self.threads,
            )
        )
        if code:
            check(code)
        return out if result is out else out.copy_(result)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """Rows of a packed, ungated weight."""
        data: WeightStruct = w.data
        if w.gated:
            raise ValueError("a gated weight has no embedding rows")
        if token_ids.dtype != torch.int64 or token_ids.dim() != 1:
            raise TypeError(f"token_ids must be int64 [T], not {token_ids.dtype} {tuple(token_ids.shape)}")
        token_ids = token_ids.contiguous()
        count = token_ids.shape[0]
        direct = out is not None and out.dtype == data.dtype and out.stride(1) == 1
        result = out if out is not None and direct else torch.empty((count, w.in_features), dtype=data.dtype)
        if result.shape != (count, w.in_features):
            raise ValueError(f"out has shape {tuple(result.shape)}, needed {(count, w.in_features)}")
        check(
            self._embed(
                EMBED.pack(data.address, token_ids.data_ptr(), count, result.data_ptr(), result.stride(0), self.threads)
            )
        )
        return result if out is None or direct else out.copy_(result)

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension, any leading dimensions."""
        size = x.shape[-1]
        if x.dtype not in TYPES:
            return self._other().rms_norm(x, norm, out=out)
        rows = as_rows(x.reshape(-1, size), x.dtype)
        weight = as_rows(norm.weight, x.dtype)
        direct = out is not None and out.dtype == x.dtype and out.dim() == 2 and out.stride(1) == 1
        result = out if out is not None and direct else torch.empty(rows.shape, dtype=x.dtype)
        if out is not None and out.shape != x.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, needed {tuple(x.shape)}")
        check(
            self._rms_norm(
                RMS_NORM.pack(
                    rows.data_ptr(),
                    rows.stride(0),
                    rows.shape[0],
                    size,
                    weight.data_ptr(),
                    norm.eps,
                    result.data_ptr(),
                    result.stride(0),
                    TYPES[x.dtype],
                    self.threads,
                )
            )
        )
        if out is None:
            return result.view(x.shape)
        return out if direct else out.copy_(result.view(x.shape))

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        rope: RotaryTable,
        positions: Tensor,
        cache: PagedKVCache,
        slot_mapping: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Backend`. Slots outside the pool are skipped, as -1 is; the engine checks them where it builds them."""
        c = self._cache(cache)
        if c is None:
            return self._other().qk_norm_rope_write(qkv, q_norm, k_norm, rope, positions, cache, slot_mapping, out=out)
        tokens, features = qkv.shape
        heads = features // c.head_dim - 2 * c.num_kv_heads
        shape = (tokens, heads, c.head_dim)
        if heads <= 0 or features % c.head_dim:
            raise ValueError(f"qkv has {features} features: not (Hq + 2 * {c.num_kv_heads}) heads of {c.head_dim}")
        if positions.shape[0] != tokens or slot_mapping.shape[0] != tokens:
            raise ValueError(f"{tokens} tokens, but {positions.shape[0]} positions and {slot_mapping.shape[0]} slots")
        if out is not None and out.shape != shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, needed {shape}")
        qkv = as_rows(qkv, c.dtype)
        q_weight, k_weight = as_rows(q_norm.weight, c.dtype), as_rows(k_norm.weight, c.dtype)
        cos, sin = as_flat(rope.cos, torch.float32), as_flat(rope.sin, torch.float32)
        if cos.shape[1] != c.head_dim // 2 or sin.shape != cos.shape:
            raise ValueError(
                f"rotary tables {tuple(cos.shape)} and {tuple(sin.shape)} do not fit head_dim {c.head_dim}"
            )
        if not q_weight.shape == k_weight.shape == (c.head_dim,):
            raise ValueError(
                f"norm weights {tuple(q_weight.shape)} and {tuple(k_weight.shape)} do not fit head_dim {c.head_dim}"
            )
        positions, slot_mapping = as_flat(positions, torch.int64), as_flat(slot_mapping, torch.int64)
        direct = out is not None and out.dtype == c.dtype and out.stride(2) == 1 and out.stride(1) == c.head_dim
        query = out if out is not None and direct else torch.empty(shape, dtype=c.dtype)
        code = self._rope_write(
            ROPE_WRITE.pack(
                qkv.data_ptr(),
                qkv.stride(0),
                tokens,
                heads,
                q_weight.data_ptr(),
                k_weight.data_ptr(),
                q_norm.eps,
                k_norm.eps,
                cos.data_ptr(),
                sin.data_ptr(),
                cos.shape[0],
                positions.data_ptr(),
                slot_mapping.data_ptr(),
                c.address,
                query.data_ptr(),
                query.stride(0),
                self.threads,
            )
        )
        if code:
            check(code)
        return query if out is None or direct else out.copy_(query)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Bind the addresses of a step's batch; the tensors must stay alive and unchanged until the step ends."""
        kept, data = bind_batch(batch)
        return AttentionPlan(kept, data)

    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal paged attention; see `Backend`. The result's rows lie 64 bytes further apart than their length."""
        c, b = self._cache(cache), plan.data
        if c is None or query.dtype != c.dtype or (scale is not None and scale < 0):
            other = self._other()
            return other.attention(query, cache, other.plan(plan.batch), scale=scale, out=out)
        tokens, heads, dim = query.shape
        if dim != c.head_dim or heads < 1 or heads % c.num_kv_heads or tokens < b.tokens:
            raise ValueError(
                f"query {tuple(query.shape)} does not fit: the cache has {c.num_kv_heads} heads of {c.head_dim}, "
                f"the batch {b.tokens} tokens"
            )
        if scale is None:
            scale = dim**-0.5
        if out is None:
            stride = heads * dim + self.row_padding_bytes // query.dtype.itemsize
            out = torch.empty((tokens, stride), dtype=query.dtype).as_strided((tokens, heads, dim), (stride, dim, 1))
        elif out.shape != query.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, needed {tuple(query.shape)}")
        query = as_rows(query, c.dtype)
        result = out if out.dtype == c.dtype and out.stride(2) == 1 else torch.empty(query.shape, dtype=c.dtype)
        code = self._attention(
            ATTENTION.pack(
                b.address,
                c.address,
                query.data_ptr(),
                query.stride(0),
                query.stride(1),
                heads,
                result.data_ptr(),
                result.stride(0),
                result.stride(1),
                scale,
                self.threads,
            )
        )
        if code:
            check(code)
        return out if result is out else out.copy_(result)

    def _other(self) -> TorchBackend:
        """For what the kernels do not do: float16 or mixed types, odd head dimensions, negative scales."""
        if self._torch is None:
            self._torch = TorchBackend()
        return self._torch

    def _cache(self, cache: PagedKVCache) -> CacheStruct | None:
        """The C struct of a cache, made once and again only if its memory moved; None if no kernel takes it."""
        known = self._caches.get(cache)
        key, value = cache.key_cache, cache.value_cache
        if known is not None and known.key_pointer == key.data_ptr() and known.value_pointer == value.data_ptr():
            return known
        described = describe_cache(cache)
        if described is not None:
            self._caches[cache] = described
        return described


__all__ = [
    "ISA_VARIABLE",
    "NativeBackend",
    "huge_page_tensor",
    "instruction_sets",
    "load_library",
    "unavailable_reason",
]
