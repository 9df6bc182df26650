"""Our side of the comparison: back ends that pass every call on and look at what goes in and out.

The model reaches kernels only through its back end, so nothing in the model has to know that it is being watched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import (
    AttentionBatch,
    AttentionMetadata,
    Backend,
    PackedLinear,
    QKNormRoPE,
    RMSNorm,
    RotaryTable,
)
from minipaged.ops.forwarding import ForwardingBackend
from minipaged.verify.judge import ErrorFigures, measure
from minipaged.verify.oracle import EMBEDDING_LAYER, Trace

if TYPE_CHECKING:
    from minipaged.model.qwen3 import Qwen3Model


@contextmanager
def observed(model: Qwen3Model, observer: Backend) -> Iterator[None]:
    """While the block runs, the model's kernel calls go to `observer`."""
    inner = model.backend
    model.backend = observer
    try:
        yield
    finally:
        model.backend = inner


class LogitsTap(ForwardingBackend):
    """Keeps a copy of what the output head computed last, float32 [R, V]."""

    def __init__(self, model: Qwen3Model) -> None:
        super().__init__(model.backend)
        self._head = model.head
        self.logits: Tensor | None = None

    def linear(self, x: Tensor, w: PackedLinear, **options: Any) -> Tensor:
        result = self.inner.linear(x, w, **options)
        if w is self._head:
            self.logits = result.detach().float().cpu().clone()
        return result


NORM_BEFORE = {"qkv": "input_norm", "gate_up": "post_norm", "head": "final_norm"}
PRODUCT = {"o_proj": "o_proj", "down": "mlp_down"}
RESULT = {"o_proj": "hidden_mid", "gate_up": "mlp_gate_up", "down": "hidden_out"}


