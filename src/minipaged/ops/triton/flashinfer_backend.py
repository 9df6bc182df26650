"""FlashInfer's attention under our contract, where its package is installed: everything else stays the Triton back end.

Our cache is its page table in layout HND: a block is a page, `block_tables` without padding and end to end are its
`indices`, `indptr` says where each sequence's pages begin, and of the last page `last_page_len` slots are filled
(https://docs.flashinfer.ai, "KV-Cache Layout in FlashInfer").
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops.backend import AttentionBatch, AttentionMetadata
from minipaged.ops.transfer import fetch, upload
from minipaged.ops.triton import backend as triton_backend
from minipaged.ops.triton.backend import TritonBackend

HEAD_DIMS = (64, 128, 256)
WORKSPACE = 128 << 20  # bytes, what its documentation recommends
TENSOR_CORE_GROUP = 4  # query heads per kv head from which its decode is faster on matrix units (its documentation)


def unavailable_reason(device: torch.device | str) -> str | None:
    """Why this back end cannot run on `device`, or None."""
    if torch.device(device).type != "cuda":
        return f"it runs on CUDA devices, not on {torch.device(device).type}"
    if "flashinfer" not in sys.modules and find_spec("flashinfer") is None:
        return "the package flashinfer is not installed (pip install flashinfer-python)"
    try:
        module = import_module("flashinfer")
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        return f"the package flashinfer cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
    missing = [name for name in _WRAPPERS.values() if not hasattr(module, name)]
    if missing:
        return f"this flashinfer has no {missing[0]}"
    return triton_backend.unavailable_reason(device)


_WRAPPERS = {"decode": "BatchDecodeWithPagedKVCacheWrapper", "prefill": "BatchPrefillWithPagedKVCacheWrapper"}


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Some rows of a batch as FlashInfer wants them; rows without a token or without a query are left out.

    int32; those that it reads on the host are there already, `indices` is on the device.
    """

    query_indptr: Tensor  # [B + 1], on the host
    indptr: Tensor  # [B + 1], on the host: of `indices`
    indices: Tensor  # [pages]
    last_page_len: Tensor  # [B], on the host, 1 to block_size
    tokens: slice | Tensor  # rows of the query that belong to these sequences, in order


@dataclass(frozen=True, slots=True, eq=False)
class _StepPages:
    triton: AttentionMetadata  # for shapes that FlashInfer does not know
    batch: AttentionBatch
    pages: dict[tuple[int, str], Pages | None]  # by block size and kind; made when the first layer asks
    lens: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]


