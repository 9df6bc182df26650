"""Back end "cpu": the C++ kernels of `native/`, called through ctypes (which releases the interpreter lock).

Logits are bit-identical whatever the batch: every output element is one chain of operations in a fixed order
(`batch_invariant`). bfloat16 and float32 are supported. What outlives a call (weights, a layer's constants, a cache) is
bound to its addresses once; each call packs the rest into one small struct. Layouts: `arguments`; weights: `weights`.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minipaged.errors import BackendUnavailableError
from minipaged.ops.backend import AttentionBatch, AttentionMetadata, Backend, PackedLinear, QKNormRoPE, RMSNorm
from minipaged.ops.cpu.arguments import (
    ATTENTION,
    EMBED,
    LINEAR,
    RMS_NORM,
    ROPE_PLACES,
    ROPE_TOKENS,
    TYPES,
    BatchStruct,
    CacheStruct,
    RotaryStruct,
    as_flat,
    as_rows,
    bind_batch,
    bind_rotary,
    describe_cache,
)
from minipaged.ops.cpu.library import check, instruction_sets, load_library, unavailable_reason
from minipaged.ops.cpu.probes import NativeProbes
from minipaged.ops.cpu.weights import WeightStruct, pack
from minipaged.ops.torch.backend import TorchBackend

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache

__all__ = ["ISA_VARIABLE", "NativeBackend", "unavailable_reason"]

ISA_VARIABLE = "MINIPAGED_CPU_ISA"


class NativeBackend(Backend):
    """Kernels in C++. `isa`, or the environment variable MINIPAGED_CPU_ISA, picks an instruction set by name.

    They compute in the type of the weight or of the cache, which holds more digits than what it is computed with. Where
    it holds less (float32 queries on a bfloat16 cache), and for float16, odd head dimensions and negative scales, the
    torch back end serves: last bits then depend on the batch.
    """

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
        if x.shape[1] != w.in_features or w.gated != (act == "silu_mul"):
            raise ValueError(
                f"x is {list(x.shape)}, the weight takes {w.in_features}; gated={w.gated} with act={act!r}"
            )
        wanted = x.dtype if out is None else out.dtype
        result = _target(out, (x.shape[0], data.outputs), wanted if wanted in TYPES else data.dtype)
        x = as_rows(x, data.dtype)
        scale, eps, added, stride = 0, 0.0, 0, 0
        if norm is not None:
            weight = as_rows(norm.weight, data.dtype)
            scale, eps = weight.data_ptr(), norm.eps
        if residual is not None:
            if residual.shape != result.shape:
                raise ValueError(f"residual has shape {tuple(residual.shape)}, needed {tuple(result.shape)}")
            residual = as_rows(residual, result.dtype)
            added, stride = residual.data_ptr(), residual.stride(0)
        code = self._linear(
            LINEAR.pack(
                data.address, x.data_ptr(), x.stride(0), x.shape[0], scale, eps, added, stride,
                result.data_ptr(), result.stride(0), TYPES[result.dtype], self.threads,
            )
        )  # fmt: skip
        if code:
            check(code)
        return result if result is out else _given(result, out, wanted)

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """Rows of a packed, ungated weight."""
        data: WeightStruct = w.data
        if w.gated or token_ids.dtype != torch.int64 or token_ids.dim() != 1:
            raise TypeError(
                f"token_ids must be int64 [T], are {token_ids.dtype} {list(token_ids.shape)}; gated={w.gated}"
            )
        token_ids = token_ids.contiguous()
        result = _target(out, (token_ids.shape[0], w.in_features), data.dtype)
        code = self._embed(
            EMBED.pack(
                data.address,
                token_ids.data_ptr(),
                token_ids.shape[0],
                result.data_ptr(),
                result.stride(0),
                self.threads,
            )
        )
        if code:
            check(code)
        return result if result is out else _given(result, out, data.dtype)

    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension, any leading dimensions."""
        if x.dtype not in TYPES:
            return self._other.rms_norm(x, norm, out=out)
        rows, weight = as_rows(x.reshape(-1, x.shape[-1]), x.dtype), as_rows(norm.weight, x.dtype)
        result = _target(out if x.dim() == 2 else None, tuple(rows.shape), x.dtype)
        code = self._rms_norm(
            RMS_NORM.pack(
                rows.data_ptr(), rows.stride(0), *rows.shape, weight.data_ptr(), norm.eps,
                result.data_ptr(), result.stride(0), TYPES[x.dtype], self.threads,
            )
        )  # fmt: skip
        if code:
            check(code)
        return result if result is out else _given(result.view(x.shape), out, x.dtype)

    def pack_rotary(self, rotary: QKNormRoPE) -> QKNormRoPE:
        """Bind the addresses of a layer's constants. ValueError without norms."""
        return replace(rotary, data=bind_rotary(rotary))

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        rotary: QKNormRoPE,
        cache: PagedKVCache,
        positions: Tensor,
        slot_mapping: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Backend`. Slots outside the pool are skipped, as -1 is; the engine checks them where it builds them."""
        c = self._cache(cache, qkv.dtype)
        if c is None:
            return self._other.qk_norm_rope_write(qkv, rotary, cache, positions, slot_mapping, out=out)
        layer: RotaryStruct = rotary.data
        (tokens, features), (kv_heads, dim) = qkv.shape, layer.shape
        if c.shape != layer.shape or features != (layer.num_heads + 2 * kv_heads) * dim:
            raise ValueError(
                f"qkv {list(qkv.shape)} and a cache of {c.shape} heads of D do not fit a layer of {layer.shape}"
            )
        if not tokens == positions.shape[0] == slot_mapping.shape[0]:
            raise ValueError(f"{tokens} tokens, {positions.shape[0]} positions and {slot_mapping.shape[0]} slots")
        query = _target(out, (tokens, layer.num_heads, dim), c.dtype)
        given, qkv = qkv.dtype, as_rows(qkv, c.dtype)
        positions, slot_mapping = as_flat(positions, torch.int64), as_flat(slot_mapping, torch.int64)
        places = positions.data_ptr(), slot_mapping.data_ptr(), c.address, query.data_ptr(), query.stride(0)
        code = self._rope_write(
            ROPE_TOKENS.pack(qkv.data_ptr(), qkv.stride(0), tokens)
            + layer.parts[c.dtype]
            + ROPE_PLACES.pack(*places, self.threads)
        )
        if code:
            check(code)
        return query if query is out else _given(query, out, given)

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Bind the addresses of a step's batch; the tensors must stay alive and unchanged until the step ends."""
        return AttentionMetadata(*bind_batch(batch))

    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionMetadata,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal paged attention; see `Backend`. The result's rows lie 64 bytes further apart than their length."""
        c = self._cache(cache, query.dtype)
        if c is None or (scale is not None and scale < 0):
            return self._other.attention(query, cache, self._other.plan(plan.batch), scale=scale, out=out)
        b: BatchStruct = plan.data
        tokens, heads, dim = query.shape
        if dim != c.shape[1] or heads < 1 or heads % c.shape[0] or tokens < b.tokens:
            raise ValueError(
                f"query {list(query.shape)} does not fit a cache of {c.shape} heads of D, {b.tokens} tokens"
            )
        given = query.dtype
        if out is None:
            stride = heads * dim + self.row_padding_bytes // given.itemsize
            out = torch.empty((tokens, stride), dtype=given).as_strided((tokens, heads, dim), (stride, dim, 1))
        query, scale = as_rows(query, c.dtype), dim**-0.5 if scale is None else scale
        result = _target(out, (tokens, heads, dim), c.dtype)
        code = self._attention(
            ATTENTION.pack(
                b.address, c.address, query.data_ptr(), query.stride(0), query.stride(1), heads,
                result.data_ptr(), result.stride(0), result.stride(1), scale, self.threads,
            )
        )  # fmt: skip
        if code:
            check(code)
        return result if result is out else _given(result, out, given)

    @cached_property
    def _other(self) -> TorchBackend:
        """For what the kernels do not do."""
        return TorchBackend()

    def _cache(self, cache: PagedKVCache, dtype: torch.dtype) -> CacheStruct | None:
        """The C struct of a cache, made once and again only if its memory moved; None if no kernel takes it, or if its
        type cannot hold what is computed in `dtype`."""
        known = self._caches.get(cache)
        if known is None or known.pointers != (cache.key_cache.data_ptr(), cache.value_cache.data_ptr()):
            known = describe_cache(cache)
            if known is None:
                return None
            self._caches[cache] = known
        return known if dtype == known.dtype or torch.promote_types(dtype, known.dtype) == known.dtype else None


def _target(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Where a kernel writes: `out` if it can (rows may lie apart, each is dense), else fresh memory."""
    if out is None:
        return torch.empty(shape, dtype=dtype)
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, needed {shape}")
    dense = out.stride(-1) == 1 and (len(shape) == 2 or out.stride(1) == shape[2])
    return out if dense and out.dtype == dtype else torch.empty(shape, dtype=dtype)


def _given(result: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What the caller is given where it is not what the kernel wrote: `out`, filled, or else the result in `dtype`."""
    return result.to(dtype) if out is None else out.copy_(result)
