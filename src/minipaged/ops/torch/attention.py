"""Paged attention of the torch back end: gather tiles into persistent scratch, attend densely, merge.

A tile is the [Bs, D] of one (block, kv head). Tiles gathered head by head, block by block, are a dense [Hkv, L, D], so
one `index_select` replaces the walk through the block table. All index work happens once per step (`StepRows`).

Decode: rows are cut into splits of at most `DECODE_BYTES` of K and grouped by length, so that one call serves several
rows, scratch stays in the cache, and a long row neither pads the others nor needs more memory. Prefill: per row,
chunks of queries against their own keys (causal) and then against the history before them (all visible).
Parts are joined by `merge_attention_states`.

Dense attention (`attend`) is torch's own flash kernel on the CPU: scores, softmax and sums are float32 there for every
16-bit type. It is private to torch, so its presence is checked and its results are tried out before use; elsewhere two
float32 matrix products do the same, with the scores written out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch, Scratch
from minipaged.ops.merge import merge_attention_states

DECODE_BYTES = 4 << 20  # of K per call; as much again of V. Small enough to stay in a shared L3
PREFILL_BYTES = 16 << 20
PLAIN_QUERIES, PLAIN_KEYS = 256, 2048  # bounds the scores that `attend_plain` writes out
PADDING_TOKENS = 128  # padding up to this costs less than another call

Attended = tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Attended:
    """softmax(q k^T * scale + mask) v and its log-sum-exp, natural: [U, H, R, D] and [U, H, R].

    q [U, H, R, D], k and v [U, H, L, D]; batch strides may be 0. causal: query i sees keys 0..i (R = L).
    mask [U, 1, 1, L]: 0 or -inf, in q's dtype (the flash kernel reads another one as if it were). At least one key per
    query must be visible.
    """
    if flash_works(q.dtype, q.device.type):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result: Attended = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return result
    return attend_plain(q, k, v, scale=scale, causal=causal, mask=mask)


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> Attended:
    """As `attend`, on any device; holds the scores [U, H, R, L] in float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(dtype) * scale, k.to(dtype).transpose(-1, -2))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.matmul(weights, v.to(dtype)).to(q.dtype), lse


