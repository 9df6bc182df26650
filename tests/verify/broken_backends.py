"""Back ends with one fault each, of kinds that engines have really had; `verify` must find each and say where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch, AttentionMetadata, PackedLinear, QKNormRoPE, RMSNorm
from minipaged.ops.torch.backend import TorchBackend


class RopeBeforeNorm(TorchBackend):
    """C27: rotates first and normalises afterwards; with norm weights of 1 the two are the same."""

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
        cos, sin = rotary.rope.cos[positions, None], rotary.rope.sin[positions, None]

        def rotate(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

        query, key, value = rotary.split(qkv)
        assert rotary.q_norm is not None
        assert rotary.k_norm is not None
        cache.write(self.rms_norm(rotate(key), rotary.k_norm), value.contiguous(), slot_mapping)
        query = self.rms_norm(rotate(query), rotary.q_norm)
        return query if out is None else out.copy_(query)


class NoQueryNorm(TorchBackend):
    """C27: queries are not normalised at all."""

    def pack_rotary(self, rotary: QKNormRoPE) -> QKNormRoPE:
        assert rotary.q_norm is not None
        flat = RMSNorm(torch.ones_like(rotary.q_norm.weight), rotary.q_norm.eps)
        return super().pack_rotary(replace(rotary, q_norm=flat))


class TiledHeads(TorchBackend):
    """C23: query head q reads kv head q % Hkv instead of q // (Hq / Hkv)."""

    def attention(
        self,
        query: Tensor,
        cache: Any,
        plan: AttentionMetadata,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        heads = cache.key_cache.shape[1]
        order = sorted(range(query.shape[1]), key=lambda q: (q % heads, q))
        result = torch.empty_like(query)
        result[:, order] = super().attention(query[:, order].contiguous(), cache, plan, scale=scale)
        return result if out is None else out.copy_(result)


class UpperLeftMask(TorchBackend):
    """C22: the causal mask starts at key 0 although earlier tokens are cached; a whole prompt does not show it."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        queries = batch.query_start_loc.diff()
        lengths = torch.where(queries > 1, queries, batch.seq_lens)
        return super().plan(replace(batch, seq_lens=lengths, max_seq_len=int(lengths.max())))


class StaleDecode(TorchBackend):
    """C02: decode reads one token less than there is."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        queries = batch.query_start_loc.diff()
        lengths = torch.where(queries == 1, batch.seq_lens - 1, batch.seq_lens)
        return super().plan(replace(batch, seq_lens=lengths))


class _MovedSlots(TorchBackend):
    def qk_norm_rope_write(self, *args: Any, **options: Any) -> Tensor:
        *others, slots = args
        slots = slots.clone()
        self.move(slots)
        return super().qk_norm_rope_write(*others, slots, **options)

    def move(self, slots: Tensor) -> None:
        raise NotImplementedError


class OneWrongSlot(_MovedSlots):
    """C01: the K/V of the sixth token of a step goes where token 2's is, and token 2's is gone."""

    def move(self, slots: Tensor) -> None:
        if len(slots) > 5:
            slots[5] = slots[2]


class SwappedSlots(_MovedSlots):
    """Two tokens of a step in each other's slots: nothing is missing, nothing is foreign."""

    def move(self, slots: Tensor) -> None:
        if len(slots) > 5:
            slots[[3, 5]] = slots[[5, 3]]


class SkippedDecodeWrite(_MovedSlots):
    """Steps of one token per sequence write nothing."""

    def move(self, slots: Tensor) -> None:
        if len(slots) == 2:
            slots[:] = -1


class StrayWrite(TorchBackend):
    """C20: besides its own slots, a step writes the last slot of the pool (where -1 would wrap to)."""

    def qk_norm_rope_write(self, *args: Any, **options: Any) -> Tensor:
        cache = args[2]
        cache.key_cache[-1, :, -1] = 1.0
        return super().qk_norm_rope_write(*args, **options)


class CorruptWeight(TorchBackend):
    """One element of the n-th matrix is off. Order: embedding, then qkv, o, gate and up, down of each layer."""

    def __init__(self, number: int, row: int = 3) -> None:
        super().__init__()
        self._number, self._row, self._packed = number, row, 0

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, **options: Any) -> PackedLinear:
        weight = weight.clone()
        if self._packed == self._number:
            weight[self._row, 5] += 0.05
        self._packed += 1
        return super().pack_linear(weight, bias, **options)


class NaNLogits(TorchBackend):
    """C21: one NaN in the output of every head, which no argmax may hide."""

    def linear(self, x: Tensor, w: PackedLinear, **options: Any) -> Tensor:
        result = super().linear(x, w, **options)
        if w.out_features == 320:
            result[:, 7] = float("nan")
        return result


class Coarse(TorchBackend):
    """bfloat16 with attention results that are 3 % too large: small enough to pass for rounding at first sight."""

    def attention(self, *args: Any, **options: Any) -> Tensor:
        return super().attention(*args, **options).mul_(1.03)


class LeaksBetweenRows(TorchBackend):
    """Logits depend on how many rows are computed together, by more than any summation order explains."""

    def linear(self, x: Tensor, w: PackedLinear, **options: Any) -> Tensor:
        result = super().linear(x, w, **options)
        return result.mul_(1 + 1e-4) if len(x) > 1 and w.out_features == 320 else result


class SaysInvariant(TorchBackend):
    """Promises equal bits without keeping the promise: one row is computed by another summation than several."""

    batch_invariant = True

    def linear(self, x: Tensor, w: PackedLinear, **options: Any) -> Tensor:
        result = super().linear(x, w, **options)
        return result.mul_(1 + 2e-7) if len(x) > 1 and w.out_features == 320 else result
