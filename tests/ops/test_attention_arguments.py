"""What a caller can get wrong, and that the message says what it was."""

from __future__ import annotations

import pytest
import torch
from paged_case import make_case

from minipaged.ops import paged_attention_online, paged_attention_reference, paged_attention_varlen, write_kv_cache


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_c23_heads_that_do_not_divide() -> None:
    """C23: (6, 4) is refused."""
    case = make_case([5], num_heads=4, num_kv_heads=4)
    query = torch.randn(1, 6, 16)
    for call in (paged_attention_online, paged_attention_reference):
        with pytest.raises(ValueError, match="6 query heads cannot share 4 kv heads"):
            call(query, *case.decode_arguments[1:])


@pytest.mark.parametrize("block", [-1, 999])
def test_c20_a_needed_block_outside_the_pool(block: int) -> None:
    """C20: -1 must not wrap to the last block when the sequence needs it."""
    case = make_case([3, 9])
    case.block_tables[1, 2] = block
    for call in (paged_attention_online, paged_attention_reference):
        with pytest.raises(IndexError, match=rf"block_tables\[1, 2\] is {block}, outside the pool of 7 blocks"):
            call(*case.decode_arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.randn(2, 4, 32)}, "query has head_dim 32, the cache 16"),
        ({"query": torch.randn(2, 64)}, r"query must be floating point \[tokens, Hq, D\]"),
        ({"query": torch.ones(2, 4, 16, dtype=torch.int64)}, "query must be floating point"),
        ({"query": torch.randn(3, 4, 16)}, "2 sequences need a query_start_loc of 3 entries"),
        ({"key_cache": torch.randn(9, 2, 16)}, "key_cache must be"),
        ({"value_cache": torch.randn(7, 2, 4, 8)}, r"value storage has shape \(7, 2, 4, 8\)"),
        ({"value_cache": torch.randn(7, 2, 4, 16).double()}, "key and value storage differ"),
        ({"seq_lens": int32(3, -9)}, r"seq_lens\[1\] is -9"),
        ({"seq_lens": int32(3, 90)}, r"seq_lens\[1\] = 90 needs 23 blocks of 4, block_tables has 5 columns"),
        ({"seq_lens": int32(3)}, r"block_tables must be \[B, M\] and seq_lens \[B\]"),
        ({"seq_lens": torch.tensor([3.0, 9.0])}, "seq_lens must be int32"),
        ({"block_tables": torch.zeros(2, 3)}, "block_tables must be int32"),
        ({"out": torch.empty(2, 4, 8)}, r"out is torch.float32 \(2, 4, 8\)"),
        (
            {"backend": "cuda"},
            "backend='cuda' is unknown; choose one of 'triton', 'flashinfer', 'cpu', 'torch', 'reference'",
        ),
    ],
)
def test_wrong_arguments(change: dict[str, object], message: str) -> None:
    case = make_case([3, 9])
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    arguments: dict[str, object] = dict(zip(names, case.decode_arguments, strict=True)) | change
    with pytest.raises(ValueError, match=message):
        paged_attention_online(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (int32(0, 2), "2 sequences need a query_start_loc of 3 entries"),
        (int32(0, 2, 5), "must run from 0 to 4 tokens, it runs from 0 to 5"),
        (int32(1, 2, 4), "must run from 0 to 4 tokens, it runs from 1 to 4"),
        (int32(0, 6, 4), "falls from 6 to 4 at sequence 1"),
        (int32(0, 4, 4), r"sequence 0 has 4 queries but seq_lens\[0\] is 3"),
        (torch.tensor([0.0, 2.0, 4.0]), "query_start_loc must be int32"),
    ],
)
def test_wrong_query_start_loc(starts: torch.Tensor, message: str) -> None:
    case = make_case([3, 9], [2, 2])
    for call in (paged_attention_varlen, paged_attention_reference):
        with pytest.raises(ValueError, match=message):
            call(*case.decode_arguments, starts)


def test_write_checks_shapes_and_slots() -> None:
    cache = torch.zeros(2, 4, 2, 4, 8).unbind(0)
    tokens = torch.ones(3, 2, 8)
    with pytest.raises(ValueError, match=r"value has shape \(3, 1, 8\), expected \[T, Hkv, D\] = \(3, 2, 8\)"):
        write_kv_cache(tokens, tokens[:, :1], *cache, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="slot_mapping must be int64"):
        write_kv_cache(tokens, tokens, *cache, torch.tensor([0.0, 1.0, 2.0]))
    with pytest.raises(IndexError, match="slot 16 is outside the pool: valid slots are 0 to 15"):
        write_kv_cache(tokens, tokens, *cache, torch.tensor([0, 16, 2]))
    assert all((c == 0).all() for c in cache)