class LayerObserver(ForwardingBackend):
    """Follows one forward pass, operation by operation, beside a trace of Hugging Face.

    tokens: which rows of the trace the pass computes, in batch order. With `force`, each result is replaced by
    Hugging Face's before the model goes on: every operation is then judged alone, on the reference's own inputs, and an
    error is found where it is made instead of everywhere behind it. Without, errors add up as in real use.
    `figures[layer, op]` are the errors, in order of execution.
    """

    def __init__(self, model: Qwen3Model, trace: Trace, batch: AttentionBatch, tokens: Tensor, *, force: bool) -> None:
        super().__init__(model.backend)
        self._trace, self._batch, self._tokens, self._force = trace, batch, tokens, force
        self._layer = 0
        self._stages = {
            id(linear): (index, stage)
            for index, layer in enumerate(model.layers)
            for stage, linear in (
                ("qkv", layer.qkv),
                ("o_proj", layer.out),
                ("gate_up", layer.gate_up),
                ("down", layer.down),
            )
        }
        self._stages[id(model.head)] = len(model.layers), "head"
        self.figures: dict[tuple[int, str], ErrorFigures] = {}

    # -- bookkeeping

    def _reference(self, name: str, layer: int | None = None) -> Tensor:
        return self._trace.values[self._layer if layer is None else layer, name][self._tokens]

    def _see(self, op: str, ours: Tensor, *, rows: Tensor | None = None, layer: int | None = None) -> None:
        """Record the error of `op`; rows that are not in the mask `rows` were lost before and are not this
        operation's fault."""
        key = self._layer if layer is None else layer, op
        reference = self._reference(op, layer)
        if rows is not None:
            ours, reference = _masked(ours.reshape(reference.shape), rows), _masked(reference, rows)
        self.figures[key] = measure(ours, reference)

    def _forced(self, name: str, result: Tensor, layer: int | None = None) -> Tensor:
        if self._force:
            result.copy_(self._reference(name, layer).reshape(result.shape))
        return result

    # -- the calls of a forward pass

    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        result = self.inner.embed(token_ids, w, out=out)
        self._see("embedding", result, layer=EMBEDDING_LAYER)
        return self._forced("embedding", result, EMBEDDING_LAYER)

    def linear(self, x: Tensor, w: PackedLinear, **options: Any) -> Tensor:
        self._layer, stage = self._stages[id(w)]
        norm: RMSNorm | None = options.get("norm")
        if norm is not None:  # fused into the projection: the norm alone first
            self._see(NORM_BEFORE[stage], self.inner.rms_norm(x, norm))
        if options.get("residual") is not None:  # likewise the product without the residual, which could hide its error
            self._see(PRODUCT[stage], self.inner.linear(x, w))
        result = self.inner.linear(x, w, **options)
        if stage == "head":
            self.figures[self._layer, "logits"] = measure(result, self._trace.logits[self._tokens])
        elif stage == "qkv":
            names = ("q_proj", "k_proj", "v_proj")
            widths = [self._reference(name).shape[1] for name in names]
            for name, part in zip(names, torch.split(result, widths, dim=-1), strict=True):
                self._see(name, part)
                self._forced(name, part)
        else:
            self._see(RESULT[stage], result)
            self._forced(RESULT[stage], result)
        return result

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
        expected_value = rotary.split(qkv)[2].flatten(1).to(cache.dtype, copy=True)

        # The norms alone: the same kernel with a rotation by zero, into a pool of its own.
        still = RotaryTable(torch.ones_like(rotary.rope.cos[:1]), torch.zeros_like(rotary.rope.sin[:1]))
        norms = self.inner.pack_rotary(replace(rotary, rope=still, data=None))
        blank = PagedKVCache(*cache.key_cache.shape, dtype=cache.dtype, device=cache.device)
        blank.fill_(float("nan"))
        query = self.inner.qk_norm_rope_write(qkv.clone(), norms, blank, torch.zeros_like(positions), slot_mapping)
        key, value = self._read_back(blank)
        self._see("q_norm", query)
        self._see("k_norm", key, rows=_same_bits(value, expected_value) & key.isfinite().all(1))

        # The real call. Values pass through unchanged, so they tell where each token's K and V went.
        self._clear(cache, slot_mapping)
        before = [pool.clone() for pool in (cache.key_cache, cache.value_cache)]
        result = self.inner.qk_norm_rope_write(qkv, rotary, cache, positions, slot_mapping, out=out)
        key, value = self._read_back(cache)
        arrived = _same_bits(value, expected_value) & key.isfinite().all(1)
        self._see("q_rope", result)
        self._see("k_rope", key, rows=arrived)
        stray = _changed_slots(cache, before) - set(slot_mapping.tolist())
        self.figures[self._layer, "kv_write"] = _write_figures(arrived, bool(stray))
        self._forced("q_rope", result)
        if self._force:
            for pool, old, name in zip((cache.key_cache, cache.value_cache), before, ("k_rope", "v_proj"), strict=True):
                pool.copy_(old)
                _scatter(pool, slot_mapping, self._reference(name))
        return result

    def attention(self, query: Tensor, cache: PagedKVCache, plan: AttentionMetadata, **options: Any) -> Tensor:
        result = self.inner.attention(query, cache, plan, **options)
        self._see("attention", result)
        return self._forced("attention", result)

    # -- the pool

    def _read_back(self, cache: PagedKVCache) -> tuple[Tensor, Tensor]:
        """K and V [T, Hkv * D] of the tokens of this pass, found through the block tables as attention finds them."""
        keys, values = [], []
        starts = self._batch.query_start_loc.tolist()
        for row, length in enumerate(self._batch.seq_lens.tolist()):
            key, value = cache.gather(self._batch.block_tables[row], length)
            first = length - (starts[row + 1] - starts[row])
            keys.append(key[first:].flatten(1))
            values.append(value[first:].flatten(1))
        return torch.cat(keys), torch.cat(values)

    @staticmethod
    def _clear(cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """Nothing in the slots about to be written: a write that does not happen shows."""
        nothing = torch.full((len(slot_mapping), cache.key_cache.shape[1] * cache.key_cache.shape[3]), torch.nan)
        _scatter(cache.key_cache, slot_mapping, nothing)
        _scatter(cache.value_cache, slot_mapping, nothing)


def _scatter(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows [T, Hkv * D] into slots [T] of a pool [N, Hkv, Bs, D]."""
    _, heads, block_size, head_dim = pool.shape
    pool[slots // block_size, :, slots % block_size] = rows.reshape(-1, heads, head_dim).to(pool)


def _changed_slots(cache: PagedKVCache, before: Sequence[Tensor]) -> set[int]:
    """Flat slots whose K or V differs from the earlier copies, bit for bit."""
    changed = torch.zeros(cache.key_cache.shape[0], cache.key_cache.shape[2], dtype=torch.bool)
    for pool, old in zip((cache.key_cache, cache.value_cache), before, strict=True):
        changed |= ~((pool == old) | (pool.isnan() & old.isnan())).all(3).all(1).cpu()
    return set(changed.flatten().nonzero().flatten().tolist())


def _write_figures(arrived: Tensor, stray: bool) -> ErrorFigures:
    """A write is right or wrong: infinite for tokens whose K/V is not where their block table says, and for a write
    to a foreign slot."""
    lost = tuple(0.0 if ok else math.inf for ok in arrived.tolist())
    if stray and not any(lost):
        lost = (math.inf,) * len(lost)  # which of them went astray cannot be told
    error = math.inf if any(lost) else 0.0
    return ErrorFigures(error, lost, error)


def _masked(values: Tensor, rows: Tensor) -> Tensor:
    """Rows outside the mask set to zero, so that they count as equal and token numbers stay."""
    return torch.where(rows.to(values.device)[:, None], values, 0.0)


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """bool [T]: rows that are equal bit for bit (NaN equals NaN)."""
    return ((a == b) | (a.isnan() & b.isnan())).all(dim=1)
