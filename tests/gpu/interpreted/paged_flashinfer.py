"""A stand-in for the package flashinfer: its two paged wrappers, computed in float64 from pages, and strict about what
they are given. Signatures and meaning from https://docs.flashinfer.ai (flashinfer.decode, flashinfer.prefill).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    plans = 0  # of all wrappers of the class

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND", "our blocks are [heads, slots, head_dim]"
        self._planned: dict[str, Any] | None = None

    def _plan(
        self, query_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, heads: int, kv_heads: int,
        head_dim: int, page_size: int, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        type(self).plans += 1
        for tensor in (query_indptr, indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
        assert len(query_indptr) == len(indptr) == len(last_page_len) + 1
        assert indptr[0] == query_indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert (indptr.diff() > 0).all()
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert heads % kv_heads == 0
        self._planned = {
            "queries": query_indptr.tolist(), "pages": [indices[a:b].tolist() for a, b in pairwise(indptr.tolist())],
            "last": last_page_len.tolist(), "q": (heads, head_dim), "kv": (kv_heads, page_size, head_dim),
            "scale": sm_scale, "dtypes": (q_data_type, kv_data_type),
        }  # fmt: skip

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        plan = self._planned
        assert plan is not None, "run before plan"
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert tuple(q.shape) == (plan["queries"][-1], *plan["q"])
        assert keys.shape[1:] == values.shape[1:] == plan["kv"]
        assert (q.dtype, keys.dtype) == plan["dtypes"]
        result = torch.empty_like(q) if out is None else out
        assert result.shape == q.shape
        assert result.dtype == q.dtype
        group = plan["q"][0] // plan["kv"][0]
        rows = zip(pairwise(plan["queries"]), plan["pages"], plan["last"], strict=True)
        for (start, stop), pages, last in rows:
            assert all(0 <= page < len(keys) for page in pages)
            length = (len(pages) - 1) * plan["kv"][1] + last
            # [pages, heads, slots, D] -> [heads, tokens, D]
            k, v = (
                c[pages].transpose(0, 1).flatten(1, 2)[:, :length].double().repeat_interleave(group, 0)
                for c in (keys, values)
            )
            scores = q[start:stop].double().transpose(0, 1) @ k.transpose(1, 2) * plan["scale"]
            sees = torch.arange(length - (stop - start), length)[:, None]
            scores = scores.masked_fill(torch.arange(length) > sees, -torch.inf)
            result[start:stop] = (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
        return result


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        queries = torch.arange(len(indptr), dtype=torch.int32)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(queries, indptr, indices, last_page_len, *shape, sm_scale, q_data_type, kv_data_type)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, *pages, *shape, sm_scale, q_data_type, kv_data_type)
