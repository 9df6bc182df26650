"""The back end "flashinfer": our blocks become its pages. Its kernels are replaced by float64 on the same pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import paged_flashinfer
import pytest
import torch
from paged_case import PagedCase, assert_near, make_case

from minipaged.errors import BackendUnavailableError
from minipaged.kv.paged_cache import PagedKVCache
from minipaged.ops import get_backend, paged_attention_online, paged_attention_varlen, registry
from minipaged.ops.backend import AttentionBatch
from minipaged.ops.triton import flashinfer_backend as module
from minipaged.ops.triton.flashinfer_backend import FlashInferBackend

TOLERANCE = 0.012  # of bfloat16 results near 1


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInferBackend:
    monkeypatch.setitem(sys.modules, "flashinfer", paged_flashinfer)
    for wrapper in (
        paged_flashinfer.BatchDecodeWithPagedKVCacheWrapper, paged_flashinfer.BatchPrefillWithPagedKVCacheWrapper
    ):  # fmt: skip
        monkeypatch.setattr(wrapper, "plans", 0)
    return FlashInferBackend()


def case_of(lengths: Sequence[int], queries: Sequence[int] | None = None, **options: object) -> PagedCase:
    shape: dict[str, object] = {"head_dim": 64, "dtype": torch.bfloat16, **options}
    return make_case(lengths, queries, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (4, 4)])
def test_decode(backend: FlashInferBackend, block_size: int, heads: tuple[int, int]) -> None:
    """Full and part-filled last pages, shuffled blocks, NaN and rubbish around them."""
    case = case_of([1, 15, 16, 17, 256, 300], block_size=block_size, num_heads=heads[0], num_kv_heads=heads[1])
    assert_near(paged_attention_online(*case.decode_arguments, backend=backend), case.expected(), TOLERANCE)
    assert paged_flashinfer.BatchDecodeWithPagedKVCacheWrapper.plans == 1
    (wrapper,) = backend._wrappers.values()
    assert wrapper.use_tensor_cores is (heads[0] // heads[1] >= 4)


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([9, 30, 200], [9, 7, 200]),  # prefill, with and without history
        ([40, 9, 30, 17], [1, 1, 30, 4]),  # decodes first, as the engine sends them
        ([30, 9, 17, 8], [5, 1, 17, 1]),  # in any order
        ([0, 9, 0, 33], [1, 1, 4, 3]),  # rows without a token give zeros
        ([5, 9, 33], [0, 1, 3]),  # a row without a query
        ([0, 0], [1, 3]),
    ],
)
def test_mixed_batches(backend: FlashInferBackend, lengths: list[int], queries: list[int]) -> None:
    case = case_of(lengths, queries, block_size=4)
    assert_near(paged_attention_varlen(*case.arguments, backend=backend), case.expected(), TOLERANCE)
    out = torch.full(case.query.shape, torch.nan)
    paged_attention_varlen(*case.arguments, backend=backend, out=out, scale=0.3)
    assert_near(out, case.expected(0.3), TOLERANCE)


def test_a_batch_without_rows(backend: FlashInferBackend) -> None:
    assert paged_attention_online(*case_of([]).decode_arguments, backend=backend).shape == (0, 4, 64)


def test_shapes_that_flashinfer_does_not_know_go_to_triton(backend: FlashInferBackend) -> None:
    both = case_of([9, 30], num_heads=2, num_kv_heads=1, block_size=4)
    strided = torch.stack([both.key_cache, both.value_cache], dim=2)
    both.key_cache, both.value_cache = strided[:, :, 0], strided[:, :, 1]
    for case in (case_of([9, 30], dtype=torch.float32), case_of([9, 30], head_dim=80), both):
        out = paged_attention_online(*case.decode_arguments, backend=backend)
        assert_near(out, case.expected(), TOLERANCE)
    assert backend._wrappers == {}


def test_one_plan_serves_all_layers_and_the_next_step_is_planned_again(backend: FlashInferBackend) -> None:
    first, second = case_of([9, 30], [1, 5]), case_of([12, 7], [1, 7], seed=1)

    def batch_of(case: PagedCase) -> AttentionBatch:
        nothing = torch.empty(0, dtype=torch.int64)
        lens = case.seq_lens
        return AttentionBatch(nothing, nothing, case.block_tables, lens, case.query_start_loc, 7, int(lens.max()), 1)

    for case in (first, second, first):
        plan = backend.plan(batch_of(case))
        for factor in (1, 2, 1):
            cache = PagedKVCache.from_tensors(case.key_cache, case.value_cache * factor)
            assert_near(backend.attention(case.query, cache, plan), factor * case.expected(), factor * TOLERANCE)
    old, new = backend.plan(batch_of(first)), backend.plan(batch_of(second))
    for case, plan in ((first, old), (second, new), (first, old)):
        cache = PagedKVCache.from_tensors(case.key_cache, case.value_cache)
        assert_near(backend.attention(case.query, cache, plan), case.expected(), TOLERANCE)
    assert paged_flashinfer.BatchDecodeWithPagedKVCacheWrapper.plans == 6
    assert paged_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plans == 6


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="'flashinfer' cannot run on cpu: it runs on CUDA devices"):
        get_backend("flashinfer", "cpu")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    reason = str(module.unavailable_reason("cuda"))
    assert reason == "the package flashinfer is not installed (pip install flashinfer-python)"
    monkeypatch.setattr(module, "find_spec", lambda name: True)

    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open\nmore")

    monkeypatch.setattr(module, "import_module", broken)
    reason = str(module.unavailable_reason("cuda"))
    assert reason == "the package flashinfer cannot be imported: OSError: libcudart.so.13: cannot open"
    monkeypatch.setattr(module, "import_module", lambda name: object())
    assert str(module.unavailable_reason("cuda")) == "this flashinfer has no BatchDecodeWithPagedKVCacheWrapper"
    monkeypatch.setattr(module, "import_module", lambda name: paged_flashinfer)
    if not torch.cuda.is_available():
        assert module.unavailable_reason("cuda") == "torch finds no CUDA device"


def test_nobody_gets_it_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_unavailable_reason", lambda name, device: None)
    assert list(registry.available_backends("cuda"))[:2] == ["triton", "flashinfer"]
    assert get_backend(None, "cuda").name == "triton"
    assert get_backend("flashinfer", "cuda").name == "flashinfer"
    assert "flashinfer" not in registry.backend_note("torch", "cuda")
