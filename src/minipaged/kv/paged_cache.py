"""The data plane: K and V of one layer in fixed-size blocks (the article's sections 11 and 12).

A token's K lives at key_cache[block, head, offset, :] with slot = block * block_size + offset. The cache knows
nothing of sequences: who owns which block is the block manager's business.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class PagedKVCache:
    """K and V of one layer, each [num_blocks, num_kv_heads, block_size, head_dim], zeros at the start.

    dtype: None = bfloat16, or that of `storage`. storage: two tensors (views are fine) of that shape to use instead
    of allocating; their content is kept. Raises ValueError for sizes below 1 and for storage that does not fit.
    """

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        storage: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        for name, size in zip(("num_blocks", "num_kv_heads", "block_size", "head_dim"), shape, strict=True):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if storage is not None:
            self.key_cache, self.value_cache = storage
            _check_storage(self.key_cache, self.value_cache, shape, dtype)
        else:
            # Not an inference tensor, even if the engine builds it in inference mode: users write to it from anywhere.
            with torch.inference_mode(False):
                self.key_cache = _zeros(shape, dtype or torch.bfloat16, device)
                self.value_cache = _zeros(shape, dtype or torch.bfloat16, device)
        self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim = shape

    @classmethod
    def from_tensors(cls, key_cache: Tensor, value_cache: Tensor) -> PagedKVCache:
        """A cache object around two existing tensors [N, Hkv, Bs, D]; nothing is copied."""
        if key_cache.dim() != 4:
            raise ValueError(
                "key_cache must be [num_blocks, num_kv_heads, block_size, head_dim], "
                f"got {key_cache.dim()} dimensions: {tuple(key_cache.shape)}"
            )
        n, h, bs, d = key_cache.shape
        return cls(n, h, bs, d, storage=(key_cache, value_cache))

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.key_cache.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.key_cache.device

    @property
    def num_slots(self) -> int:
        """Tokens that fit: num_blocks * block_size."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.key_cache.nbytes + self.value_cache.nbytes

    def __repr__(self) -> str:
        return (
            f"PagedKVCache(num_blocks={self.num_blocks}, num_kv_heads={self.num_kv_heads}, "
            f"block_size={self.block_size}, head_dim={self.head_dim}, dtype={self.dtype}, device='{self.device}')"
        )

    @torch.no_grad()
    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor | Sequence[int]) -> None:
        """Store one token per slot: key and value [T, Hkv, D], slot_mapping int64 [T].

        Any strides; values are converted to the cache's dtype. Slot -1
        skips its token. A slot below -1 or >= num_blocks * block_size raises IndexError before anything is written.
        Two tokens with the same slot: one of them stays, which one is undefined.
        """
        slots = torch.as_tensor(slot_mapping, device=self.device)
        slots = slots if slots.numel() else slots.long()  # an empty list has no integer type of its own
        if self.check_write(key, value, slots) < 0:
            kept = slots >= 0
            slots, key, value = slots[kept], key[kept], value[kept]
        slots = slots.long()
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        offset = slots - block * self.block_size
        # [N, Bs, Hkv, D]: with both index tensors side by side the result is [T, Hkv, D], one row per token.
        self.key_cache.transpose(1, 2).index_put_((block, offset), key.to(self.dtype))
        self.value_cache.transpose(1, 2).index_put_((block, offset), value.to(self.dtype))

    def check_write(self, key: Tensor, value: Tensor, slots: Tensor) -> int:
        """Raise what `write` would raise for these arguments; otherwise the lowest slot (0 without tokens)."""
        _check_tokens("key", key, slots, self.num_kv_heads, self.head_dim)
        _check_tokens("value", value, slots, self.num_kv_heads, self.head_dim)
        if slots.numel() == 0:
            return 0
        lowest, highest = (int(bound) for bound in torch.aminmax(slots))
        if lowest < -1 or highest >= self.num_slots:
            raise IndexError(
                f"slot {lowest if lowest < -1 else highest} is outside the pool: valid slots are "
                f"0 to {self.num_slots - 1} ({self.num_blocks} blocks of {self.block_size}), "
                "or -1 to skip a token; nothing was written"
            )
        return lowest

    @torch.no_grad()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, as if all at once: {a -> b, b -> c} puts the old b into c.

        IndexError for a block outside the pool, ValueError if a destination occurs twice; then nothing is copied.
        """
        pairs = [(int(source), int(destination)) for source, destination in pairs]
        if not pairs:
            return
        self.check_copies(pairs)
        sources, destinations = zip(*pairs, strict=True)
        source_ids = torch.tensor(sources, device=self.device)
        destination_ids = torch.tensor(destinations, device=self.device)
        for cache in (self.key_cache, self.value_cache):
            cache.index_copy_(0, destination_ids, cache.index_select(0, source_ids))

    def check_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise what `copy_blocks` would raise for these pairs."""
        for block in (block for pair in pairs for block in pair):
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} is outside the pool of {self.num_blocks} blocks; nothing was copied")
        destinations = [destination for _, destination in pairs]
        if len(set(destinations)) < len(destinations):
            twice = next(block for block in destinations if destinations.count(block) > 1)
            raise ValueError(f"block {twice} is the destination of more than one copy; nothing was copied")

    @torch.no_grad()
    def gather(self, block_table: Sequence[int] | Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence in token order, [seq_len, Hkv, D] each, copied; for tests and tools.

        block_table: physical blocks in logical order; entries after the last needed one are ignored. ValueError if the
        table is too short, IndexError for a needed block outside the pool.
        """
        needed = -(-seq_len // self.block_size)
        if seq_len < 0 or len(block_table) < needed:
            raise ValueError(
                f"seq_len {seq_len} needs {needed} blocks of {self.block_size}, the block table has {len(block_table)}"
            )
        blocks = torch.as_tensor(block_table, device=self.device).reshape(-1)[:needed].long()
        for block in blocks.tolist():
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"block {block} is outside the pool of {self.num_blocks} blocks")

        def in_token_order(cache: Tensor) -> Tensor:
            tiles = cache.index_select(0, blocks).transpose(1, 2)  # [blocks, Bs, Hkv, D]
            return tiles.reshape(-1, self.num_kv_heads, self.head_dim)[:seq_len]

        return in_token_order(self.key_cache), in_token_order(self.value_cache)

    @torch.no_grad()
    def fill_(self, value: float) -> None:
        """Set every element of K and V; tests poison a cache with NaN this way."""
        self.key_cache.fill_(value)
        self.value_cache.fill_(value)

    @torch.no_grad()
    def touch(self, num_blocks: int) -> None:
        """Write zeros to the first blocks: on the CPU the pages behind a block are fetched from the system when it is
        written for the first time, and a prompt should not wait for that.
        """
        self.key_cache[:num_blocks].zero_()
        self.value_cache[:num_blocks].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that cost neither time nor memory until a block is used; `torch.zeros` would write them all."""
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A wish: fewer address translations when blocks are read all over the pool. Not every kernel grants it.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _check_storage(key: Tensor, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} storage has shape {tuple(tensor.shape)}, expected {shape}")
    if key.dtype != value.dtype or key.device != value.device:
        raise ValueError(
            f"key and value storage differ: {key.dtype} on {key.device} and {value.dtype} on {value.device}"
        )
    if not key.dtype.is_floating_point:
        raise ValueError(f"storage must be floating point, got {key.dtype}")
    if dtype is not None and key.dtype != dtype:
        raise ValueError(f"storage is {key.dtype}, but dtype={dtype} was asked for")


def _check_tokens(name: str, tokens: Tensor, slots: Tensor, num_kv_heads: int, head_dim: int) -> None:
    if slots.dim() != 1 or slots.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"slot_mapping must be int64 [T], got {slots.dtype} {tuple(slots.shape)}")
    expected = (slots.shape[0], num_kv_heads, head_dim)
    if tuple(tokens.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}, expected [T, Hkv, D] = {expected}")
