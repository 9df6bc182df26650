"""Decode attention of both back ends against plain softmax attention in float64 (CASES section 2)."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_case import PagedCase, assert_near, make_case

from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import paged_attention_online, paged_attention_reference

HEAD_DIMS = (16, 24, 32, 40, 64, 80, 96, 128, 256)
BLOCK_SIZES = (1, 3, 4, 16, 32, 256)
LENGTHS = (1, 3, 4, 5, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1025)
RATIOS = ((4, 2), (6, 2), (8, 2), (28, 4), (32, 8), (4, 4), (4, 1))
SHAPES = tuple(itertools.product(HEAD_DIMS, BLOCK_SIZES))


@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_c24_every_head_dim_block_size_and_length(head_dim: int, block_size: int) -> None:
    """C24, C19: all lengths in one batch, shuffled blocks, NaN in every unused slot; head ratios take turns."""
    num_heads, num_kv_heads = RATIOS[SHAPES.index((head_dim, block_size)) % len(RATIOS)]
    case = make_case(LENGTHS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    assert_near(paged_attention_online(*case.decode_arguments, backend="torch"), case.expected(), 1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_c24_one_sequence_alone(length: int) -> None:
    """C24: a batch of one takes another way than a mixed batch (no mask, no padding)."""
    case = make_case([length], head_dim=64, block_size=16)
    assert_near(paged_attention_online(*case.decode_arguments, backend="torch"), case.expected(), 1e-5)


@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 1), (40, 3), (128, 16), (256, 256)])
def test_c24_reference(head_dim: int, block_size: int) -> None:
    case = make_case([1, 3, 4, 5, 15, 16, 17, 130], head_dim=head_dim, block_size=block_size)
    reference = paged_attention_reference(*case.decode_arguments)
    assert reference.dtype == torch.float64
    assert_near(reference, case.expected(), 1e-12)
    rounded = paged_attention_online(*case.decode_arguments, backend="reference")
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, reference.float())


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_c24_full_product(head_dim: int, block_size: int, ratio: tuple[int, int]) -> None:
    case = make_case(
        LENGTHS, num_heads=ratio[0], num_kv_heads=ratio[1], head_dim=head_dim, block_size=block_size, seed=1
    )
    expected = case.expected()
    assert_near(paged_attention_online(*case.decode_arguments, backend="torch"), expected, 1e-5)
    assert_near(paged_attention_reference(*case.decode_arguments), expected, 1e-12)


def test_every_internal_path(path: str) -> None:
    """C24: splits, groups of different length, masks and merges give what one pass gives."""
    case = make_case(LENGTHS, num_heads=6, head_dim=32, block_size=3)
    assert_near(paged_attention_online(*case.decode_arguments, backend="torch"), case.expected(), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.012), (torch.float16, 0.0015)])
def test_sixteen_bit_types(path: str, dtype: torch.dtype, tolerance: float) -> None:
    """The result keeps query's dtype and is as near as that dtype allows."""
    case = make_case(LENGTHS, head_dim=64, block_size=16, dtype=dtype)
    out = paged_attention_online(*case.decode_arguments, backend="torch")
    assert out.dtype == dtype
    relative = (out.double() - case.expected()).abs() / case.expected().abs().clamp(min=1)
    assert relative.max() < tolerance


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_query_and_cache_of_different_dtypes(backend: str) -> None:
    """A float32 query over a bfloat16 cache is computed in float32."""
    case = make_case([5, 70, 33], cache_dtype=torch.bfloat16)
    out = paged_attention_online(*case.decode_arguments, backend=backend)
    assert out.dtype == torch.float32
    assert_near(out, case.expected(), 1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c02_an_extra_block_in_the_table_is_not_read(backend: str) -> None:
    """C02: seq_len 32 at block size 16 with a third table entry whose block is NaN, or large."""
    case = make_case([32], block_size=16)
    expected = case.expected()
    spare = next(b for b in range(case.key_cache.shape[0]) if b not in case.block_tables[0, :2].tolist())
    case.block_tables[0, 2] = spare
    for content in (torch.nan, 1e4):
        case.key_cache[spare] = content
        case.value_cache[spare] = content
        assert_near(paged_attention_online(*case.decode_arguments, backend=backend), expected, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c19_infinities_and_nans_in_unused_slots(backend: str) -> None:
    """C19: also inf (inf * 0 is NaN as well), in K alone, in V alone, and in a sequence padded by a longer one."""
    case = make_case([5, 9, 200])
    expected = case.expected()
    unused_k, unused_v = case.key_cache.isnan(), case.value_cache.isnan()
    for in_k, in_v in ((torch.inf, torch.nan), (-torch.inf, torch.inf), (0.0, torch.nan), (torch.nan, 0.0)):
        case.key_cache[unused_k] = in_k
        case.value_cache[unused_v] = in_v
        assert_near(paged_attention_online(*case.decode_arguments, backend=backend), expected, 1e-5)


@pytest.mark.parametrize("padding", [-1, 0, 999, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c20_table_padding_makes_no_difference(backend: str, padding: int) -> None:
    case = make_case([1, 4, 5, 23])
    expected = paged_attention_online(*case.decode_arguments, backend=backend)
    needed = -(-case.seq_lens // 4)
    case.block_tables[torch.arange(case.block_tables.shape[1]) >= needed[:, None]] = padding
    assert torch.equal(paged_attention_online(*case.decode_arguments, backend=backend), expected)


@pytest.mark.parametrize("lengths", [[3, 0, 5], [0], [0, 0, 7], [600, 0, 1]])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c21_a_sequence_without_tokens_gives_zeros(path: str, backend: str, lengths: list[int]) -> None:
    """C21: and its row of `out` is overwritten, not left."""
    case = make_case(lengths)
    out = torch.full_like(case.query, torch.nan)
    assert paged_attention_online(*case.decode_arguments, backend=backend, out=out) is out
    assert_near(out, case.expected(), 1e-5)
    assert (out[torch.tensor(lengths) == 0] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), RATIOS)
def test_c23_query_heads_read_their_kv_head(num_heads: int, num_kv_heads: int, backend: str) -> None:
    """C23: V of kv head h is h + 1 everywhere, so query head q returns q // (Hq / Hkv) + 1."""
    case = make_case([9, 2], num_heads=num_heads, num_kv_heads=num_kv_heads)
    case.value_cache[:] = torch.arange(1.0, num_kv_heads + 1)[:, None, None]
    out = paged_attention_online(*case.decode_arguments, backend=backend)
    heads = torch.arange(num_heads) // (num_heads // num_kv_heads) + 1.0
    assert_near(out, heads[None, :, None].expand(out.shape), 1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_c25_fp16_scores_do_not_overflow(path: str, backend: str) -> None:
    """C25: q = k = 40 at head_dim 128: the dot product is 204 800, the weights are uniform."""
    case = make_case([50, 7], head_dim=128, block_size=16, dtype=torch.float16)
    case.query.fill_(40)
    case.key_cache.fill_(40)
    out = paged_attention_online(*case.decode_arguments, backend=backend)
    means = torch.stack([v.double().mean(0).repeat_interleave(2, dim=0) for v in case.values])
    assert_near(out, means, 2e-3)


@pytest.mark.parametrize("scale", [1.0, 0.05])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_scale(backend: str, scale: float) -> None:
    case = make_case([12, 40], head_dim=32)
    assert_near(
        paged_attention_online(*case.decode_arguments, scale=scale, backend=backend), case.expected(scale), 1e-5
    )


def test_no_sequences() -> None:
    case = make_case([])
    for backend in ("reference", "torch"):
        assert paged_attention_online(*case.decode_arguments, backend=backend).shape == (0, 4, 16)


def _strided(case: PagedCase, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same caches in memory of another layout."""
    n, h, bs, d = case.key_cache.shape
    if layout == "k and v interleaved by block":
        both = torch.stack([case.key_cache, case.value_cache], dim=1)
        return both[:, 0], both[:, 1]
    if layout == "k and v interleaved by head":
        both = torch.stack([case.key_cache, case.value_cache], dim=2)
        return both[:, :, 0], both[:, :, 1]
    if layout == "heads inside tokens":
        caches = (case.key_cache, case.value_cache)
        k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches)
        return k, v
    if layout == "different layouts":
        return case.key_cache, case.value_cache.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2)
    wide = torch.full((n, h, bs, d + 8), torch.nan)  # "padded rows"
    wide[..., :d] = case.key_cache
    return wide[..., :d], case.value_cache


@pytest.mark.parametrize(
    "layout",
    [
        "k and v interleaved by block",
        "k and v interleaved by head",
        "heads inside tokens",
        "different layouts",
        "padded rows",
    ],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_strided_caches_and_queries(backend: str, num_kv_heads: int, layout: str) -> None:
    """Views are read where they are: other cache layouts, a query inside qkv, an `out` with padded rows."""
    case = make_case([5, 70, 33], num_kv_heads=num_kv_heads, head_dim=32)
    expected = case.expected()
    key_cache, value_cache = _strided(case, layout)
    qkv = torch.full((3, 4 * 32 + 64), torch.nan)
    qkv[:, : 4 * 32] = case.query.reshape(3, -1)
    query = qkv[:, : 4 * 32].view(3, 4, 32)
    out = torch.full((3, 4 * 32 + 16), torch.nan)[:, : 4 * 32].view(3, 4, 32)
    paged_attention_online(query, key_cache, value_cache, case.block_tables, case.seq_lens, out=out, backend=backend)
    assert_near(out, expected, 1e-5)


def test_out_decides_the_dtype() -> None:
    case = make_case([9, 30], dtype=torch.bfloat16)
    out = torch.empty(case.query.shape, dtype=torch.float32)
    for backend in ("reference", "torch"):
        assert_near(paged_attention_online(*case.decode_arguments, out=out, backend=backend), case.expected(), 0.02)


def test_scratch_is_shared_by_inference_mode_and_plain_calls() -> None:
    """A buffer that was created under inference mode may not be written outside it: ours are plain tensors."""
    case = make_case([900, 30])
    with torch.inference_mode():
        first = paged_attention_online(*case.decode_arguments, backend="torch")
    again = paged_attention_online(*case.decode_arguments, backend="torch")
    assert torch.equal(first, again)


def test_gradients_are_not_tracked() -> None:
    case = make_case([9, 30])
    case.query.requires_grad_()
    case.key_cache.requires_grad_()
    assert not paged_attention_online(*case.decode_arguments, backend="torch").requires_grad


def test_pool_beyond_2_to_the_31_elements() -> None:
    """64-bit offsets: the last blocks of a pool of 2.2e9 elements per tensor; memory holds only the touched ones."""
    cache = PagedKVCache(4200, 8, 256, 256)
    assert cache.key_cache.numel() > 2**31
    last = cache.num_blocks - 1
    case = make_case([300], num_heads=8, num_kv_heads=8, head_dim=256, block_size=256, dtype=torch.bfloat16)
    slots = torch.cat([torch.arange(last * 256, last * 256 + 256), torch.arange(256, 300)])
    cache.write(case.keys[0], case.values[0], slots)
    tables = torch.tensor([[last, 1, -1]], dtype=torch.int32)
    for backend in ("reference", "torch"):
        out = paged_attention_online(
            case.query, cache.key_cache, cache.value_cache, tables, case.seq_lens, backend=backend
        )
        assert_near(out, case.expected(), 0.02)
    assert torch.equal(cache.gather([last, 1], 300)[0], case.keys[0])
