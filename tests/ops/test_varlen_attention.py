"""Mixed prefill and decode against plain causal attention in float64 (C21, C22)."""

from __future__ import annotations

import pytest
import torch
from paged_case import assert_near, make_case

from minipaged.ops import paged_attention_reference, paged_attention_varlen


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c22_the_last_queries_see_everything_before_them(backend: str) -> None:
    """C22: 11 keys, 3 queries: query i sees keys 0 .. 8 + i. V = one-hot of the position shows who saw what."""
    case = make_case([11], [3], num_heads=1, num_kv_heads=1, head_dim=16, block_size=4)
    case.query.zero_()  # uniform weights
    for position in range(11):
        block = int(case.block_tables[0, position // 4])
        case.value_cache[block, 0, position % 4] = torch.eye(16)[position]
    out = paged_attention_varlen(*case.arguments, backend=backend)
    for i in range(3):
        assert (out[i, 0] > 1e-3).tolist() == [position <= 8 + i for position in range(16)]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16, 23])
def test_c22_any_chunking_of_a_prompt(backend: str, chunk: int) -> None:
    """C22: a prompt of 23 in chunks equals the one-shot prefill, query by query."""
    whole = make_case([23], [23])
    expected = whole.expected()
    for start in range(0, 23, chunk):
        stop = min(start + chunk, 23)
        out = paged_attention_varlen(*whole.chunk(start, stop), backend=backend)
        assert_near(out, expected[start:stop], 1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 256])
@pytest.mark.parametrize("head_dim", [16, 24, 80, 128, 256])
def test_mixed_batches(head_dim: int, block_size: int) -> None:
    """Decodes, one-shot prefills, chunks with history and a row without queries in one batch, in any order."""
    lengths = [300, 40, 1, 17, 260, 9, 515]
    queries = [1, 40, 1, 5, 128, 0, 2]
    case = make_case(lengths, queries, num_heads=8, head_dim=head_dim, block_size=block_size)
    assert_near(paged_attention_varlen(*case.arguments, backend="torch"), case.expected(), 1e-5)


def test_every_internal_path(path: str) -> None:
    case = make_case([700, 40, 1, 17, 660, 0], [1, 40, 1, 5, 600, 3], num_heads=6, head_dim=32, block_size=3)
    assert_near(paged_attention_varlen(*case.arguments, backend="torch"), case.expected(), 1e-5)


def test_reference_on_a_mixed_batch() -> None:
    case = make_case([30, 12, 0, 17], [1, 12, 2, 5], num_heads=6, block_size=3)
    assert_near(paged_attention_reference(*case.arguments), case.expected(), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.012), (torch.float16, 0.0015)])
def test_sixteen_bit_types(path: str, dtype: torch.dtype, tolerance: float) -> None:
    case = make_case([300, 40, 200], [1, 40, 64], head_dim=64, block_size=16, dtype=dtype)
    out = paged_attention_varlen(*case.arguments, backend="torch")
    assert out.dtype == dtype
    relative = (out.double() - case.expected()).abs() / case.expected().abs().clamp(min=1)
    assert relative.max() < tolerance


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c21_empty_rows_give_zeros(backend: str) -> None:
    """C21: length 0 with one query, with several, and with none."""
    case = make_case([0, 5, 0, 0, 8], [1, 5, 3, 0, 1])
    out = paged_attention_varlen(*case.arguments, out=torch.full_like(case.query, torch.nan), backend=backend)
    assert_near(out, case.expected(), 1e-5)
    assert (out[0] == 0).all()
    assert (out[6:9] == 0).all()


def test_queries_and_out_as_views() -> None:
    case = make_case([50, 9], [30, 1], head_dim=32)
    qkv = torch.full((31, 6 * 32), torch.nan)
    qkv[:, : 4 * 32] = case.query.reshape(31, -1)
    query = qkv[:, : 4 * 32].view(31, 4, 32)
    out = torch.empty(31, 4 * 32 + 16)[:, : 4 * 32].view(31, 4, 32)
    for backend in ("reference", "torch"):
        out.fill_(torch.nan)
        paged_attention_varlen(query, *case.arguments[1:], out=out, backend=backend)
        assert_near(out, case.expected(), 1e-5)


def test_a_long_chunk_never_writes_out_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's flash kernel the scores of one product stay below 256 queries x 2048 keys per head."""
    from minipaged.ops.torch import attention as torch_attention

    largest = 0
    plain = torch_attention.attend_plain

    def spy(q, k, v, **options):  # type: ignore[no-untyped-def]
        nonlocal largest
        largest = max(largest, q.shape[-2] * k.shape[-2])
        return plain(q, k, v, **options)

    monkeypatch.setattr(torch_attention, "flash_works", lambda dtype, device: False)
    monkeypatch.setattr(torch_attention, "attend_plain", spy)
    case = make_case([5000], [600], num_heads=1, num_kv_heads=1, block_size=16)
    assert_near(paged_attention_varlen(*case.arguments, backend="torch"), case.expected(), 1e-5)
    assert 0 < largest <= 256 * 2048
