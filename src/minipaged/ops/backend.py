"""The one object through which the model reaches kernels.

A back end ("reference", "torch", "cpu", "triton") implements `Backend`. The model is written once against this
interface; weights are handed over once (`pack_linear`), and a step makes a handful of calls per layer.
T query tokens, B sequences, Hq / Hkv query / key-value heads, D head_dim, Bs block_size, N blocks, M table width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minipaged.kv.paged_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """weight [n] and epsilon of y = round(x / sqrt(mean(x^2) + eps)) * weight, as Hugging Face rounds it."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin, float32 [max_position, D / 2], YaRN's attention factor included.

    Rotates (x[i], x[i + D/2]) pairs (NeoX style).
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class QKNormRoPE:
    """What makes queries and cached K/V of one layer's qkv product: constants, checked here so that no call has to.

    q_norm, k_norm: over D, before the rotation; both None: heads are rotated as they are. Pass it through
    `Backend.pack_rotary` once, at load; `data` belongs to the back end. ValueError for shapes that do not fit together.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rope: RotaryTable
    num_heads: int
    num_kv_heads: int
    data: Any = None

    def __post_init__(self) -> None:
        if self.rope.cos.dim() != 2 or self.rope.sin.shape != self.rope.cos.shape:
            shapes = f"{list(self.rope.cos.shape)} and {list(self.rope.sin.shape)}"
            raise ValueError(f"cos and sin must be [max_position, D / 2] both, got {shapes}")
        weights = [list(norm.weight.shape) for norm in (self.q_norm, self.k_norm) if norm is not None]
        if weights not in ([], 2 * [[self.head_dim]]):
            raise ValueError(
                f"norms of queries and keys must both have {self.head_dim} weights or both be None: {weights}"
            )

    @property
    def head_dim(self) -> int:
        """D, as the rotary table has it."""
        return 2 * self.rope.cos.shape[1]

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of qkv [T, (Hq + 2 Hkv) D]: queries [T, Hq, D], keys and values [T, Hkv, D]."""
        value = self.num_heads + self.num_kv_heads
        heads = qkv.view(qkv.shape[0], value + self.num_kv_heads, self.head_dim)
        return heads[:, : self.num_heads], heads[:, self.num_heads : value], heads[:, value:]


@dataclass(slots=True)
class PackedLinear:
    """A weight in the back end's own layout. `data` belongs to the back end; nobody else looks inside."""

    in_features: int
    out_features: int
    gated: bool
    form: str
    """What its numbers are stored as: the name of a dtype ("bfloat16")."""
    data: Any


@dataclass(slots=True)
class AttentionBatch:
    """Which tokens one step computes and where their K/V lives; the same for every layer.

    A row (sequence) b owns queries query_start_loc[b] : query_start_loc[b + 1], which are the LAST tokens of its
    seq_lens[b] tokens. Rows with a single query come first where the caller can arrange it (decode before prefill).
    The tensors may be views of persistent buffers: valid until the step ends.
    """

    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T], -1 = do not write
    block_tables: Tensor  # int32 [B, M], anything after a row's last block
    seq_lens: Tensor  # int32 [B]
    query_start_loc: Tensor  # int32 [B + 1]
    max_query_len: int
    max_seq_len: int  # at least the largest of seq_lens
    num_decode_rows: int = 0
    """So many leading rows have exactly one query. A hint: 0 where the caller does not know."""


@dataclass(slots=True)
class AttentionMetadata:
    """What a back end derives from an `AttentionBatch` once per step and reuses in every layer."""

    batch: AttentionBatch
    data: Any = None


AttentionPlan = AttentionMetadata


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16: how forms of weights and types are named in options and reports."""
    return str(dtype).removeprefix("torch.")


class Scratch:
    """Named buffers that only grow. A fresh large tensor costs a page fault per 4 KiB, three times the copy itself.

    A buffer is valid until the next `get` of the same name and dtype. Not for use by two threads at once.
    keep_replaced: a buffer that became too small stays alive, for a captured graph may still work in it.
    """

    def __init__(self, *, keep_replaced: bool = False) -> None:
        self._keep_replaced = keep_replaced
        self._replaced: list[Tensor] = []
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of this shape."""
        size = prod(shape)
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            if buffer is not None and self._keep_replaced:
                self._replaced.append(buffer)
            # Plain tensors even under inference mode: the same buffer also serves calls outside it.
            with torch.inference_mode(False):
                buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)


class Backend(ABC):
    """Kernels behind one face. Every method that returns a tensor takes `out=` and then fills and returns it.

    Inputs may be strided views (the last dimension contiguous); a back end that needs more copies or refuses, it
    never reads wrong memory. Results have the dtype of `out` if given, else that of the input.
    """

    name: str
    batch_invariant: bool = False
    """True if a row's result is bit-identical whatever its batch mates, chunking and placement."""
    fast_bfloat16: bool = False
    """True if bfloat16 is as fast as float32 on every CPU: read half as much, computed in float32 if need be."""
    copies_weights: bool = False
    """True if `pack_linear` keeps nothing of its arguments: they may be views of a file, or buffers that are reused."""
    capturable: bool = False
    """True if `plan` looks at the numbers of a batch only, never at its tensors, and kernels read lengths and tables
    where they run: such a step can be captured into a CUDA graph, with `max_seq_len` an upper bound."""
    row_padding_bytes: int = 0
    """Added to rows of activation buffers whose stride would be a multiple of 4096 bytes, if that slows the kernels."""

    @abstractmethod
    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        use: Literal["linear", "embed", "both"] = "linear",
    ) -> PackedLinear:
        """Take over weight [out, in] in the form that its dtype names, or the one this back end has for it
        (`PackedLinear.form`). gated: rows are gate then up, [2 I, in], for `act="silu_mul"`.

        use: what will be called with it. A hint about memory only (some layouts serve both calls, some need two
        copies); every call works whatever was said here.
        """

    @abstractmethod
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
        """act(norm(x) @ weight.T + bias) + residual; x [T, in] -> [T, out], or [T, out / 2] with silu_mul.

        `residual` may be `out`.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor, w: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        """Rows of a packed weight: token_ids int64 [T] -> [T, in]. One table serves a tied head and its embedding."""

    @abstractmethod
    def rms_norm(self, x: Tensor, norm: RMSNorm, *, out: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension."""

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        """key, value [T, Hkv, D] to their slots (int64 [T], -1 skips). Outside the pool: IndexError, no write."""
        cache.write(key, value, slot_mapping)

    def pack_rotary(self, rotary: QKNormRoPE) -> QKNormRoPE:
        """Take over a layer's constants; what comes back is what `qk_norm_rope_write` wants."""
        return rotary

    @abstractmethod
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
        """qkv [T, (Hq + 2 Hkv) D] -> query [T, Hq, D]: q and k are normalised per head and rotated, k and v written.

        positions, slot_mapping int64 [T]. The cache's dtype may be another one than that of qkv.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Once per step, before the first layer."""

    @abstractmethod
    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionMetadata,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal paged attention, query and result [T, Hq, D]; scale None = 1 / sqrt(D). Empty rows give zeros."""

    def copy_blocks(self, caches: Sequence[PagedKVCache], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; all sources are read before the first write."""
        for cache in caches:
            cache.copy_blocks(pairs)
