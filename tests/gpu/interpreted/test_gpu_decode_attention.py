"""Decode attention of the Triton back end, interpreted, against plain softmax attention in float64 (CASES section 2).

A program of the interpreter takes milliseconds, so shapes are small and share batches.
"""

from __future__ import annotations

import pytest
import torch
from paged_case import PagedCase, assert_near, make_case

from minipaged.errors import BackendUnavailableError
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import get_backend, paged_attention_online

LENGTHS = (1, 3, 4, 5, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1025)


def attend(case: PagedCase, **options: object) -> torch.Tensor:
    return paged_attention_online(*case.decode_arguments, backend="triton", **options)  # type: ignore[arg-type]


def test_c24_every_length() -> None:
    """C24, C19: shuffled blocks, NaN in every unused slot, lengths around tiles of 64 and splits of 512."""
    case = make_case(LENGTHS, head_dim=16, block_size=16)
    assert_near(attend(case), case.expected(), 1e-5)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads"),
    [
        (16, 1, (6, 2)), (24, 3, (4, 1)), (32, 5, (14, 2)), (40, 8, (4, 4)), (64, 16, (8, 2)), (80, 4, (4, 2)),
        (96, 32, (8, 2)), (128, 16, (4, 2)), (128, 64, (8, 2)), (248, 7, (2, 2)), (256, 256, (2, 1)),
    ],
)  # fmt: skip
def test_c24_every_head_dim_and_block_size(head_dim: int, block_size: int, heads: tuple[int, int]) -> None:
    case = make_case([1, 70, 515], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size)
    assert_near(attend(case), case.expected(), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.012), (torch.float16, 0.0015)])
def test_sixteen_bit_types(dtype: torch.dtype, tolerance: float) -> None:
    """The interpreter computes in float32 (its bfloat16 products are wrong), so this tests loads, stores, rounding."""
    case = make_case([5, 130, 600], head_dim=64, block_size=16, dtype=dtype)
    out = attend(case)
    assert out.dtype == dtype
    relative = (out.double() - case.expected()).abs() / case.expected().abs().clamp(min=1)
    assert relative.max() < tolerance


def test_query_and_cache_of_different_dtypes() -> None:
    case = make_case([5, 70], cache_dtype=torch.bfloat16)
    assert_near(attend(case), case.expected(), 1e-5)
    wide = torch.empty(case.query.shape, dtype=torch.float32)
    half = make_case([9, 30], dtype=torch.bfloat16)
    assert_near(attend(half, out=wide), half.expected(), 1e-5)


def test_c02_c20_what_stands_after_the_last_needed_block_is_not_read() -> None:
    """C02, C20: other block ids, and blocks of NaN or large numbers; bit for bit the same result."""
    case = make_case([1, 4, 5, 23])
    expected = attend(case)
    needed = -(-case.seq_lens // 4)
    after = torch.arange(case.block_tables.shape[1]) >= needed[:, None]
    spare = next(b for b in range(case.key_cache.shape[0]) if b not in case.block_tables[~after].tolist())
    for padding in (-1, 2**31 - 1, spare):
        case.block_tables[after] = padding
        case.key_cache[spare] = case.value_cache[spare] = 1e4
        assert torch.equal(attend(case), expected)


def test_c19_infinities_and_nans_in_unused_slots() -> None:
    case = make_case([5, 9, 66])
    expected = case.expected()
    unused_k, unused_v = case.key_cache.isnan(), case.value_cache.isnan()
    for in_k, in_v in ((torch.inf, torch.nan), (-torch.inf, torch.inf), (torch.nan, 0.0)):
        case.key_cache[unused_k] = in_k
        case.value_cache[unused_v] = in_v
        assert_near(attend(case), expected, 1e-5)


@pytest.mark.parametrize("lengths", [[3, 0, 5], [0], [600, 0, 1]])
def test_c21_a_sequence_without_tokens_gives_zeros(lengths: list[int]) -> None:
    """C21: also where the splits of a longer batch mate leave it only empty partial results."""
    case = make_case(lengths)
    out = torch.full_like(case.query, torch.nan)
    assert attend(case, out=out) is out
    assert_near(out, case.expected(), 1e-5)
    assert (out[torch.tensor(lengths) == 0] == 0).all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (6, 2), (8, 2), (28, 4), (32, 8), (4, 4), (4, 1)])
def test_c23_query_heads_read_their_kv_head(num_heads: int, num_kv_heads: int) -> None:
    case = make_case([9], num_heads=num_heads, num_kv_heads=num_kv_heads)
    case.value_cache[:] = torch.arange(1.0, num_kv_heads + 1)[:, None, None]
    heads = torch.arange(num_heads) // (num_heads // num_kv_heads) + 1.0
    out = attend(case)
    assert_near(out, heads[None, :, None].expand(out.shape), 1e-6)


def test_c25_fp16_scores_do_not_overflow() -> None:
    case = make_case([50, 7], head_dim=128, block_size=16, dtype=torch.float16)
    case.query.fill_(40)
    case.key_cache.fill_(40)
    means = torch.stack([v.double().mean(0).repeat_interleave(2, dim=0) for v in case.values])
    assert_near(attend(case), means, 2e-3)


