"""Chunked prefill of the Triton back end, interpreted, against plain softmax attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_case import PagedCase, assert_near, make_case

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import AttentionBatch, get_backend, paged_attention_varlen


def attend(case: PagedCase, **options: object) -> torch.Tensor:
    return paged_attention_varlen(*case.arguments, backend="triton", **options)  # type: ignore[arg-type]


def test_c22_queries_are_the_last_tokens() -> None:
    """C22: kv 11, q 3: query i sees keys 0 .. 8 + i."""
    case = make_case([11], [3], num_heads=1, num_kv_heads=1)
    case.value_cache.zero_()
    for position in range(11):
        block = int(case.block_tables[0, position // 4])
        case.value_cache[block, 0, position % 4, position] = 1.0
    out = attend(case)
    for i in range(3):
        assert (out[i, 0] > 1e-3).tolist() == [position <= 8 + i for position in range(16)]


@pytest.mark.parametrize("chunk", [5, 16])
def test_c22_any_chunking_gives_the_same_bits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C22: a prompt of 83 in chunks, query by query; chunks of one go through the decode kernel and are only near.

    The interpreter multiplies with numpy's BLAS, on some processors in an order that depends on where in the matrix a
    row lies, which no matrix unit does: here products are exact before they are rounded.
    """
    product = np.matmul

    def exact(a: np.ndarray, b: np.ndarray, dtype: object = None) -> np.ndarray:
        return product(a.astype(np.float64), b.astype(np.float64)).astype(dtype or a.dtype)

    monkeypatch.setattr(np, "matmul", exact)
    whole = make_case([83], [83], block_size=3)
    expected, bits = whole.expected(), attend(whole)
    assert_near(bits, expected, 1e-5)
    for start in range(0, 83, chunk):
        stop = min(start + chunk, 83)
        out = paged_attention_varlen(*whole.chunk(start, stop), backend="triton")
        assert_near(out, expected[start:stop], 1e-5)
        assert stop - start == 1 or torch.equal(out, bits[start:stop])


@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads"),
    [(16, 1, (6, 2)), (24, 3, (4, 1)), (40, 5, (14, 2)), (64, 16, (8, 2)), (80, 4, (3, 3)), (128, 16, (4, 2)),
     (256, 256, (2, 1))],
)  # fmt: skip
def test_mixed_batches(head_dim: int, block_size: int, heads: tuple[int, int]) -> None:
    """Decodes first, one-shot prefills, chunks with history, a row without queries, a decode among the chunks."""
    lengths, queries = [70, 3, 20, 90, 9, 17, 1], [1, 1, 20, 5, 0, 1, 1]
    case = make_case(
        lengths, queries, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size
    )
    assert_near(attend(case), case.expected(), 1e-5)


def test_the_number_of_leading_decodes_is_a_hint_only() -> None:
    case = make_case([30, 70, 20], [1, 1, 9])
    backend = get_backend("triton")
    cache = PagedKVCache.from_tensors(case.key_cache, case.value_cache)
    nothing = torch.empty(0, dtype=torch.int64)
    for hint in (0, 1, 2):
        batch = AttentionBatch(
            nothing, nothing, case.block_tables, case.seq_lens, case.query_start_loc, 9, 512, num_decode_rows=hint
        )
        assert_near(backend.attention(case.query, cache, backend.plan(batch)), case.expected(), 1e-5)


def test_rows_of_at_most_one_query() -> None:
    """A decode batch in which a sequence has no query: tokens and rows are not the same numbers."""
    case = make_case([30, 9, 70], [1, 0, 1])
    assert_near(attend(case), case.expected(), 1e-5)


def test_tiles_of_several_sequences_and_long_histories() -> None:
    case = make_case([150, 90], [50, 23], block_size=16)
    assert_near(attend(case), case.expected(), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.012), (torch.float16, 0.0015)])
def test_sixteen_bit_types(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case([130, 40], [1, 33], head_dim=64, block_size=16, dtype=dtype)
    out = attend(case)
    assert out.dtype == dtype
    relative = (out.double() - case.expected()).abs() / case.expected().abs().clamp(min=1)
    assert relative.max() < tolerance


def test_c21_empty_rows_give_zeros() -> None:
    """C21: length 0 with one query, with several, and with none."""
    case = make_case([0, 5, 0, 0, 8], [1, 5, 3, 0, 1])
    out = attend(case, out=torch.full_like(case.query, torch.nan))
    assert_near(out, case.expected(), 1e-5)
    assert (out[0] == 0).all()
    assert (out[6:9] == 0).all()


def test_c20_padding_of_the_tables_makes_no_difference() -> None:
    case = make_case([23, 9], [9, 4])
    expected = attend(case)
    needed = -(-case.seq_lens // 4)
    for padding in (-1, 0, 999, 2**31 - 1):
        case.block_tables[torch.arange(case.block_tables.shape[1]) >= needed[:, None]] = padding
        assert torch.equal(attend(case), expected)