class FlashInferBackend(TritonBackend):
    """Never chosen by itself. It splits sequences by what else is in the batch, so last bits depend on batch mates, and
    it plans each step on the host: decode steps are not captured into CUDA graphs.
    """

    name = "flashinfer"
    capturable = False

    def __init__(self) -> None:
        super().__init__()
        self._wrappers: dict[tuple[str, bool, torch.device], Any] = {}
        self._planned: dict[int, tuple[Any, ...]] = {}  # wrapper -> what it was planned for last
        self._workspaces: dict[torch.device, Tensor] = {}

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        """Waits for the lengths, which FlashInfer needs on the host."""
        both = fetch(torch.cat([batch.seq_lens.int(), batch.query_start_loc.int()]))
        count = batch.seq_lens.shape[0]
        step = _StepPages(super().plan(batch), batch, {}, both[:count], both[count:])
        return AttentionMetadata(batch, step)

    def attention(
        self,
        query: Tensor,
        cache: PagedKVCache,
        plan: AttentionMetadata,
        *,
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        step: _StepPages = plan.data
        if not takes(query, cache):
            return super().attention(query, cache, step.triton, scale=scale, out=out)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        parts = [(kind, _pages_of(step, cache.block_size, kind)) for kind in _WRAPPERS]
        covered = sum(_length(pages.tokens) for _, pages in parts if pages is not None)
        if covered < query.shape[0]:
            out.zero_()  # rows without a key
        for kind, pages in parts:
            if pages is not None:
                wrapper = self._planned_wrapper(kind, pages, query, cache, scale)
                caches = (cache.key_cache, cache.value_cache)
                rows, place = query[pages.tokens].contiguous(), out[pages.tokens]
                if isinstance(pages.tokens, slice) and place.dtype == query.dtype and place.is_contiguous():
                    wrapper.run(rows, caches, out=place)
                else:
                    out[pages.tokens] = wrapper.run(rows, caches).to(out.dtype)
        return out

    def _planned_wrapper(self, kind: str, pages: Pages, query: Tensor, cache: PagedKVCache, scale: float) -> Any:
        """One wrapper serves all layers of a step; it is planned again when something else was planned in between."""
        num_heads, num_kv_heads = query.shape[1], cache.num_kv_heads
        matrix_units = kind == "decode" and num_heads // num_kv_heads >= TENSOR_CORE_GROUP
        wrapper = self._wrapper(kind, matrix_units, query.device)
        wanted = (pages, num_heads, num_kv_heads, query.dtype, cache.dtype, scale)
        if self._planned.get(id(wrapper)) == wanted:
            return wrapper
        shape = (num_heads, num_kv_heads, cache.head_dim, cache.block_size)
        queries = () if kind == "decode" else (pages.query_indptr,)
        options = {} if kind == "decode" else {"causal": True}
        wrapper.plan(
            *queries, pages.indptr, pages.indices, pages.last_page_len, *shape,
            sm_scale=scale, q_data_type=query.dtype, kv_data_type=cache.dtype, **options,
        )  # fmt: skip
        self._planned[id(wrapper)] = wanted
        return wrapper

    def _wrapper(self, kind: str, matrix_units: bool, device: torch.device) -> Any:
        key = (kind, matrix_units, device)
        if key not in self._wrappers:
            if device not in self._workspaces:  # shared: one call runs at a time
                self._workspaces[device] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
            make = getattr(import_module("flashinfer"), _WRAPPERS[kind])
            options = {"use_tensor_cores": matrix_units} if kind == "decode" else {}
            self._wrappers[key] = make(self._workspaces[device], kv_layout="HND", **options)
        return self._wrappers[key]


def takes(query: Tensor, cache: PagedKVCache) -> bool:
    """Whether FlashInfer has kernels for this: 16-bit types, its head dimensions, K and V laid out alike."""
    return (
        query.dtype == cache.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and cache.head_dim in HEAD_DIMS
        and cache.key_cache.stride() == cache.value_cache.stride()
        and cache.key_cache.is_contiguous()
    )


def _pages_of(step: _StepPages, block_size: int, kind: str) -> Pages | None:
    """Rows of `kind` ("decode": one query each; "prefill": the others) as FlashInfer wants them; None without any."""
    key = (block_size, kind)
    if key not in step.pages:
        step.pages[key] = _make_pages(step, block_size, kind)
    return step.pages[key]


def _make_pages(step: _StepPages, block_size: int, kind: str) -> Pages | None:
    counts = np.diff(step.starts)
    wanted = counts == 1 if kind == "decode" else counts > 1
    rows = np.flatnonzero(wanted & (step.lens > 0))
    if not len(rows):
        return None
    lens, counts = step.lens[rows], counts[rows]
    num_pages = -(-lens // block_size)
    indptr, query_indptr = _offsets(num_pages), _offsets(counts)
    tables = step.batch.block_tables
    # Entry j of row b is element b * width + j of the table: padding is never looked at.
    flat = np.repeat(rows * tables.shape[1] - indptr[:-1], num_pages) + np.arange(indptr[-1])
    indices = tables.reshape(-1).index_select(0, upload(flat, tables.device)).int()
    first = step.starts[rows]
    tokens: slice | Tensor = slice(int(first[0]), int(first[0] + query_indptr[-1]))
    if not np.array_equal(first, first[0] + query_indptr[:-1]):
        picked = np.repeat(first - query_indptr[:-1], counts) + np.arange(query_indptr[-1])
        tokens = upload(picked.astype(np.int64), tables.device)
    return Pages(
        torch.from_numpy(query_indptr), torch.from_numpy(indptr), indices,
        torch.from_numpy((lens - (num_pages - 1) * block_size).astype(np.int32)), tokens,
    )  # fmt: skip


def _offsets(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _length(tokens: slice | Tensor) -> int:
    return tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)