def test_scale() -> None:
    case = make_case([12, 40], head_dim=32)
    assert_near(attend(case, scale=0.7), case.expected(0.7), 1e-5)


def test_no_sequences() -> None:
    assert attend(make_case([])).shape == (0, 4, 16)


def test_the_same_bits_whatever_the_batch_and_the_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence alone, among others, with its splits taken in turns by one program, and with other blocks."""
    from minipaged.ops.triton.kernels import decode_attention

    case = make_case([520, 40, 1030])
    together = attend(case)
    for row in range(3):
        one = slice(row, row + 1)
        arguments = (case.query[one], case.key_cache, case.value_cache, case.block_tables[one], case.seq_lens[one])
        assert torch.equal(paged_attention_online(*arguments, backend="triton"), together[one])
    monkeypatch.setattr(decode_attention, "PROGRAMS", 1)
    assert torch.equal(attend(case), together)
    moved = make_case([40], block_size=16, seed=1)
    moved.query.copy_(case.query[1:2])
    for logical, block in enumerate(moved.block_tables[0, :3].tolist()):
        tokens = slice(16 * logical, min(40, 16 * logical + 16))
        moved.key_cache[block, :, : tokens.stop - tokens.start] = case.keys[1][tokens].transpose(0, 1)
        moved.value_cache[block, :, : tokens.stop - tokens.start] = case.values[1][tokens].transpose(0, 1)
    assert torch.equal(attend(moved), together[1:2])


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_splits_are_joined_from_left_to_right(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than are joined at a time (as beyond 8192 tokens); the largest scores come in the last one."""
    from minipaged.ops.triton.kernels import decode_attention

    monkeypatch.setattr(decode_attention, "JOIN", at_a_time)
    case = make_case([1700, 3], num_heads=2, num_kv_heads=1, block_size=16)
    for block in case.block_tables[0, 100:106].tolist():
        case.key_cache[block] *= 5
    case.keys[0][1600:1696] *= 5
    assert_near(attend(case), case.expected(), 1e-5)


def test_strided_caches_queries_and_outputs() -> None:
    """K and V interleaved, heads inside tokens, padded rows; a query inside qkv; an `out` with padding."""
    case = make_case([5, 70], head_dim=32)
    expected = case.expected()
    qkv = torch.full((2, 4 * 32 + 64), torch.nan)
    qkv[:, : 4 * 32] = case.query.reshape(2, -1)
    query = qkv[:, : 4 * 32].view(2, 4, 32)
    both = torch.stack([case.key_cache, case.value_cache], dim=2)
    tokens_first = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in (case.key_cache, case.value_cache)]
    wide = torch.full((*case.key_cache.shape[:3], 40), torch.nan)
    wide[..., :32] = case.key_cache
    for caches in ((both[:, :, 0], both[:, :, 1]), tokens_first, (wide[..., :32], case.value_cache)):
        out = torch.full((2, 4 * 32 + 16), torch.nan)[:, : 4 * 32].view(2, 4, 32)
        paged_attention_online(query, *caches, case.block_tables, case.seq_lens, out=out, backend="triton")
        assert_near(out, expected, 1e-5)
    query_t = query.transpose(1, 2).contiguous().transpose(1, 2)
    out_t = torch.empty(2, 32, 4).transpose(1, 2)
    paged_attention_online(query_t, *tokens_first, case.block_tables, case.seq_lens, out=out_t, backend="triton")
    assert_near(out_t, expected, 1e-5)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    case = make_case([5])
    turned = case.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="key_cache has stride 4 in its last dimension"):
        paged_attention_online(case.query, turned, case.value_cache, case.block_tables, case.seq_lens, backend="triton")
    double = make_case([5], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float32, float16 and bfloat16, not torch\.float64"):
        attend(double)


def test_pool_beyond_2_to_the_31_elements() -> None:
    """64-bit offsets: the last blocks of a pool of 2.2e9 elements per tensor; memory holds only the touched ones."""
    cache = PagedKVCache(16800, 2, 256, 256)
    assert cache.key_cache.numel() > 2**31
    last = cache.num_blocks - 1
    case = make_case([300], num_heads=2, num_kv_heads=2, head_dim=256, block_size=256, dtype=torch.bfloat16)
    slots = torch.cat([torch.arange(last * 256, last * 256 + 256), torch.arange(256, 300)])
    get_backend("triton").write_kv(case.keys[0], case.values[0], cache, slots)
    assert torch.equal(cache.gather([last, 1], 300)[0], case.keys[0])
    tables = torch.tensor([[last, 1, -1]], dtype=torch.int32)
    out = paged_attention_online(
        case.query, cache.key_cache, cache.value_cache, tables, case.seq_lens, backend="triton"
    )
    assert_near(out, case.expected(), 0.02)


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailableError, match="it takes CPU tensors only under TRITON_INTERPRET=1"):
        get_backend("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert get_backend("triton").name == "triton"
    assert get_backend(None).name != "triton"  # the interpreter is only for who asks for it
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="torch finds no CUDA device"):
            get_backend("triton", "cuda")