@functools.cache
def flash_works(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch's CPU flash kernel exists, takes this dtype and agrees with `attend_plain`; tried once."""
    if device_type != "cpu" or not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # Strides and batch expansion as the back end uses them; values that are exact in every type.
    values = torch.arange(2 * 2 * 5 * 16.0).remainder(13).sub(6).div(4).to(dtype)
    q = values.view(5, 2, 2, 16).permute(2, 1, 0, 3)
    k = values[:160].view(1, 2, 5, 16).expand(2, 2, 5, 16)
    v = values[160:].view(1, 2, 5, 16).expand(2, 2, 5, 16)
    mask = torch.zeros(2, 1, 1, 5, dtype=dtype)
    mask[1, ..., 3:] = -torch.inf
    try:
        for causal, bias in ((False, None), (True, None), (False, mask)):
            o, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=0.25)
            expected_o, expected_lse = attend_plain(q, k, v, scale=0.25, causal=causal, mask=bias)
            if not torch.allclose(o.float(), expected_o.float(), rtol=0.02, atol=0.02):
                return False
            if lse.shape != expected_lse.shape or not torch.allclose(lse.float(), expected_lse.float(), atol=1e-3):
                return False
    except RuntimeError:  # this build has no such kernel for the type
        return False
    return True


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the index tensors of a step depend on; equal for every layer of a model."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    tiles_per_block: int  # step from a block's tile to the same head's tile in the next block
    dtype: torch.dtype  # of the computation

    def tokens(self, num_bytes: int) -> int:
        """Whole blocks of K that fit into so many bytes, at least one; in tokens."""
        per_token = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return max(1, num_bytes // (per_token * self.block_size)) * self.block_size

    def tile_index(self, blocks: Tensor) -> Tensor:
        """blocks [U, n] -> flat tile numbers in the order (U, Hkv, n)."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device)
        return (blocks.long().unsqueeze(1) * self.tiles_per_block + heads[:, None]).flatten()


@dataclass(slots=True)
class DecodeGroup:
    """Splits of similar length that are attended in one call."""

    tokens: Tensor  # int64 [U], rows of query
    rows: Tensor  # int64 [U], rows of the decode state
    first: bool  # the first split of these rows; later ones are merged into the state
    tiles: Tensor  # int64 [U * Hkv * blocks]
    length: int  # of the longest
    mask: Tensor | None = None  # [U, 1, 1, length], -inf beyond a split's end
    unused: Tensor | None = None  # int64, gathered rows [D] beyond a split's end


@dataclass(slots=True)
class KeyRange:
    """Keys begin : begin + length of the tiles, one row."""

    tiles: Tensor
    begin: int
    length: int


@dataclass(slots=True)
class PrefillChunk:
    """Queries start : stop of the batch, consecutive tokens of one row, and the keys they see."""

    start: int
    stop: int
    own: KeyRange
    history: list[KeyRange]


@dataclass(slots=True)
class StepRows:
    """The rows of one step on the host, and the index tensors made from them when the geometry is first known."""

    block_tables: Tensor
    decode: list[tuple[int, int, int]]  # (row, its token in the batch, seq_len)
    prefill: list[tuple[int, int, int, int]]  # (row, first token, end, seq_len)
    empty: list[tuple[int, int]]  # tokens of rows of length 0
    decode_tokens: Tensor
    geometry: Geometry | None = None
    groups: list[DecodeGroup] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)

    @classmethod
    def of(cls, batch: AttentionBatch) -> StepRows:
        """Sort the rows of a step into decodes, prefills and empty ones."""
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        decode, prefill, empty = [], [], []
        for row, length in enumerate(lengths):
            start, stop = starts[row], starts[row + 1]
            if start == stop:
                continue
            if length == 0:
                empty.append((start, stop))
            elif stop - start == 1:
                decode.append((row, start, length))
            else:
                prefill.append((row, start, stop, length))
        tokens = torch.tensor([token for _, token, _ in decode], dtype=torch.int64, device=batch.block_tables.device)
        return cls(batch.block_tables, decode, prefill, empty, tokens)

    def prepare(self, geometry: Geometry) -> None:
        """Build the index tensors, unless the last call was for the same geometry."""
        if geometry != self.geometry:
            self.groups = list(self._decode_groups(geometry))
            self.chunks = list(self._prefill_chunks(geometry))
            self.geometry = geometry

    def _decode_groups(self, geometry: Geometry) -> Iterator[DecodeGroup]:
        limit = geometry.tokens(DECODE_BYTES)
        longest = max((length for _, _, length in self.decode), default=0)
        for begin in range(0, longest, limit):
            splits = [
                (min(length - begin, limit), index, row, token)
                for index, (row, token, length) in enumerate(self.decode)
                if length > begin
            ]
            for group in _similar_lengths(sorted(splits, reverse=True), limit):
                yield self._decode_group(geometry, group, begin)

    def _decode_group(self, geometry: Geometry, splits: list[tuple[int, int, int, int]], begin: int) -> DecodeGroup:
        block_size, device = geometry.block_size, self.block_tables.device
        lengths, rows, table_rows, tokens = torch.tensor(splits, device=device).unbind(1)
        longest, shortest = splits[0][0], splits[-1][0]
        # A shorter split repeats its last block: padding of the table itself is never looked at.
        blocks = torch.arange(-(-longest // block_size), device=device)
        last = torch.div(lengths - 1, block_size, rounding_mode="floor")
        columns = begin // block_size + torch.minimum(blocks, last[:, None])
        group = DecodeGroup(
            tokens,
            rows,
            begin == 0,
            geometry.tile_index(self.block_tables[table_rows[:, None], columns]),
            longest,
        )
        if shortest < longest:
            hidden = torch.arange(longest, device=device) >= lengths[:, None]
            group.mask = torch.zeros(hidden.shape, dtype=geometry.dtype, device=device)
            group.mask = group.mask.masked_fill_(hidden, -torch.inf)[:, None, None]
            split, token = hidden.nonzero(as_tuple=True)
            heads = torch.arange(geometry.num_kv_heads, device=device)[:, None]
            per_head = blocks.numel() * block_size
            group.unused = ((split * geometry.num_kv_heads + heads) * per_head + token).flatten()
        return group

    def _prefill_chunks(self, geometry: Geometry) -> Iterator[PrefillChunk]:
        keys = queries = geometry.tokens(PREFILL_BYTES)
        if not flash_works(geometry.dtype, self.block_tables.device.type):
            queries, keys = min(queries, PLAIN_QUERIES), min(keys, PLAIN_KEYS)
        for row, first, end, length in self.prefill:
            offset = length - end  # position = offset + token

            def key_range(begin: int, stop: int, row: int = row) -> KeyRange:
                block_size = geometry.block_size
                blocks = self.block_tables[row : row + 1, begin // block_size : -(-stop // block_size)]
                return KeyRange(geometry.tile_index(blocks), begin % block_size, stop - begin)

            for start in range(first, end, queries):
                stop = min(start + queries, end)
                context = offset + start
                history = [key_range(begin, min(begin + keys, context)) for begin in range(0, context, keys)]
                yield PrefillChunk(start, stop, key_range(context, offset + stop), history)


def _similar_lengths(splits: list[tuple[int, int, int, int]], limit: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Cut a list that is sorted by falling length where padding or size would become too large."""
    group: list[tuple[int, int, int, int]] = []
    for split in splits:
        if group:
            longest = group[0][0]
            if (len(group) + 1) * longest > limit or longest - split[0] > max(PADDING_TOKENS, longest // 8):
                yield group
                group = []
        group.append(split)
    if group:
        yield group


class PagedAttention:
    """Runs a step's groups and chunks against one layer's cache."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def run(self, query: Tensor, cache: PagedKVCache, rows: StepRows, scale: float, out: Tensor) -> None:
        """query [T, Hq, D] -> out [T, Hq, D]."""
        tiles = _Tiles(cache, self._scratch, _compute_dtype(query.dtype, cache.dtype))
        rows.prepare(tiles.geometry)
        for start, stop in rows.empty:
            out[start:stop] = 0
        if rows.decode:
            self._decode(query, tiles, rows, scale, out)
        for chunk in rows.chunks:
            self._prefill(query, tiles, chunk, scale, out)

    def _decode(self, query: Tensor, tiles: _Tiles, rows: StepRows, scale: float, out: Tensor) -> None:
        num_heads, head_dim = query.shape[1:]
        geometry = tiles.geometry
        merging = not all(group.first for group in rows.groups)
        if merging:
            dtype = torch.promote_types(geometry.dtype, torch.float32)
            state = self._scratch.get("state", (len(rows.decode), num_heads, head_dim), dtype, query.device)
            state_lse = self._scratch.get("state_lse", (len(rows.decode), num_heads), dtype, query.device)
        for group in rows.groups:
            q = query.index_select(0, group.tokens).to(geometry.dtype)
            # The query heads of one kv head become rows of one small matrix: K is read once for all of them.
            q = q.view(q.shape[0], geometry.num_kv_heads, -1, head_dim)
            k, v = tiles.gather(group.tiles, q.shape[0], group.unused)
            o, lse = attend(q, k[:, :, : group.length], v[:, :, : group.length], scale=scale, mask=group.mask)
            o = o.reshape(-1, num_heads, head_dim)
            if not merging:
                out.index_copy_(0, group.tokens, o.to(out.dtype))
                continue
            o, lse = o.to(state.dtype), lse.reshape(-1, num_heads).to(state.dtype)
            if not group.first:
                o, lse = merge_attention_states(state[group.rows], state_lse[group.rows], o, lse)
            state.index_copy_(0, group.rows, o)
            state_lse.index_copy_(0, group.rows, lse)
        if merging:
            out.index_copy_(0, rows.decode_tokens, state.to(out.dtype))

    def _prefill(self, query: Tensor, tiles: _Tiles, chunk: PrefillChunk, scale: float, out: Tensor) -> None:
        num_kv_heads = tiles.geometry.num_kv_heads

        def by_group(tokens: Tensor) -> Tensor:
            """[q, Hq, D] as [G, Hkv, q, D]: the query heads of one kv head become a batch over the same K and V."""
            return tokens.view(tokens.shape[0], num_kv_heads, -1, tokens.shape[-1]).permute(2, 1, 0, 3)

        q = by_group(query[chunk.start : chunk.stop].to(tiles.geometry.dtype))

        def attend_range(keys: KeyRange, *, causal: bool) -> tuple[Tensor, Tensor]:
            k, v = tiles.gather(keys.tiles, 1)
            visible = slice(keys.begin, keys.begin + keys.length)
            k, v = k[:, :, visible].expand(q.shape[0], -1, -1, -1), v[:, :, visible].expand(q.shape[0], -1, -1, -1)
            return attend(q, k, v, scale=scale, causal=causal)

        o, lse = attend_range(chunk.own, causal=True)
        for keys in chunk.history:
            o, lse = merge_attention_states(o, lse, *attend_range(keys, causal=False))
        by_group(out[chunk.start : chunk.stop]).copy_(o)


class _Tiles:
    """One layer's K and V as numbered tiles."""

    def __init__(self, cache: PagedKVCache, scratch: Scratch, dtype: torch.dtype) -> None:
        self._cache, self._scratch = cache, scratch
        steps = {_tiles_per_block(cache.key_cache), _tiles_per_block(cache.value_cache)}
        step = steps.pop() if len(steps) == 1 else None
        self._dense = step is not None
        self.geometry = Geometry(
            cache.num_kv_heads, cache.block_size, cache.head_dim, step or cache.num_kv_heads, dtype
        )

    def gather(self, tiles: Tensor, num_rows: int, unused: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """K and V [num_rows, Hkv, L, D] in scratch; `unused` rows become zeros, since 0 * NaN is NaN."""
        g = self.geometry
        gathered = []
        for name, tensor in (("key", self._cache.key_cache), ("value", self._cache.value_cache)):
            if self._dense:
                flat = self._scratch.get(name, (tiles.numel(), g.block_size * g.head_dim), tensor.dtype, tensor.device)
                torch.index_select(_dense_tiles(tensor, g.tiles_per_block), 0, tiles, out=flat)
            else:
                flat = tensor[tiles // g.num_kv_heads, tiles % g.num_kv_heads].contiguous()
            if flat.dtype != g.dtype:
                flat = self._scratch.get(f"{name} converted", tuple(flat.shape), g.dtype, flat.device).copy_(flat)
            if unused is not None:
                flat.view(-1, g.head_dim).index_fill_(0, unused, 0)
            gathered.append(flat.view(num_rows, g.num_kv_heads, -1, g.head_dim))
        return gathered[0], gathered[1]


def _tiles_per_block(cache: Tensor) -> int | None:
    """s such that tile (block, head) is number block * s + head in memory, or None if it is not laid out so."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    block, head, slot, element = cache.stride()
    if (head_dim > 1 and element != 1) or (block_size > 1 and slot != head_dim):
        return None
    if num_kv_heads == 1:
        return 1
    if num_blocks == 1:
        return num_kv_heads
    return block // head if head > 0 and block % head == 0 else None


def _dense_tiles(cache: Tensor, tiles_per_block: int) -> Tensor:
    """[tiles, Bs * D], a view; between two blocks there may be tiles of something else."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    stride = cache.stride(0) if num_kv_heads == 1 else cache.stride(1)
    count = (num_blocks - 1) * tiles_per_block + num_kv_heads
    return cache.as_strided((count, block_size * head_dim), (stride, 1))


def _compute_dtype(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    return torch.promote_types(query, cache)
